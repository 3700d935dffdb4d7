"""The one runner of all probes: cells that are run once, several at a time if asked, then put together.

A probe is a module with `cells`, `run`, `summary`, `markdown` and `figures` (see `Probe`). A cell is one run
with everything that decides its result; it is kept in a file named after those settings, so a sweep that was
interrupted, or got more seeds, runs only what is missing.
"""

from __future__ import annotations

import hashlib
import json
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from regraft.errors import UserError
from regraft.files import refuse_existing, write_json, write_text
from regraft.probes.pool import Tick, probe_of, run_all
from regraft.recipes.load import dump_recipe

Results = Sequence[dict[str, Any]]
FORMAT = 1  # of cell files; a new number makes old ones unread


@dataclass(frozen=True)
class Cell:
    """One run: a readable name, settings for JSON that decide its result, and how much work it is."""

    name: str
    settings: dict[str, Any]
    work: float = 1.0

    @property
    def file(self) -> str:
        """Name of the file that keeps its result."""
        text = json.dumps([FORMAT, self.settings], sort_keys=True)
        name = re.sub(r"[^\w.-]+", "-", self.name)
        return f"{name}.{hashlib.sha256(text.encode()).hexdigest()[:10]}.json"


class Probe(Protocol):
    """What a module has to offer to be run; recipes are those of its schema."""

    def cells(self, recipe: Any) -> list[Cell]:
        """The runs of a recipe.

        Raises:
            UserError: a mixer cannot be built.
        """

    def run(self, settings: dict[str, Any], device: str, tick: Tick) -> dict[str, Any]:
        """Run one cell; the result is JSON."""

    def summary(self, recipe: Any, cells: Sequence[Cell], results: Results) -> dict[str, Any]:
        """What the results say together, JSON, the same for the same results."""

    def markdown(self, summary: dict[str, Any]) -> str:
        """The summary as tables."""

    def figures(self, summary: dict[str, Any], folder: Path) -> list[Path]:
        """Draw the summary into a folder."""


def run_probe(
    recipe: Any,
    out: Path | None,
    *,
    device: str = "cpu",
    jobs: int = 1,
    overwrite: bool = False,
    shown: bool = True,
    minutes: float | None = None,
) -> dict[str, Any]:
    """Run what is missing of a recipe and write `recipe.yaml`, `cells/`, `result.json`, `result.md`, figures.

    Args:
        recipe: one of `regraft.probes.schema`.
        out: its directory; None keeps everything in memory.
        device: `cpu`, `cuda` or one of several, `cuda:1`.
        jobs: cells run at once, each in a process of its own.
        overwrite: replace the results of another recipe; cells that both have are kept.
        shown: show progress.
        minutes: begin no cell that would end later than this, were it as long as the longest so far, and
            sum up those that are done; 0 only sums up. None for all.

    Raises:
        UserError: `out` holds something else, a mixer cannot be built, or nothing is done yet.
    """
    probe: Probe = probe_of(recipe.probe)
    cells = probe.cells(recipe)  # first: a mixer that cannot be built leaves nothing behind
    store = _Store(out)
    store.claim(dump_recipe(recipe), overwrite)
    results = {cell.file: found for cell in cells if (found := store.read(cell)) is not None}
    # Seed by seed, so that a sweep cut short has something of everything.
    missing = sorted((c for c in cells if c.file not in results), key=lambda c: c.settings.get("seed", 0))
    with _progress(cells, missing, shown) as (tick, finished), _term_interrupts():
        settings, clock = [cell.settings for cell in missing], _Clock(minutes)
        for index, result, seconds in run_all(recipe.probe, settings, device, jobs, tick, clock.more):
            store.write(missing[index], result, seconds)
            results[missing[index].file] = result
            clock.longest = max(clock.longest, seconds)
            finished()
    done = [cell for cell in cells if cell.file in results]
    if not done:
        raise UserError("--minutes", "were over before any run was done.", "allow more.")
    # Through JSON, so that fresh and stored results read the same.
    plain = [json.loads(json.dumps(results[cell.file])) for cell in done]
    summary = {"probe": recipe.probe, **probe.summary(recipe, done, plain)}
    if len(done) < len(cells):
        summary["missing"] = len(cells) - len(done)
    if out is not None:
        write_json(out / "result.json", summary)
        write_text(out / "result.md", markdown(summary))
        probe.figures(summary, out)
    return summary


def markdown(summary: dict[str, Any]) -> str:
    """The tables of a summary, and how many runs they lack."""
    text: str = probe_of(summary["probe"]).markdown(summary)
    return f"{summary['missing']} runs are missing.\n\n{text}" if "missing" in summary else text


class _Clock:
    """Whether there is time for another cell."""

    def __init__(self, minutes: float | None) -> None:
        self.minutes, self.start, self.longest = minutes, time.monotonic(), 0.0

    def more(self) -> bool:
        """Whether one that takes as long as the longest would end in time."""
        if self.minutes is None:
            return True
        return time.monotonic() - self.start + self.longest < 60 * self.minutes


class _Store:
    """Cell files under a directory, or nowhere."""

    def __init__(self, out: Path | None) -> None:
        self.out = out

    def claim(self, recipe: str, overwrite: bool) -> None:
        """Make the directory this recipe's."""
        if self.out is None:
            return
        held = self.out / "recipe.yaml"
        if not held.is_file():
            refuse_existing(self.out)
        elif held.read_text(encoding="utf-8") != recipe and not overwrite:
            fix = "choose another directory, or pass --overwrite; runs that both recipes have are kept."
            raise UserError(self.out, "holds the results of another recipe.", fix)
        elif held.read_text(encoding="utf-8") != recipe:
            for old in (*self.out.glob("*.png"), *self.out.glob("result.*")):
                old.unlink()
        (self.out / "cells").mkdir(parents=True, exist_ok=True)
        write_text(held, recipe)

    def read(self, cell: Cell) -> dict[str, Any] | None:
        """Its result, if it was run."""
        file = None if self.out is None else self.out / "cells" / cell.file
        return json.loads(file.read_text(encoding="utf-8"))["result"] if file and file.is_file() else None

    def write(self, cell: Cell, result: dict[str, Any], seconds: float) -> None:
        """Keep its result, whole or not at all."""
        if self.out is not None:
            held = {"settings": cell.settings, "result": result, "seconds": round(seconds, 1)}
            write_json(self.out / "cells" / cell.file, held)


@contextmanager
def _progress(
    cells: Sequence[Cell], missing: Sequence[Cell], shown: bool
) -> Iterator[tuple[Tick, Callable[[], None]]]:
    """A bar over the work that is left; yields what advances it and what counts a finished run."""
    columns = (
        TextColumn("{task.fields[done]} of {task.fields[cells]} runs"),
        BarColumn(bar_width=30),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, disable=not shown or not missing) as bar:
        work = sum(cell.work for cell in missing)
        task = bar.add_task("", total=work, cells=len(cells), done=len(cells) - len(missing))

        def finished() -> None:
            bar.update(task, done=bar.tasks[0].fields["done"] + 1)

        yield lambda amount: bar.advance(task, amount), finished


@contextmanager
def _term_interrupts() -> Iterator[None]:
    """A TERM ends a sweep as Ctrl-C does, so that no worker stays behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    old = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, old)


def no_tick(_: float) -> None:
    """For a cell that is run by itself."""
