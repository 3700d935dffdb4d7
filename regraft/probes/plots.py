"""What the figures share: colours that are told apart without red and green, and files that are whole."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure


class Style(NamedTuple):
    """How one curve is drawn: Okabe and Ito's colours, dashes and markers as a second cue."""

    color: str
    linestyle: str
    marker: str


_COLOURS = ("#0072B2", "#E69F00", "#CC79A7", "#009E73", "#56B4E9", "#D55E00", "#000000", "#999999")
_DASHES = ("-", "--", "-.", ":", "-", "--", ":", "-.")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")


def styles(names: Sequence[str]) -> dict[str, Style]:
    """A style for each name, in order; they repeat after eight."""
    return {
        name: Style(_COLOURS[i % 8], _DASHES[i % 8], _MARKERS[i % 8])
        for i, name in enumerate(dict.fromkeys(names))
    }


def save(figure: Figure, path: Path) -> Path:
    """Write a PNG at once; the same numbers give the same bytes, for it holds no date and no version."""
    temporary = path.with_name(f".{path.name}")
    figure.savefig(temporary, dpi=150, format="png", metadata={"Software": None})
    os.replace(temporary, path)
    return path


def band(axis: Axes, x: Sequence[float], y: Sequence[dict[str, Any]], style: Style, label: str) -> None:
    """A curve through the means of spreads (see `tables.spread`), with one deviation to both sides."""
    mean, deviation = ([point[key] for point in y] for key in ("mean", "deviation"))
    axis.plot(x, mean, label=label, markersize=5, **style._asdict())
    low, high = ([m + sign * d for m, d in zip(mean, deviation, strict=True)] for sign in (-1, 1))
    axis.fill_between(x, low, high, color=style.color, alpha=0.18, linewidth=0)


def legend(figure: Figure, axis: Axes) -> None:
    """One legend under all panels, in rows of about the same length that fit the figure's width."""
    handles, labels = axis.get_legend_handles_labels()
    columns = balanced(len(labels), int(figure.get_figwidth() / 1.8))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=9)


def balanced(count: int, most: int) -> int:
    """Columns, at most `most`, for the fewest rows, and then the fewest columns."""
    rows = -(-count // most)
    return -(-count // rows) if rows else 1
