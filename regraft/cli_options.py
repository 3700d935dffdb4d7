"""Options that several verbs share, and the words that a shell completes them with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic import BaseModel
from typer.core import TyperCommand
from typer.models import OptionInfo

from regraft.recipes import Recipe, shipped
from regraft.recipes.problems import models_in
from regraft.recipes.schema import Target

# Panels of `--help`, in every verb by the same names.
MODEL, STUDENT, RECIPE, EVALUATION = "Model", "Student", "Recipe", "Evaluation"
CHECKS, RUNNING, FILES = "Checks", "Running", "Files"


def complete_recipe(incomplete: str) -> list[tuple[str, str]]:
    """Shipped recipes with their first line."""
    return [(name, first_line(path)) for name, path in shipped().items() if name.startswith(incomplete)]


def first_line(recipe: Path) -> str:
    """What a recipe says about itself in its first line."""
    return recipe.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")


def complete_model(incomplete: str) -> list[str]:
    """The one model that is always there; folders are the shell's own."""
    return [name for name in ("embedded",) if name.startswith(incomplete)]


def complete_layer_target(incomplete: str) -> list[str]:
    """`5=` and then every mixer that layer 5 can become."""
    layer, equals, _ = incomplete.partition("=")
    words = [f"{layer}={target}" for target in get_args(Target)] if equals else []
    return [word for word in words if word.startswith(incomplete)]


def complete_override(incomplete: str) -> list[str]:
    """Keys of a recipe such as `report.niah.`, and values where the schema lists them."""
    steps = incomplete.count(".") + 1
    words = (word for word in _overrides(Recipe, steps) if word.startswith(incomplete))
    return list(dict.fromkeys(words))


def _overrides(model: type[BaseModel], steps: int, path: str = "") -> Iterator[str]:
    """Paths of `steps` steps below a model: ending in `.` where it goes on, else in `=` or in a value."""
    for key, field in model.model_fields.items():
        inner = models_in(field.annotation, field.metadata)
        many = get_origin(field.annotation) is tuple
        if not inner:
            yield from _assignments(f"{path}{key}", field.annotation)
        elif steps == 1:
            yield f"{path}{key}."
        elif not many:
            for each in inner:
                yield from _overrides(each, steps - 1, f"{path}{key}.")
        elif steps == 2:
            yield f"{path}{key}.0."
        else:
            for each in inner:
                yield from _overrides(each, steps - 2, f"{path}{key}.0.")


def _assignments(path: str, annotation: Any) -> Iterator[str]:
    """`path=` before every value of a list of literals or of literals, else alone."""
    many = get_origin(annotation) is tuple
    literal = get_args(annotation)[0] if many else annotation
    yield f"{path}="
    if get_origin(literal) is Literal:
        yield from (f"{path}=[{x}]" if many else f"{path}={x}" for x in get_args(literal))


class Resumable(TyperCommand):
    """A verb that reads `--resume auto`, as other tools have it, as `--resume`, which is the same here."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Leave the word `auto` out where it follows `--resume`."""
        kept = [
            word
            for i, word in enumerate(args)
            if not (word == "auto" and i > 0 and args[i - 1] == "--resume")
        ]
        return super().parse_args(ctx, ["--resume" if word == "--resume=auto" else word for word in kept])


RecipeName = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE", help="Name of a shipped recipe, or a YAML file.", autocompletion=complete_recipe
    ),
]
ModelName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="`embedded`, a local folder or a Hub id.", autocompletion=complete_model
    ),
]
RunDir = Annotated[Path, typer.Argument(metavar="RUN", help="Run directory made by `regraft distill`.")]


def _overrides_option(example: str, complete: Callable[[str], list[str]] | None) -> OptionInfo:
    option: OptionInfo = typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help=f"Change one key of the recipe, such as {example}; repeatable.",
        autocompletion=complete,
        rich_help_panel=RECIPE,
    )
    return option


Overrides = Annotated[list[str] | None, _overrides_option("phases.0.lr=1e-3", complete_override)]
ProbeOverrides = Annotated[list[str] | None, _overrides_option("seeds=[0,1]", None)]
Overwrite = Annotated[
    bool,
    typer.Option(
        "--overwrite", help="Replace what is there, once the new is complete.", rich_help_panel=FILES
    ),
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Go on from the newest checkpoint; begin where there is none. `--resume auto` is the same.",
        rich_help_panel=FILES,
    ),
]
Format = Annotated[
    Literal["float32", "bfloat16"],
    typer.Option("--dtype", help="Number format of the weights.", rich_help_panel=MODEL),
]
Tolerance = Annotated[
    float | None,
    typer.Option(
        min=0,
        help="Largest logit difference; above it, exit 3. If not given, a share of the largest logit: "
        "1e-5 (at least 1e-4) in float32, 1/16 in bfloat16.",
        rich_help_panel=CHECKS,
    ),
]
Revision = Annotated[
    str | None, typer.Option(help="Branch, tag or commit of a Hub id.", rich_help_panel=MODEL)
]
AllowPickle = Annotated[
    bool,
    typer.Option(
        "--allow-pickle",
        help="Read a `.bin` where there are no safetensors; weights only.",
        rich_help_panel=MODEL,
    ),
]
Device = Annotated[str, typer.Option(help="cpu, cuda, or one of several: cuda:1.", rich_help_panel=RUNNING)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.", rich_help_panel=FILES)]
