"""Every figure and table of docs/replication.md from the results alone; needs no GPU and no model.

    python -m scripts.replicate.figures docs/replication/results.jsonl.xz --docs docs

Pictures go to DOCS/images/replication-*.png; tables are put between the two marks in DOCS/replication.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from regraft.files import write_text
from regraft.report.curves import STYLES
from regraft.report.inspection import trace_figure
from regraft.report.statistics import DECILES, Row
from scripts.replicate.analysis import CONTROL, MAIN, MEAN, STUDENT, TEACHER, Analysis, overall
from scripts.replicate.results import unpack
from scripts.replicate.tables import sections

BEGIN, END = "<!-- results: made by scripts/replicate/figures.py -->", "<!-- end of results -->"
COLOURS = {TEACHER: STYLES[2], STUDENT: STYLES[0], CONTROL: STYLES[1]}
DIFFERENCE_COLOURS = {CONTROL: STYLES[3], TEACHER: STYLES[4]}
DIFFERENCES = "PuOr"


def draw(a: Analysis, images: Path) -> dict[str, str]:
    """All figures that there are results for; file names by what they show."""
    makers: dict[str, Callable[[Analysis], Figure | None]] = {
        "length": by_length, "depth": by_depth, "maps": maps, "perplexity": perplexity,
        "students": students, "ablations": ablations, "curves": curves,
    }  # fmt: skip
    images.mkdir(parents=True, exist_ok=True)
    names = {}
    for name, make in makers.items():
        figure = make(a)
        if figure is not None:
            names[name] = f"replication-{name}.png"
            figure.savefig(images / names[name], dpi=130, metadata={"Software": None})
    for layer, trace in a.traces.get(f"{MAIN}/{STUDENT}", {}).items():
        name = f"inside-{layer}"
        names[name] = f"replication-{name}.png"
        trace_figure(trace, int(layer)).savefig(images / names[name], dpi=130, metadata={"Software": None})
    return names


def by_length(a: Analysis) -> Figure | None:
    """Share found by length, the mean and every task."""
    if not a.models:
        return None
    panels = [MEAN, *a.tasks]
    figure, axes = _grid(len(panels), 4, 2.6, 2.2)
    for axis, task in zip(axes, panels, strict=False):
        for role in a.models:
            own = overall(a.scores, model=role, task=task)
            _line(axis, list(own), list(own.values()), "mean", role, *COLOURS[role], factor=100)
        _lengths(axis, a)
        axis.set_ylim(-3, 103)
        axis.set_title(
            "mean of six tasks" if task == MEAN else task.removeprefix("niah_"), fontsize=9, loc="left"
        )
    figure.supylabel("values found, %", fontsize=9)
    figure.supxlabel("tokens of prompt and answer", fontsize=9)
    return _legend(figure, axes[0])


def by_depth(a: Analysis) -> Figure | None:
    """Shares by depth, and the paper's Figure 5a, gains by depth; a column per length."""
    if not a.complete:
        return None
    columns = len(a.lengths)
    figure = Figure(figsize=(2.6 * columns + 0.6, 5.2), layout="constrained")
    axes = figure.subplots(2, columns, squeeze=False, sharex=True, sharey="row")
    for (upper, lower), length in zip(axes.T, a.lengths, strict=True):
        for role in a.models:
            _profile(upper, a.scores, "mean", role, COLOURS[role], length=length, model=role)
        for other in (CONTROL, TEACHER):
            _profile(
                lower, a.depth_gains, "difference", f"student - {other}", DIFFERENCE_COLOURS[other],
                length=length, baseline=other,
            )  # fmt: skip
        lower.axhline(0, color="#555555", linewidth=0.8)
        upper.set_title(f"{length:,} tokens", fontsize=9, loc="left")
    axes[0, 0].set(xlim=(0, 100), ylim=(-3, 103))
    axes[0, 0].set_ylabel("values found, %", fontsize=9)
    axes[1, 0].set_ylabel("points", fontsize=9)
    figure.supxlabel("depth of the needle, % of the context (0 = top of the document)", fontsize=9)
    return _legend(figure, axes[0, 0], axes[1, 0])


def maps(a: Analysis) -> Figure | None:
    """The paper's Figure 5b: student minus control by depth and length, a map per task."""
    if not a.complete:
        return None
    cells = {
        (row["task"], row["depth"], row["length"]): row for row in a.depth_gains if row["baseline"] == CONTROL
    }  # fmt: skip
    panels = [MEAN, *a.tasks]
    chance = max(row["n"] ** -0.5 for row in cells.values())
    limit = 100 * min(1.0, max(chance, *(abs(row["difference"]) for row in cells.values())))
    figure, axes = _grid(len(panels), 4, 2.3, 2.7)
    image: Any = None
    for axis, task in zip(axes, panels, strict=False):
        grid = np.full((DECILES, len(a.lengths)), np.nan)
        for x, length in enumerate(a.lengths):
            for y in range(DECILES):
                row = cells.get((task, y, length))
                if row is not None:
                    grid[y, x] = 100 * row["difference"]
                    sure = not row["low"] <= 0 <= row["high"]
                    dark = abs(grid[y, x]) > 0.6 * limit
                    points = round(grid[y, x])
                    axis.text(
                        x, y, f"{points:+d}" if points else "0", ha="center", va="center", fontsize=7,
                        color="#ffffff" if dark else "#1a1a1a", weight="bold" if sure else "normal",
                    )  # fmt: skip
        image = axis.imshow(grid, cmap=DIFFERENCES, vmin=-limit, vmax=limit, aspect="auto")
        axis.set_xticks(range(len(a.lengths)), [f"{n:,}" for n in a.lengths], fontsize=8)
        axis.set_yticks(
            np.arange(0, DECILES + 1, 2) - 0.5, [str(10 * i) for i in range(0, 11, 2)], fontsize=8
        )
        axis.set_title(
            "mean of six tasks" if task == MEAN else task.removeprefix("niah_"), fontsize=9, loc="left"
        )
    figure.colorbar(
        image, ax=list(axes[: len(panels)]), pad=0.01, aspect=35, label="student - control, points"
    )
    figure.supylabel("depth of the needle, %", fontsize=9)
    figure.supxlabel("tokens of prompt and answer; bold: the 95 % interval excludes 0", fontsize=9)
    return figure


def perplexity(a: Analysis) -> Figure | None:
    """Cost against the teacher by context length, and by position in the longest."""
    if not a.complete or not a.ratios:
        return None
    figure, (left, right) = _grid(2, 2, 3.6, 2.7)
    longest = max(row["length"] for row in a.ratios)
    for role in (STUDENT, CONTROL):
        own = overall(a.ratios, student=role)
        _line(left, list(own), [_percent(row) for row in own.values()], "ratio", role, *COLOURS[role])
        parts = [
            row for row in a.ratios
            if (row["student"], row["length"]) == (role, longest) and row["start"] is not None
        ]  # fmt: skip
        x = [(row["start"] + row["end"]) / 2 for row in parts]
        _line(right, x, [_percent(row) for row in parts], "ratio", role, *COLOURS[role])
    for axis, title in ((left, "by context length"), (right, f"by position in {longest:,} tokens")):
        axis.axhline(0, color="#555555", linewidth=0.8)
        axis.set_title(title, fontsize=9, loc="left")
        _lengths(axis, a)
    figure.supylabel("perplexity against the teacher, %", fontsize=9)
    figure.supxlabel("tokens", fontsize=9)
    return _legend(figure, left)


def students(a: Analysis) -> Figure | None:
    """Models with a control by length, and every model by depth where documents are longest."""
    if len(a.shares) < 2:
        return None
    figure = Figure(figsize=(10, max(3.4, 0.6 + 0.24 * len(a.shares))), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.5))
    compared = [label for label in a.shares if label == TEACHER or label.endswith((STUDENT, CONTROL))]
    for i, label in enumerate(compared):
        colour, marker, _ = STYLES[i % len(STYLES)]
        own = overall(a.shares[label], task=MEAN)
        left.plot(
            a.lengths, [100 * own[n]["mean"] for n in a.lengths], label=label, color=colour, marker=marker,
            markersize=4, linewidth=1.4, fillstyle="none" if i >= len(STYLES) else "full",
            linestyle="--" if label.endswith(CONTROL) else ":" if label == TEACHER else "-",
        )  # fmt: skip
    _lengths(left, a)
    left.set_title("mean of six tasks, %, by length", fontsize=9, loc="left")
    left.set_xlabel("tokens of prompt and answer", fontsize=9)
    left.set_ylim(-3, 103)
    left.legend(fontsize=7.5, frameon=False, loc="lower left")
    _plain(left)
    _profiles(a, right)
    return figure


def _profiles(a: Analysis, axis: Axes) -> None:
    """What every model found by depth, a row each."""
    grid = np.full((len(a.profiles), DECILES), np.nan)
    for y, profile in enumerate(a.profiles.values()):
        for x, row in profile.items():
            grid[y, x] = 100 * row["mean"]
            colour = "#1a1a1a" if grid[y, x] > 50 else "#ffffff"
            axis.text(x, y, f"{grid[y, x]:.0f}", ha="center", va="center", fontsize=7, color=colour)
    axis.imshow(grid, cmap="viridis", vmin=0, vmax=100, aspect="auto")
    axis.set_yticks(range(len(a.profiles)), [*a.profiles], fontsize=7.5)
    axis.set_xticks(np.arange(0, DECILES + 1, 2) - 0.5, [str(10 * i) for i in range(0, 11, 2)], fontsize=8)
    axis.set_xlabel("depth of the needle, %", fontsize=9)
    axis.set_title(f"the same by depth in {a.lengths[-1]:,} tokens", fontsize=9, loc="left")


def ablations(a: Analysis) -> Figure | None:
    """Mean gain of every variant against what it is compared with, a panel per length."""
    if not a.ablations:
        return None
    names = [f"{own.name}\nagainst {own.against}" for own in a.ablations]
    columns = len(a.lengths)
    figure = Figure(figsize=(1.9 + 1.9 * columns, 0.9 + 0.42 * len(names)), layout="constrained")
    axes = np.atleast_1d(figure.subplots(1, columns, sharey=True))
    for axis, length in zip(axes, a.lengths, strict=True):
        rows = [overall(own.gains, task=MEAN)[length] for own in a.ablations]
        for y, (own, row) in enumerate(zip(a.ablations, rows, strict=True)):
            low, middle, high = (100 * row[key] for key in ("low", "difference", "high"))
            colour = STYLES[0][0] if own.beyond(length) else "#888888"
            worst, best = (100 * x for x in own.spread[length])
            axis.barh(y, best - worst, left=worst, height=0.8, color="#e4e4e4", zorder=0)
            axis.plot([low, high], [y, y], color=colour, linewidth=2)
            axis.plot([middle], [y], "o", color=colour, markersize=5)
        axis.axvline(0, color="#555555", linewidth=0.8)
        axis.set_title(f"{length:,} tokens", fontsize=9, loc="left")
        _plain(axis)
    axes[0].set_yticks(range(len(names)), names, fontsize=7.5)
    axes[0].set_ylim(len(names) - 0.5, -0.5)
    figure.supxlabel(
        "points, mean of six tasks, 95 % interval; grey bars: seeds of what it is compared with", fontsize=9
    )
    return figure


def curves(a: Analysis) -> Figure | None:
    """Loss of the students over tokens, and where their evidence was."""
    runs = {name: m for name, m in a.results.models.items() if "curve" in m and name.endswith(STUDENT)}
    if not runs:
        return None
    figure, (left, right) = _grid(2, 2, 4.2, 3.0)
    for i, (name, model) in enumerate(runs.items()):
        _, _, tokens, losses, evidence = zip(*model["curve"], strict=True)
        colour, line = STYLES[i % len(STYLES)][0], ("-", "--", ":")[i // len(STYLES) % 3]
        millions = [n / 1e6 for n in tokens]
        left.plot(millions, losses, line, color=colour, linewidth=1.2, label=name.removesuffix(f"/{STUDENT}"))
        if any(e is not None for e in evidence):
            right.plot(
                millions, [np.nan if e is None else e for e in evidence], line, color=colour, linewidth=1.2
            )
    left.set_yscale("log")
    for axis, title in ((left, "loss of the phase"), (right, "evidence, mean over heads")):
        axis.set_title(title, fontsize=9, loc="left")
        _plain(axis)
    figure.supxlabel("millions of tokens", fontsize=9)
    return _legend(figure, left)


def _grid(panels: int, columns: int, width: float, height: float) -> tuple[Figure, Any]:
    columns = min(columns, panels)
    rows = -(-panels // columns)
    figure = Figure(figsize=(width * columns + 0.6, height * rows + 0.5), layout="constrained")
    axes = np.atleast_1d(figure.subplots(rows, columns, squeeze=False)).flatten()
    for axis in axes[panels:]:
        axis.set_axis_off()
    return figure, axes


def _line(
    axis: Axes, x: Sequence[float], rows: Sequence[Row], field: str, label: str,
    colour: str, marker: str, line: str, factor: float = 1,
) -> None:  # fmt: skip
    middle, low, high = ([factor * row[key] for row in rows] for key in (field, "low", "high"))
    axis.plot(
        x, middle, color=colour, marker=marker, linestyle=line, markersize=4, linewidth=1.5, label=label
    )
    axis.fill_between(x, low, high, color=colour, alpha=0.12, linewidth=0)
    _plain(axis)


def _profile(
    axis: Axes, rows: Sequence[Row], field: str, label: str, style: tuple[str, str, str], **wanted: Any
) -> None:
    """Rows of the mean over tasks with the wanted fields, by depth."""
    wanted["task"] = MEAN
    own = [
        row for row in rows
        if row["depth"] is not None and all(row[key] == value for key, value in wanted.items())
    ]  # fmt: skip
    own.sort(key=lambda row: row["depth"])
    _line(axis, [_middle(row["depth"]) for row in own], own, field, label, *style, factor=100)


def _middle(tenth: int) -> float:
    """Middle of a tenth of depth, in percent."""
    return (tenth + 0.5) * 100 / DECILES


def _plain(axis: Axes) -> None:
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(which="both", labelsize=8)


def _percent(row: Row) -> Row:
    return {key: 100 * (row[key] - 1) for key in ("ratio", "low", "high")}


def _lengths(axis: Axes, a: Analysis) -> None:
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_locator(FixedLocator(a.lengths))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))


def _legend(figure: Figure, *axes: Axes) -> Figure:
    found = {
        label: handle
        for axis in axes
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        found.values(), found, loc="outside upper left", ncols=min(5, len(found)), frameon=False, fontsize=8.5
    )
    return figure


def put(page: Path, text: str) -> None:
    """Replace what stands between the two marks of a page.

    Raises:
        SystemExit: the page has no marks.
    """
    old = page.read_text(encoding="utf-8")
    if BEGIN not in old or END not in old:
        raise SystemExit(f"{page} has no lines {BEGIN} and {END}")
    before, after = old.partition(BEGIN)[0], old.partition(END)[2]
    write_text(page, f"{before}{BEGIN}\n\n{text}\n{END}{after}")


def main() -> None:
    ap = argparse.ArgumentParser(
        prog="python -m scripts.replicate.figures",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    ap.add_argument("results", type=Path)
    ap.add_argument("--docs", type=Path, required=True)
    args = ap.parse_args()
    a = Analysis(unpack(args.results))
    names = draw(a, args.docs / "images")
    put(args.docs / "replication.md", sections(a, {name: f"images/{file}" for name, file in names.items()}))
    print(f"{len(names)} figures in {args.docs / 'images'}, tables in {args.docs / 'replication.md'}")


if __name__ == "__main__":
    main()
