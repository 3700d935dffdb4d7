"""Heatmaps: a column per model, lengths along x, depth down from the document's top, differences below."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Rectangle

from regraft.report.statistics import DECILES, MEAN, Row

# All but the last are told apart without red and green.
SCORE_MAPS = {"viridis": "viridis", "red-yellow-green": "RdYlGn"}
DIFFERENCE_MAP = "PuOr"
BOLD_FROM = 10  # a bootstrap over fewer documents is too easily sure of itself
PER_ROW = 4  # models side by side at page width
CELL = 0.62, 0.33  # inches
_INK, _PAPER = "#1a1a1a", "#ffffff"


def heatmaps(
    scores: Sequence[Row],
    gains: Sequence[Row],
    out_dir: Path,
    *,
    models: Sequence[str],
    baseline: str | None = None,
    colours: str = "viridis",
) -> dict[str, str]:
    """Write `niah_mean` and `niah_<task>` as PNG and SVG.

    Args:
        scores: rows of `statistics.table` with ten depth groups.
        gains: rows of `statistics.differences` minus the baseline, empty for no difference maps.
        out_dir: an existing directory.
        models: panels from left to right.
        baseline: what is subtracted in the difference maps.
        colours: a key of `SCORE_MAPS`.

    Returns:
        File names without suffix by task, the mean first.
    """
    names = {}
    for task in [MEAN, *dict.fromkeys(row["task"] for row in scores if row["task"] != MEAN)]:
        figure = _figure(
            task,
            [row for row in scores if row["task"] == task],
            [row for row in gains if row["task"] == task and row["baseline"] == baseline],
            list(models),
            SCORE_MAPS[colours],
        )
        names[task] = f"niah_{task.removeprefix('niah_')}"
        save(figure, out_dir / names[task])
    return names


def save(figure: Figure, stem: Path) -> None:
    """Write PNG and SVG without dates or random names: the same records give the same bytes."""
    figure.savefig(stem.with_suffix(".png"), dpi=150, metadata={"Software": None})
    with rc_context({"svg.hashsalt": stem.name, "svg.fonttype": "path"}):
        figure.savefig(stem.with_suffix(".svg"), metadata={"Date": None, "Creator": None})


def _figure(task: str, scores: list[Row], gains: list[Row], models: list[str], colour_map: str) -> Figure:
    """One task: scores above, the difference to the baseline below the model it belongs to."""
    lengths = sorted({row["length"] for row in scores})
    columns = min(PER_ROW, len(models))
    blocks = [models[i : i + columns] for i in range(0, len(models), columns)]
    rows = [(block, gained) for block in blocks for gained in ((False, True) if gains else (False,))]
    width = max(5.0, 1.5 + columns * max(1.3, CELL[0] * len(lengths)))
    figure = Figure(figsize=(width, 0.8 + len(rows) * (CELL[1] * DECILES + 0.55)), layout="constrained")
    axes = figure.subplots(len(rows), columns, sharex=True, sharey=True, squeeze=False)
    title = "mean over tasks" if task == MEAN else task
    figure.suptitle(f"Needle retrieval, {title}: share of asked values found", fontsize=11)
    limit = _difference_limit([row for row in gains if row["depth"] is not None])
    for axis_row, (block, gained) in zip(axes, rows, strict=True):
        image = None
        for axis, model in zip(axis_row, [*block, *[None] * (columns - len(block))], strict=True):
            own = [r for r in (gains if gained else scores) if r["student" if gained else "model"] == model]
            if model is None or not own:
                axis.set_axis_off()
            elif gained:
                heading = f"{model} - {own[0]['baseline']}"
                image = _panel(axis, own, "difference", lengths, heading, DIFFERENCE_MAP, (-limit, limit))
            else:
                image = _panel(axis, own, "mean", lengths, model, colour_map, (0.0, 1.0))
        ticks = [-limit, 0, limit] if gained else [0, 0.5, 1]
        if image is not None:
            figure.colorbar(image, ax=list(axis_row), pad=0.01, aspect=30, ticks=ticks)
    _label(figure, axes, bool(gains))
    return figure


def _difference_limit(gains: list[Row]) -> float:
    """End of the one scale of all differences: what chance alone gives a cell must look pale.

    Ten points at least, and twice the largest standard error of a share of n needles, which is `1/sqrt(n)`.
    """
    largest = max((abs(row["difference"]) for row in gains), default=0.0)
    chance = max((row["n"] ** -0.5 for row in gains), default=0.0)
    return float(min(1.0, max(0.1, np.ceil(10 * max(largest, chance)) / 10)))


def _label(figure: Figure, axes: Any, gains: bool) -> None:
    for axis in axes[:, 0]:
        axis.set_ylabel("depth of the needle, %", fontsize=9)
        axis.yaxis.set_visible(True)
    note = "tokens of prompt and answer; depth 0 is the top of the document"
    if gains:
        note += f"; bold: 95 % interval excludes 0, n at least {BOLD_FROM}"
    figure.supxlabel(note, fontsize=8.5)


def _panel(
    axis: Axes,
    rows: list[Row],
    field: str,
    lengths: list[int],
    title: str,
    colours: str,
    limits: tuple[float, float],
) -> AxesImage:
    """Tenths of depth down, lengths across; value and n in each cell, cells without needles hatched."""
    cells = {(row["depth"], row["length"]): row for row in rows if row["depth"] is not None}
    places = [(y, x, cells.get((y, length))) for y in range(DECILES) for x, length in enumerate(lengths)]
    grid = np.full((DECILES, len(lengths)), np.nan)
    for y, x, row in places:
        grid[y, x] = np.nan if row is None else row[field]
    image = axis.imshow(grid, cmap=colours, vmin=limits[0], vmax=limits[1], aspect="auto")
    for y, x, row in places:
        if row is not None:
            _write(axis, x, y, row, field, image)
        else:
            style: dict[str, Any] = {"fill": False, "hatch": "////", "edgecolor": "#b0b0b0", "lw": 0}
            axis.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, **style))
    axis.set_title(title, fontsize=9.5, loc="left", pad=4)
    axis.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], fontsize=9)
    axis.set_yticks(np.arange(DECILES + 1) - 0.5, [str(10 * i) for i in range(DECILES + 1)], fontsize=9)
    axis.tick_params(length=0, labelbottom=True)
    axis.spines[:].set_visible(False)
    axis.hlines(np.arange(1, DECILES) - 0.5, -0.5, len(lengths) - 0.5, color=_PAPER, linewidth=1.2)
    axis.vlines(np.arange(1, len(lengths)) - 0.5, -0.5, DECILES - 0.5, color=_PAPER, linewidth=1.2)
    return image


def _write(axis: Axes, x: int, y: int, row: Row, field: str, image: AxesImage) -> None:
    value = row[field]
    red, green, blue, _ = image.cmap(image.norm(value))
    ink = _INK if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else _PAPER
    style: dict[str, Any] = {"ha": "center", "color": ink}
    sure = field == "difference" and row["n"] >= BOLD_FROM and not row["low"] <= 0 <= row["high"]
    text = f"{round(value, 2) + 0.0:+.2f}" if field == "difference" else f"{value:.2f}"  # never -0.00
    axis.text(x, y + 0.08, text, va="bottom", fontsize=9, weight="bold" if sure else "normal", **style)
    axis.text(x, y + 0.1, f"n={row['n']}", va="top", fontsize=6.5, **style)
