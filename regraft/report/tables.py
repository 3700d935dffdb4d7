"""What the report says: sections of text, tables and figures for Markdown and HTML; the terminal's table.

Every number stands with its n and its 95 % interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from regraft.report.statistics import DECILES, MEAN, Row


@dataclass(frozen=True)
class Grid:
    """A table: column names and rows of text."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Section:
    """A heading of level 1 to 3 and what stands under it; figures are (file name without suffix, caption)."""

    title: str
    level: int = 2
    text: str = ""
    items: Sequence[str] = ()
    grid: Grid | None = None
    figures: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class Findings:
    """All rows of a report: `settings`, needle scores and differences, perplexity and its ratios."""

    settings: dict[str, Any]
    scores: Sequence[Row]
    gains: Sequence[Row]
    perplexity: Sequence[Row] = ()
    ratios: Sequence[Row] = ()
    inspected: Sequence[tuple[str, str]] = field(default=())  # figures, as in `Section`


def sections(found: Findings, figures: dict[str, str]) -> list[Section]:
    """The report from top to bottom.

    Args:
        found: the rows.
        figures: file name without suffix, by task, and of `depth`, `depth by task` and `perplexity`.
    """
    settings, lengths = found.settings, found.settings["lengths"]
    read = (
        "Percent of the asked values found in greedy completions, with 95 % intervals in brackets: Wilson's, "
        "and for differences the bootstrap over documents. Every model read the same documents. n counts "
        "documents, and asked needles where a depth is given. A mean over tasks weighs each task the same."
    )
    parts = [
        Section("Needle retrieval by depth", 1, read, summary(found)),
        Section("Mean over tasks", grid=_by_length(found.scores, [MEAN])),
    ]
    if found.gains:
        parts.append(Section("Paired differences, points", grid=_gains_by_length(found.gains)))
    parts += [
        Section(
            "By depth",
            figures=[
                (figures[MEAN], "Mean over tasks by length and depth; differences below"),
                (figures["depth"], "Mean over tasks by depth with 95 % intervals"),
            ],
        ),
        *(Section(f"{n:,} tokens", 3, grid=_by_depth(n, found.scores, found.gains)) for n in lengths),
        Section(
            "By task",
            grid=_by_length(found.scores, settings["tasks"]),
            figures=[
                (figures[key], "Every task by depth with 95 % intervals")
                for key in ("depth by task",)
                if key in figures
            ],
        ),
        *(
            Section(task, 3, figures=[(figures[task], f"{task} by length and depth; differences below")])
            for task in settings["tasks"]
        ),
    ]
    if found.perplexity:
        parts.append(_perplexity(found, figures["perplexity"]))
    if found.inspected:
        text = (
            "Inside a converted layer on one needle document: what it takes in, how sure it is of it, and "
            "whether the needle's association is protected while the rest is overwritten."
        )
        parts.append(Section("The filter at work", text=text, figures=found.inspected))
    return [*parts, Section("Settings", items=_settings(settings))]


def summary(found: Findings) -> list[str]:
    """One sentence per length: the model in question against the baseline, and whether that is sure."""
    settings = found.settings
    lines = []
    for row in found.gains:
        pair = row["student"], row["baseline"]
        first = (settings["student"] or found.gains[0]["student"], found.gains[0]["baseline"])
        if pair == first and row["task"] == MEAN and row["depth"] is None:
            sure = "" if not row["low"] <= 0 <= row["high"] else "; the interval includes 0"
            lines.append(
                f"{row['length']:,} tokens: {row['student']} - {row['baseline']} {_cell(row)} points, "
                f"n={row['n']}{sure}"
            )
    return lines


def _by_length(scores: Sequence[Row], tasks: Sequence[str]) -> Grid:
    """Rows (task, model), columns lengths."""
    cells = {
        (row["task"], row["model"], row["length"]): f"{_cell(row)}, n={row['n']}"
        for row in scores
        if row["depth"] is None
    }
    models = dict.fromkeys(row["model"] for row in scores)
    lengths = sorted({row["length"] for row in scores})
    rows = [
        [task, model, *(cells.get((task, model, length), "") for length in lengths)]
        for task in tasks
        for model in models
    ]
    return Grid(["task", "model", *(f"{length:,} tokens" for length in lengths)], rows)


def _gains_by_length(gains: Sequence[Row]) -> Grid:
    """Rows (comparison, task), columns lengths, the mean over tasks first."""
    cells = {(_pair(row), row["task"], row["length"]): row for row in gains if row["depth"] is None}
    lengths = sorted({row["length"] for row in gains})
    tasks = dict.fromkeys([MEAN, *(row["task"] for row in gains)])
    rows = [
        [pair, task, *(_cell(cells[pair, task, length]) for length in lengths)]
        for pair in dict.fromkeys(map(_pair, gains))
        for task in tasks
    ]
    return Grid(["difference", "task", *(f"{length:,} tokens" for length in lengths)], rows)


def _by_depth(length: int, scores: Sequence[Row], gains: Sequence[Row]) -> Grid:
    """Rows tenths of the depth from the top of the document, columns models and differences."""
    lines: dict[int, dict[str, Row]] = {}
    for row in (*scores, *gains):
        if row["task"] == MEAN and row["length"] == length and row["depth"] is not None:
            lines.setdefault(row["depth"], {})[_name(row)] = row
    names = dict.fromkeys(name for line in lines.values() for name in line)
    rows = [
        [_depth(depth, DECILES), str(max(row["n"] for row in line.values()))]
        + [_cell(line[name]) if name in line else "" for name in names]
        for depth, line in sorted(lines.items())
    ]
    return Grid(["depth", "n", *names], rows)


def _perplexity(found: Findings, figure: str) -> Section:
    """Rows (set, model), columns lengths; ratios to the baseline in percent."""
    settings = found.settings["perplexity"]
    text = (
        f"Every length scores the same tokens, in blocks from an empty state after {settings['before']!r}, "
        "which is not scored. 95 % intervals by document; where a set has fewer than ten, by stretch. "
        "Differences are paired ratios of perplexities. bpb: bits per byte."
    )
    lengths = sorted({row["length"] for row in found.perplexity})
    cells: dict[tuple[str, str], dict[int, str]] = {}
    for row in found.perplexity:
        if row["start"] is None:
            line = cells.setdefault((f"{Path(row['set']).name}, {row['tokens']:,} tokens", row["model"]), {})
            interval = f"[{row['low']:.2f}, {row['high']:.2f}]"
            line[row["length"]] = f"{row['perplexity']:.2f} {interval}, {row['bits_per_byte']:.3f} bpb"
    for row in found.ratios:
        if row["start"] is None:
            name = f"{_pair(row)}, %"
            line = cells.setdefault((Path(row["set"]).name, name), {})
            low, mean, high = (_points(row[key] - 1, 2) for key in ("low", "ratio", "high"))
            line[row["length"]] = f"{mean} [{low}, {high}]"
    rows = [[*key, *(line.get(length, "") for length in lengths)] for key, line in cells.items()]
    grid = Grid(["set", "model", *(f"{length:,} tokens" for length in lengths)], rows)
    return Section(
        "Perplexity", text=text, grid=grid, figures=[(figure, "Perplexity by length, by position")]
    )


def _settings(settings: dict[str, Any]) -> list[str]:
    bos = repr(settings["bos"]) if settings["bos"] else "nothing"
    budget = ", ".join(f"{task} {n}" for task, n in settings["new_tokens"].items())
    return [
        f"documents: seed {settings['seeds']}, generator version {settings['generator']}, "
        f"{settings['documents']} in all",
        f"tokenizer {settings['tokenizer']}; it puts {bos} before a prompt, and nothing else is added",
        f"greedy; tokens generated at most: {budget}; a row ends once all its answers stand complete",
        f"bootstrap: {settings['resamples']:,} resamples of documents, paired",
    ]


def terminal(scores: Sequence[Row], gains: Sequence[Row]) -> Table:
    """Mean over tasks by length and depth, at most 100 columns wide.

    Args:
        scores: rows of `statistics.table`, with five depth groups or fewer.
        gains: rows of `statistics.differences` with the same groups, or none.
    """
    groups = 1 + max(row["depth"] for row in scores if row["depth"] is not None)
    table = Table(title="Needle retrieval, % of asked values found, mean over tasks (95 % interval)")
    table.add_column("tokens", justify="right", no_wrap=True)
    table.add_column("", overflow="fold", min_width=9)  # names may be paths: the only column that gives way
    for name in ("n", "all depths", *(_depth(depth, groups) for depth in range(groups))):
        table.add_column(name, justify="right", no_wrap=True)
    for length in sorted({row["length"] for row in scores}):
        lines: dict[str, dict[int | None, Row]] = {}
        for row in (*scores, *gains):
            if row["task"] == MEAN and row["length"] == length:
                lines.setdefault(_name(row), {})[row["depth"]] = row
        for number, (name, cells) in enumerate(lines.items()):
            shown = [_short(cells[depth]) if depth in cells else "" for depth in range(groups)]
            first = f"{length:,}" if number == 0 else ""
            whole = [str(cells[None]["n"]), _cell(cells[None], digits=0)]
            table.add_row(first, name, *whole, *shown, end_section=number == len(lines) - 1)
    return table


def _short(row: Row) -> str:
    return _points(row["difference"]) if "difference" in row else f"{100 * row['mean']:.1f}"


def _cell(row: Row, digits: int = 1) -> str:
    """Value in percent or points with its interval, whose ends have `digits` decimals."""
    if "difference" in row:
        return f"{_short(row)} [{_points(row['low'], digits)}, {_points(row['high'], digits)}]"
    return f"{_short(row)} [{100 * row['low']:.{digits}f}, {100 * row['high']:.{digits}f}]"


def _points(share: float, digits: int = 1) -> str:
    return f"{round(100 * share, digits) + 0.0:+.{digits}f}"  # adding zero: never -0.0


def _name(row: Row) -> str:
    return row["model"] if "model" in row else _pair(row)


def _pair(row: Row) -> str:
    return f"{row['student']} - {row['baseline']}"


def _depth(group: int, groups: int) -> str:
    width = 100 // groups
    return f"{group * width}-{(group + 1) * width}%"
