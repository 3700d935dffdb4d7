"""What the figures share: colours that are told apart without red and green, and files that are whole."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

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
