"""`regraft report`: the three models of a run on the same documents."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from regraft.convert import load_model, load_tokenizer
from regraft.distill.run import CONTROL, EXPORT, RECIPE
from regraft.errors import UserError
from regraft.files import refuse_existing
from regraft.recipes import load_recipe
from regraft.report.niah import evaluate, progress_bar
from regraft.report.report import terminal_table, write_report

MIN_COLUMNS = 100  # what the table needs; off a terminal rich takes 80 and would break names into letters


def wide_console() -> Console:
    """Standard output, at least `MIN_COLUMNS` wide."""
    console = Console()
    console.width = max(console.width, MIN_COLUMNS)
    return console


def report_run(
    run: Path, *, overrides: Sequence[str] = (), out: Path | None = None, overwrite: bool = False
) -> dict[str, Path]:
    """Evaluate teacher, student and control of a run by needle depth; write and print the report.

    Args:
        run: run directory with a finished student; its control is compared if it is there.
        overrides: `a.b=value` on the run's recipe.
        out: where the report goes, `RUN/report` by default.
        overwrite: replace a report that is there.

    Raises:
        UserError: the run is not finished, or the report exists.
    """
    console = wide_console()
    run = Path(run)
    out = run / "report" if out is None else out
    refuse_existing(out, overwrite)
    if not (run / RECIPE).is_file() or not (run / EXPORT).is_dir():
        raise UserError(run, "holds no finished student.", "run `regraft distill` to its end first.")
    recipe = load_recipe(run / RECIPE, overrides)
    places = {"teacher": recipe.teacher.model, "student": str(run / EXPORT)}
    if (run / CONTROL / EXPORT).is_dir():
        places["control"] = str(run / CONTROL / EXPORT)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    models = {
        name: (load_model(place, dtype=recipe.teacher.dtype).to(device), load_tokenizer(place))
        for name, place in places.items()
    }
    niah = recipe.report.niah
    with progress_bar() as progress:
        records = evaluate(
            models,
            tasks=niah.tasks,
            lengths=niah.lengths,
            samples=niah.samples,
            seed=niah.seed,
            batch_size=niah.batch_size,
            progress=progress,
        )
    baseline = "control" if "control" in places else "teacher"
    paths = write_report(records, out, student="student", baseline=baseline, overwrite=overwrite)
    console.print(terminal_table(records, student="student", baseline=baseline))
    for name, path in paths.items():
        console.print(f"{name}: {path}", soft_wrap=True)
    console.print(f"export: {run / EXPORT}", soft_wrap=True)
    return paths
