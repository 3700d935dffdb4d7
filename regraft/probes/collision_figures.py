"""Figures of the two-key collision."""

from __future__ import annotations

from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from regraft.probes.collision_rules import (
    BAYES,
    KDN,
    RESET,
    RULES,
    SETTING,
    STATED,
    A,
    B,
    keys,
    margins,
    rotations,
    schedule,
    write_vectors,
)
from regraft.probes.plots import save

LOW = 0.45  # the paper's control overlap
# Okabe and Ito's colours, told apart without red and green; dashes where curves may lie on each other.
STYLES: dict[str, tuple[str, str]] = {
    "linear attention": ("#999999", "-"),
    "GLA": ("#56B4E9", "--"),
    "DeltaNet": ("#E69F00", "-"),
    "covariance reset": ("#CC79A7", "--"),
    "Bayesian Layer": ("#0072B2", "-"),
    "KDN diagonal, mu = D": ("#009E73", "-"),
    "KDN isotropic, mu = D": ("#D55E00", ":"),
}


def draw(folder: Path) -> list[Path]:
    """Write `margin.png` and `gain.png`, after the paper's Figure 3a and 3b."""
    return [save(_margin_figure(), folder / "margin.png"), save(_gain_figure(), folder / "gain.png")]


def _margin_figure() -> Figure:
    """Margin by step: high overlap, low overlap, and high overlap in a random basis."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    basis = rotations(1)[0]
    panels = (
        (f"keys along the axes, rho = {STATED}", keys(STATED)),
        (f"keys along the axes, rho = {LOW}", keys(LOW)),
        (f"keys in a random basis, rho = {STATED}", keys(STATED) @ basis.T),
    )
    axes = figure.subplots(1, len(panels), sharey=True)
    for axis, (title, k) in zip(axes, panels, strict=True):
        for name, (colour, dash) in STYLES.items():
            margin = margins((RULES | KDN)[name], k[None])[0]
            axis.plot(range(1, len(margin) + 1), margin, color=colour, linestyle=dash, label=name)
        axis.axhline(0, color="black", linewidth=0.8)
        axis.set_title(title, fontsize=10)
        _phases(axis)
    axes[0].set_ylabel("margin of B over A at key B")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    return figure


def _gain_figure() -> Figure:
    """Gain along the written key, and the angle between the vector written and the key that is flooded."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    k = keys(STATED)
    steps = range(1, SETTING.flood_start + SETTING.flood + 1)
    for name, rule in (("Bayesian Layer", BAYES), ("covariance reset", RESET)):
        colour, dash = STYLES[name]
        kappa = write_vectors(rule, k)
        written = k[schedule()]
        left.plot(steps, (kappa * written).sum(-1), color=colour, linestyle=dash, label=name)
        flood = kappa[SETTING.flood_start :]
        for identity, marker in ((A, "o"), (B, "s")):
            cosine = (flood @ k[identity] / flood.norm(dim=-1)).clamp(-1, 1)
            right.plot(
                range(1, len(flood) + 1),
                torch.rad2deg(cosine.arccos()),
                color=colour,
                linestyle=dash,
                marker=marker,
                markersize=3,
                label=f"{name}, to key {'AB'[identity]}",
            )
    left.set_title(f"gain along the written key, rho = {STATED}", fontsize=10)
    left.set_ylim(0, 1.12)
    left.set_ylabel("gain")
    _phases(left)
    left.legend(fontsize=8, loc="lower right")
    right.set_title("direction of the vector written in the flood", fontsize=10)
    right.set_xlabel("writes to A")
    right.set_ylabel("angle in degrees")
    right.set_xlim(0.5, 12.5)
    right.legend(fontsize=8)
    return figure


def _phases(axis: Axes) -> None:
    """Mark seed, boost and flood along the writes."""
    seed_end = SETTING.flood_start - SETTING.boost
    end = SETTING.flood_start + SETTING.flood
    for name, start, stop in (
        ("seed", 0, seed_end),
        ("boost B", seed_end, SETTING.flood_start),
        ("flood A", SETTING.flood_start, end),
    ):
        axis.axvspan(
            start + 0.5, stop + 0.5, color="black", alpha=0.06 if name == "boost B" else 0.0, linewidth=0
        )
        axis.text(
            (start + stop + 1) / 2, 1.01, name, transform=axis.get_xaxis_transform(), ha="center", fontsize=8
        )
    axis.set_xlim(0.5, end + 0.5)
    axis.set_xlabel("write")
    axis.title.set_position((0.5, 1.05))
    axis.set_title(axis.get_title(), fontsize=10, pad=16)
