"""Heatmaps of retrieval: one PNG per task, a panel per model and one of the difference, depth along x."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Rectangle

from regraft.report.statistics import DECILES, MEAN, Row

SCORE_MAP = "viridis"  # both maps are told apart without red and green
DIFFERENCE_MAP = "PuOr"
BOLD_FROM = 10  # a bootstrap over fewer documents is too easily sure of itself
_INK, _PAPER = "#1a1a1a", "#ffffff"


def heatmaps(
    scores: Sequence[Row],
    gains: Sequence[Row],
    out_dir: Path,
    *,
    models: Sequence[str],
    student: str | None = None,
    baseline: str | None = None,
) -> dict[str, Path]:
    """Write `niah_<task>.png` for every task and `niah_mean.png` for the mean over tasks.

    Args:
        scores: rows of `statistics.table` with ten depth groups.
        gains: rows of `statistics.differences`, empty for no difference panel.
        out_dir: an existing directory.
        models: panels from top to bottom.
        student, baseline: names for the title of the difference panel.

    Returns:
        The files by task, the mean first.
    """
    tasks = [MEAN, *dict.fromkeys(row["task"] for row in scores if row["task"] != MEAN)]
    paths = {}
    for task in tasks:
        figure = _figure(
            task,
            [row for row in scores if row["task"] == task],
            [row for row in gains if row["task"] == task],
            models,
            f"{student} minus {baseline}",
        )
        paths[task] = out_dir / f"niah_{task.removeprefix('niah_')}.png"
        # no date and no version in the file: the same records give the same bytes
        figure.savefig(paths[task], dpi=150, metadata={"Software": None})
    return paths


def _figure(
    task: str, scores: list[Row], gains: list[Row], models: Sequence[str], difference_title: str
) -> Figure:
    """One task: panels share the depth axis, so that models are compared down a column."""
    lengths = sorted({row["length"] for row in scores})
    n_panels = len(models) + bool(gains)
    height = 0.9 + n_panels * (0.45 * len(lengths) + 0.45)
    figure = Figure(figsize=(8.0, height), layout="constrained")
    axes = figure.subplots(n_panels, 1, sharex=True, squeeze=False)[:, 0]
    title = "mean over tasks" if task == MEAN else task
    figure.suptitle(f"Needle retrieval, {title}: share of asked values found", fontsize=11)
    for axis, model in zip(axes, models, strict=False):
        own = [row for row in scores if row["model"] == model]
        image = _panel(axis, own, "mean", lengths, model, SCORE_MAP, (0.0, 1.0))
    figure.colorbar(
        image, ax=list(axes[: len(models)]), pad=0.015, aspect=12 * len(models), ticks=[0, 0.5, 1]
    )
    if gains:
        # a shared symmetrical scale per figure, never narrower than ten points: noise must look pale
        largest = max((abs(row["difference"]) for row in gains if row["depth"] is not None), default=0.0)
        limit = max(0.1, np.ceil(largest * 10) / 10)
        name = f"{difference_title} (bold: 95 % interval excludes 0, n at least {BOLD_FROM})"
        image = _panel(axes[-1], gains, "difference", lengths, name, DIFFERENCE_MAP, (-limit, limit))
        figure.colorbar(image, ax=axes[-1], pad=0.015, aspect=12, ticks=[-limit, 0, limit])
    axes[-1].set_xlabel("depth of the needle, % of the context (0 = top of the document)", fontsize=9)
    return figure


def _panel(
    axis: Axes,
    rows: list[Row],
    field: str,
    lengths: list[int],
    title: str,
    colours: str,
    limits: tuple[float, float],
) -> AxesImage:
    """Lengths down, tenths of depth across; value and n in each cell, cells without needles hatched."""
    cells = {(row["length"], row["depth"]): row for row in rows if row["depth"] is not None}
    grid = np.full((len(lengths), DECILES), np.nan)
    for y, length in enumerate(lengths):
        for x in range(DECILES):
            if row := cells.get((length, x)):
                grid[y, x] = row[field]
    image = axis.imshow(grid, cmap=colours, vmin=limits[0], vmax=limits[1], aspect="auto")
    for y, length in enumerate(lengths):
        for x in range(DECILES):
            if row := cells.get((length, x)):
                _write(axis, x, y, row, field, image)
            else:
                hatched = Rectangle(
                    (x - 0.5, y - 0.5), 1, 1, fill=False, hatch="////", edgecolor="#b0b0b0", lw=0
                )
                axis.add_patch(hatched)
    axis.set_title(title, fontsize=9.5, loc="left", pad=4)
    axis.set_yticks(range(len(lengths)), [f"{length:,}" for length in lengths], fontsize=9)
    axis.set_ylabel("tokens", fontsize=9)  # as short as a panel of one length is high
    axis.set_xticks(np.arange(DECILES + 1) - 0.5, [str(10 * i) for i in range(DECILES + 1)], fontsize=9)
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    axis.vlines(np.arange(1, DECILES) - 0.5, -0.5, len(lengths) - 0.5, color=_PAPER, linewidth=1.2)
    axis.hlines(np.arange(1, len(lengths)) - 0.5, -0.5, DECILES - 0.5, color=_PAPER, linewidth=1.2)
    return image


def _write(axis: Axes, x: int, y: int, row: Row, field: str, image: AxesImage) -> None:
    value = row[field]
    red, green, blue, _ = image.cmap(image.norm(value))
    ink = _INK if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else _PAPER
    style: dict[str, Any] = {"ha": "center", "color": ink}
    sure = field == "difference" and row["n"] >= BOLD_FROM and not row["low"] <= 0 <= row["high"]
    text = f"{round(value, 2) + 0.0:+.2f}" if field == "difference" else f"{value:.2f}"  # never -0.00
    axis.text(x, y, text, va="bottom", fontsize=9, weight="bold" if sure else "normal", **style)
    axis.text(x, y + 0.06, f"n={row['n']}", va="top", fontsize=6.5, **style)
