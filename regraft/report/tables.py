"""The report's tables, for Markdown and for the terminal; every number with its n and its 95 % interval."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from regraft.report.statistics import DECILES, MEAN, Row


def markdown(
    settings: dict[str, Any], scores: Sequence[Row], gains: Sequence[Row], figures: dict[str, str]
) -> str:
    """The whole `report.md`.

    Args:
        settings: from `report.settings`.
        scores: rows of `statistics.table` with ten depth groups.
        gains: rows of `statistics.differences`, student minus each other model, with ten depth groups.
        figures: file name by task.
    """
    parts = [
        "# Needle retrieval by depth",
        "Percent of the asked values found in greedy completions, with 95 % intervals in brackets: Wilson's, "
        "and for differences the bootstrap over documents. Every model read the same documents. n counts "
        "documents, and asked needles where a depth is given. A mean over tasks weighs each task the same.",
        "## Mean over tasks",
        _by_length(scores, [MEAN]),
    ]
    if gains:
        parts += ["## Paired differences, points", _gains_by_length(gains)]
    parts += ["## By task", _by_length(scores, settings["tasks"])]
    parts += ["## By depth, mean over tasks"]
    for length in settings["lengths"]:
        parts += [f"### {length:,} tokens", _by_depth(length, scores, gains)]
    parts += ["## Heatmaps", *(f"![{task}]({name})" for task, name in figures.items())]
    parts += ["## Settings", _settings(settings)]
    return "\n\n".join(parts) + "\n"


def _by_length(scores: Sequence[Row], tasks: Sequence[str]) -> str:
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
    return _grid(["task", "model", *(f"{length:,} tokens" for length in lengths)], rows)


def _gains_by_length(gains: Sequence[Row]) -> str:
    """Rows (comparison, task), columns lengths, the mean over tasks first."""
    cells = {(_pair(row), row["task"], row["length"]): row for row in gains if row["depth"] is None}
    lengths = sorted({row["length"] for row in gains})
    tasks = dict.fromkeys([MEAN, *(row["task"] for row in gains)])
    rows = [
        [pair, task, *(_cell(cells[pair, task, length]) for length in lengths)]
        for pair in dict.fromkeys(map(_pair, gains))
        for task in tasks
    ]
    return _grid(["difference", "task", *(f"{length:,} tokens" for length in lengths)], rows)


def _by_depth(length: int, scores: Sequence[Row], gains: Sequence[Row]) -> str:
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
    return _grid(["depth", "n", *names], rows)


def _settings(settings: dict[str, Any]) -> str:
    bos = repr(settings["bos"]) if settings["bos"] else "nothing"
    budget = ", ".join(f"{task} {n}" for task, n in settings["new_tokens"].items())
    return "\n".join(
        (
            f"- documents: seed {settings['seeds']}, generator version {settings['generator']}, "
            f"{settings['documents']} in all",
            f"- tokenizer {settings['tokenizer']}; it puts {bos} before a prompt, and nothing else is added",
            f"- greedy; tokens generated at most: {budget}; a row ends once all its answers stand complete",
            f"- bootstrap: {settings['resamples']:,} resamples of documents, paired",
        )
    )


def terminal(scores: Sequence[Row], gains: Sequence[Row]) -> Table:
    """Mean over tasks by length and depth, at most 100 columns wide.

    Args:
        scores: rows of `statistics.table`, with five depth groups or fewer.
        gains: rows of `statistics.differences` with the same groups, or none.
    """
    groups = 1 + max(row["depth"] for row in scores if row["depth"] is not None)
    table = Table(title="Needle retrieval, % of asked values found, mean over tasks (95 % interval)")
    table.add_column("tokens", justify="right", no_wrap=True)
    table.add_column("", overflow="fold", min_width=12)  # names may be paths: the only column that gives way
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


def _grid(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)
