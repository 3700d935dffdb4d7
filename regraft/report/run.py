"""`regraft report`: models on the same documents, those of a run and any others."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, PreTrainedModel

from regraft.convert import load_model, load_tokenizer, open_checkpoint
from regraft.convert.load import DTYPES
from regraft.convert.plan import TEACHER_TYPE
from regraft.distill.compare import cost_table, side_by_side
from regraft.distill.run import CONTROL, EXPORT, RECIPE
from regraft.errors import UserError
from regraft.files import hash_directory, refuse_existing, user_cache
from regraft.layers import RegraftConfig
from regraft.recipes import load_recipe
from regraft.recipes.schema import Recipe
from regraft.report.niah import Entrant, Record, evaluate, progress_bar
from regraft.report.perplexity import measure
from regraft.report.report import terminal_table, write_report
from regraft.report.shelf import Shelf
from regraft.report.texts import check_sets

MIN_COLUMNS = 100  # what the table needs; off a terminal rich takes 80 and would break names into letters
STUDENT, FINISHED = "student", "evaluated"
DEFAULT_RECIPE = "demo"  # its report section, where no run says what to evaluate


def wide_console() -> Console:
    """Standard output, at least `MIN_COLUMNS` wide."""
    console = Console()
    console.width = max(console.width, MIN_COLUMNS)
    return console


def report_run(
    run: Path | None,
    *,
    models: Sequence[str] = (),
    baseline: str | None = None,
    overrides: Sequence[str] = (),
    limit: int | None = None,
    inspect: bool = False,
    out: Path | None = None,
    overwrite: bool = False,
) -> dict[str, Path]:
    """Evaluate models by needle depth and perplexity; write and print the report.

    Finished cells are kept in `RUN/evaluated` (without a run in the user's cache) and not run again.

    Args:
        run: run directory whose teacher, student and control take part; None for others only.
        models: further ones, `NAME=MODEL` with a folder, a Hub id or `embedded`.
        baseline: what the others are compared with: the control if there is one, else the teacher or the
            first named.
        overrides: `a.b=value` on the run's recipe.
        limit: at most so many documents per task and length; every length and tenth of depth stays.
        inspect: look into the student's converted layers as well.
        out: where the report goes, `RUN/report` by default.
        overwrite: replace a report that is there.

    Raises:
        UserError: the run is not finished, a name is unknown, or the report exists.
    """
    console = wide_console()
    if run is None and not models:
        raise UserError("RUN", "is missing.", "name a run, or models by --model NAME=MODEL.")
    if out is None:
        if run is None:
            raise UserError("--out", "is missing.", "name the report's directory, or give a run.")
        out = run / "report"
    refuse_existing(out, overwrite)
    recipe = _recipe(run, overrides)
    if recipe.report.perplexity is not None:
        check_sets(recipe.report.perplexity.sets)
    places = _places(run, recipe, models)
    baseline = baseline or ("control" if "control" in places else next(iter(places)))
    if baseline not in places:
        raise UserError("--baseline", f"{baseline!r} is no model.", f"use one of {', '.join(places)}.")
    entrants = {name: _entrant(place, recipe.teacher.dtype) for name, place in places.items()}
    student = STUDENT if run is not None and baseline != STUDENT else None
    finished = Shelf(run / FINISHED if run is not None else user_cache() / FINISHED)
    records, perplexity = _evaluated(recipe, entrants, limit, finished, console)
    drawn = None
    if inspect:
        from regraft.report.inspection import inspect_student

        shown = student or next(name for name in reversed(places) if name != baseline or len(places) == 1)
        drawn = functools.partial(inspect_student, entrants[shown], recipe.report.niah.seed)
    paths = write_report(
        records, out, student=student, baseline=baseline if len(places) > 1 else None, perplexity=perplexity,
        inspect=drawn, colours=recipe.report.colours, overwrite=overwrite,
    )  # fmt: skip
    table = terminal_table(records, student=student, baseline=baseline if len(places) > 1 else None)
    console.print(table)
    if run is not None and (both := side_by_side(run)):
        console.print(cost_table(both))
    for name in ("html", "markdown", "json", "heatmap"):
        console.print(f"{name}: {paths[name]}", soft_wrap=True)
    if run is not None:
        console.print(f"export: {run / EXPORT}", soft_wrap=True)
    return paths


def _recipe(run: Path | None, overrides: Sequence[str]) -> Recipe:
    if run is None:
        return load_recipe(DEFAULT_RECIPE, overrides)
    if not (run / RECIPE).is_file() or not (run / EXPORT).is_dir():
        raise UserError(run, "holds no finished student.", "run `regraft distill` to its end first.")
    return load_recipe(run / RECIPE, overrides)


def _places(run: Path | None, recipe: Recipe, models: Sequence[str]) -> dict[str, str]:
    """Model folders by name, the run's first."""
    places = {}
    if run is not None:
        places = {"teacher": recipe.teacher.model, STUDENT: str(run / EXPORT)}
        if (run / CONTROL / EXPORT).is_dir():
            places["control"] = str(run / CONTROL / EXPORT)
    for entry in models:
        name, equals, place = entry.partition("=")
        if not (name and equals and place) or name in places:
            reason = "is taken." if name in places else "is not of the form NAME=MODEL."
            raise UserError(f"--model {entry}", reason, "write --model mine=runs/mine/export.")
        places[name] = place
    return places


def _entrant(place: str, dtype: str) -> Entrant:
    """A model that is loaded when something of it is missing; its files are hashed now."""
    digest = hash_directory(open_checkpoint(place).path)
    return Entrant(functools.partial(_load, place, dtype), load_tokenizer(place), f"{digest} {dtype}")


def _load(place: str, dtype: str) -> PreTrainedModel:
    """In our decoder where that hosts the model; any other causal LM through transformers, without its code.

    Raises:
        UserError: transformers cannot load it.
    """
    checkpoint = open_checkpoint(place)
    if checkpoint.config.get("model_type") in (TEACHER_TYPE, RegraftConfig.model_type):
        model: PreTrainedModel = load_model(place, dtype=dtype)
    else:
        try:
            model = AutoModelForCausalLM.from_pretrained(checkpoint.path, dtype=DTYPES[dtype])
        except (OSError, ValueError) as error:
            fix = "give a causal language model that transformers loads without its own code."
            raise UserError(checkpoint.path, f"does not load: {error}.", fix) from error
    return model.to("cuda" if torch.cuda.is_available() else "cpu")


def _evaluated(
    recipe: Recipe, entrants: dict[str, Entrant], limit: int | None, finished: Shelf, console: Console
) -> tuple[list[Record], list[Record]]:
    """Needle records and perplexity records of all models."""
    niah, perplexity = recipe.report.niah, recipe.report.perplexity
    samples = niah.samples if limit is None else min(limit, niah.samples)
    per_model = samples * len(niah.tasks) * len(niah.lengths)
    console.print(
        f"{len(niah.tasks)} tasks x {len(niah.lengths)} lengths x {samples} documents = {per_model} per model"
    )
    with progress_bar() as progress:
        records = evaluate(
            entrants,
            tasks=niah.tasks,
            lengths=niah.lengths,
            samples=samples,
            seed=niah.seed,
            batch_size=niah.batch_size,
            progress=progress,
            say=lambda line: console.print(line, soft_wrap=True),
            documents=Shelf(user_cache() / "needles"),
            finished=finished,
        )
        if perplexity is None:
            return records, []
        return records, measure(
            entrants,
            sets=perplexity.sets,
            lengths=perplexity.lengths,
            samples=perplexity.samples,
            progress=progress,
            finished=finished,
        )
