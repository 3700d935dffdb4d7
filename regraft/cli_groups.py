"""Verbs in groups, `regraft probe` and `regraft recipes`. As in `cli`, heavy imports wait for the verb."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from regraft.cli_options import (
    CHECKS,
    FILES,
    RECIPE,
    RUNNING,
    AsJson,
    Device,
    Overrides,
    Overwrite,
    ProbeOverrides,
    RecipeName,
    first_line,
)
from regraft.errors import UserError

recipes = typer.Typer(help="List, read, copy and check recipes.", no_args_is_help=True)
probe = typer.Typer(help="Run small experiments that show what an update rule does.", no_args_is_help=True)


def _add_probe(name: str, recipes: str, example: str, text: str) -> None:
    """A verb of `regraft probe`; all have the same options. The first of the recipes is the default."""
    # Not in the annotation, which is read later, where these names mean something else.
    names = recipes.split(", ")
    shipped = typer.Argument(
        names[0],
        metavar="RECIPE",
        help=f"{recipes}, or a YAML file.",
        autocompletion=lambda incomplete: [name for name in names if name.startswith(incomplete)],
    )

    @probe.command(name, help=text, epilog=f"Example: regraft probe {name} {example}")
    def verb(
        recipe: str = shipped,
        set_: ProbeOverrides = None,
        out: Annotated[
            Path | None,
            typer.Option(
                metavar="DIR", help="Keep runs, tables, JSON and figures here.", rich_help_panel=FILES
            ),
        ] = None,
        device: Device = "cpu",
        jobs: Annotated[
            int,
            typer.Option(min=1, help="Runs at once, each in its own process.", rich_help_panel=RUNNING),
        ] = 1,
        minutes: Annotated[
            float | None,
            typer.Option(
                min=0,
                help="Begin no run that would end later; sum up those that are done.",
                rich_help_panel=RUNNING,
            ),
        ] = None,
        as_json: AsJson = False,
        overwrite: Overwrite = False,
    ) -> None:
        from regraft.probes.command import run_verb

        text = run_verb(
            name,
            recipe,
            set_ or (),
            out=out,
            device=device,
            jobs=jobs,
            minutes=minutes,
            as_json=as_json,
            overwrite=overwrite,
        )
        typer.echo(text)
        if out is not None:
            typer.echo(f"written: {out}", err=True)


_add_probe(
    "collision",
    "paper",
    "--out collision",
    "Two overlapping keys, one boosted, the other flooded: the paper's collision tables, recomputed.",
)
_add_probe(
    "belief",
    "analytic, small, full",
    "--out belief",
    "How near a rule or a trained layer comes to the Bayes predictor: bandits, and filtering of a scalar.",
)
_add_probe(
    "recall",
    "small, medium, full",
    "--out recall --jobs 2",
    "Layers that differ in the update rule alone learn to recall under collisions and of random keys.",
)
_add_probe(
    "mqar",
    "small, medium, widths, blocks, full",
    "--out mqar --jobs 2",
    "Layers learn to bind keys to values of one vocabulary, to overwrite some and to leave the others alone.",
)


@recipes.command("ls", epilog="Example: regraft recipes ls")
def recipes_ls() -> None:
    """List the shipped recipes."""
    from regraft.recipes import shipped

    table = Table("recipe", "what it does", box=None)
    for name, path in shipped().items():
        table.add_row(name, first_line(path))
    Console().print(table)


@recipes.command("show", epilog="Example: regraft recipes show demo --resolved")
def recipes_show(
    recipe: RecipeName,
    resolved: Annotated[
        bool, typer.Option("--resolved", help="Write every default out.", rich_help_panel=RECIPE)
    ] = False,
    set_: Overrides = None,
) -> None:
    """Print a recipe with its comments, or resolved: with overrides and every default."""
    from regraft.recipes import dump_recipe, load_recipe
    from regraft.recipes.load import recipe_text

    as_written = not resolved and not set_
    text = recipe_text(recipe) if as_written else dump_recipe(load_recipe(recipe, set_ or ()))
    typer.echo(text, nl=False)


@recipes.command("copy", epilog="Example: regraft recipes copy demo mine.yaml")
def recipes_copy(
    recipe: RecipeName,
    to: Annotated[Path | None, typer.Argument(metavar="FILE", help="RECIPE.yaml if not given.")] = None,
    overwrite: Overwrite = False,
) -> None:
    """Copy a recipe with its comments, to edit it."""
    from regraft.files import write_text
    from regraft.recipes.load import recipe_text

    text = recipe_text(recipe)
    target = to or Path(f"{Path(recipe).stem}.yaml")
    if target.exists() and not (overwrite and target.is_file()):
        raise UserError(target, "exists.", "choose another file name, or pass --overwrite.")
    write_text(target, text)
    typer.echo(f"{target}: edit it, then `regraft recipes validate {target}`")


@recipes.command("validate", epilog="Example: regraft recipes validate mine.yaml --set seed=1")
def recipes_validate(
    recipe: RecipeName,
    set_: Overrides = None,
    keys_only: Annotated[
        bool,
        typer.Option(
            "--keys-only",
            help="Keys, types and ranges alone; opens nothing but the recipe.",
            rich_help_panel=CHECKS,
        ),
    ] = False,
) -> None:
    """Check a recipe as far as it goes without training: keys, teacher, tokenizer, data, losses, memory."""
    from regraft.recipes import load_recipe

    loaded = load_recipe(recipe, set_ or ())
    if not keys_only:
        from regraft.distill.validate import validate

        for line in validate(loaded):
            typer.echo(line)
    stretches = ", ".join(f"{phase.name} {phase.tokens:,} tokens" for phase in loaded.phases)
    typer.echo(f"{recipe}: valid ({stretches})")


@recipes.command("schema", epilog="Example: regraft recipes schema > recipe.schema.json")
def recipes_schema() -> None:
    """Print the JSON Schema of a recipe: every key with its meaning, range and default."""
    from regraft.recipes.schema import json_schema

    typer.echo(json.dumps(json_schema(), indent=2))
