"""Line figures: retrieval over depth, retrieval over length, perplexity over length and over position."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from regraft.report.figures import save
from regraft.report.statistics import DECILES, MEAN, Row

# Okabe and Ito's colours, told apart by colour-blind readers; marker and line tell the same once more.
STYLES = [
    ("#0072B2", "o", "-"),
    ("#D55E00", "s", "--"),
    ("#222222", "^", ":"),
    ("#009E73", "D", "-."),
    ("#CC79A7", "v", "-"),
    ("#E69F00", "P", "--"),
]


def depth_profiles(
    scores: Sequence[Row], out_dir: Path, models: Sequence[str], tasks: Sequence[str] = (MEAN,)
) -> str:
    """Share found by depth, a panel per length, with 95 % intervals; returns the file name without suffix.

    The mean over tasks by itself folds into rows of four; several tasks have a row each.
    """
    lengths = sorted({row["length"] for row in scores})
    columns = min(4, len(lengths)) if len(tasks) == 1 else len(lengths)
    panels = [(task, length) for task in tasks for length in lengths]
    rows = -(-len(panels) // columns)
    height = 2.6 if len(tasks) == 1 else 1.75
    figure = Figure(figsize=(max(4.0, 2.5 * columns), height * rows + 0.5), layout="constrained")
    axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    for axis, (task, length) in zip(axes.flat, panels, strict=False):
        for model in models:
            own = [
                row
                for row in scores
                if (row["task"], row["model"], row["length"]) == (task, model, length)
                and row["depth"] is not None
            ]
            own.sort(key=lambda row: row["depth"])
            x = [(row["depth"] + 0.5) * 100 / DECILES for row in own]
            _line(axis, x, own, "mean", model, models)
        name = "" if len(tasks) == 1 else f"{task.removeprefix('niah_')}, "
        axis.set_title(f"{name}{length:,} tokens", fontsize=9.5, loc="left")
        axis.set_ylim(-0.03, 1.03)
        axis.set_xlim(0, 100)
    figure.supxlabel("depth of the needle, % of the context (0 = top of the document)", fontsize=9)
    figure.supylabel("share found" + (", mean over tasks" if tasks == (MEAN,) else ""), fontsize=9)
    _legend(figure, axes[0, 0])
    name = "niah_depth" if len(tasks) == 1 else "niah_depth_tasks"
    save(figure, out_dir / name)
    return name


def perplexity_curves(rows: Sequence[Row], out_dir: Path, models: Sequence[str]) -> str:
    """Perplexity by context length and, at the longest, by position, a row of panels per set."""
    sets = list(dict.fromkeys(row["set"] for row in rows))
    figure = Figure(figsize=(8.6, 2.9 * len(sets) + 0.4), layout="constrained")
    axes = figure.subplots(len(sets), 2, squeeze=False)
    for (left, right), name in zip(axes, sets, strict=True):
        longest = max(row["length"] for row in rows if row["set"] == name)
        for model in models:
            own = [row for row in rows if (row["model"], row["set"]) == (model, name)]
            whole = sorted((r for r in own if r["start"] is None), key=lambda r: r["length"])
            _line(left, [row["length"] for row in whole], whole, "perplexity", model, models)
            parts = [r for r in own if r["start"] is not None and r["length"] == longest]
            x = [(row["start"] + row["end"]) / 2 for row in parts]
            _line(right, x, parts, "perplexity", model, models)
        label = Path(name).name
        left.set_title(f"{label}: by context length", fontsize=9.5, loc="left")
        right.set_title(f"{label}: by position in {longest:,} tokens", fontsize=9.5, loc="left")
        left.set_ylabel("perplexity", fontsize=9)
        for axis, at in ((left, {r["length"] for r in whole}), (right, {r["end"] for r in parts})):
            axis.set_xscale("log", base=2)
            axis.xaxis.set_major_locator(FixedLocator(sorted(at)))
            axis.xaxis.set_minor_locator(NullLocator())
            axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
        right.set_xlim(right=1.1 * longest)
    figure.supxlabel("tokens", fontsize=9)
    _legend(figure, axes[0, 0])
    save(figure, out_dir / "perplexity")
    return "perplexity"


def _line(
    axis: Axes, x: Sequence[float], rows: Sequence[Row], field: str, model: str, models: Sequence[str]
) -> None:
    """One model's line with its intervals, beside those of the others rather than over them."""
    colour, marker, line = STYLES[list(models).index(model) % len(STYLES)]
    axis.plot(
        x, [row[field] for row in rows],
        color=colour, marker=marker, linestyle=line, markersize=4, linewidth=1.6, label=model,
    )  # fmt: skip
    axis.fill_between(
        x, [row["low"] for row in rows], [row["high"] for row in rows], color=colour, alpha=0.09, linewidth=0
    )
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize=8.5)


def _legend(figure: Figure, axis: Axes) -> None:
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside upper left", ncols=min(4, len(labels)), frameon=False, fontsize=9
    )
