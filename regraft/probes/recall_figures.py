"""Figures of the learned recall: accuracy by flood length, by overlap, and by the number of random keys."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from regraft.probes.plots import band, legend, save, styles


def draw(summary: dict[str, Any], folder: Path) -> list[Path]:
    """`flood.png`, `overlap.png` and `random.png`, as far as there are results."""
    files = []
    if "collision" in summary:
        files.append(save(_flood(summary["collision"]), folder / "flood.png"))
        if summary["collision"]["task"]["curve"]:
            files.append(save(_overlap(summary["collision"]), folder / "overlap.png"))
    if "random" in summary:
        files.append(save(_random(summary["random"], summary["width"]), folder / "random.png"))
    return files


def _flood(found: dict[str, Any]) -> Figure:
    """A panel for each range of the overlap."""
    ranges = found["task"]["test_overlaps"]
    figure = Figure(figsize=(1 + 3.8 * len(ranges), 4), layout="constrained")
    axes = figure.subplots(1, len(ranges), sharey=True, squeeze=False)[0]
    for axis, overlap in zip(axes, ranges, strict=True):
        _curves(axis, found, "flood", lambda t, o=overlap: t["overlap"] == o)
        axis.set_xscale("log", base=2)
        floods = found["task"]["test_floods"]
        axis.set_xticks(floods, [str(f) for f in floods])
        axis.axvspan(min(floods) / 1.2, max(found["task"]["floods"]), color="black", alpha=0.06, linewidth=0)
        axis.set_xlim(min(floods) / 1.2, max(floods) * 1.2)
        axis.set_xlabel("writes of each distractor (shaded: trained on)")
        axis.set_title(f"overlap {overlap[0]:g} to {overlap[1]:g}", fontsize=10)
    _finish(figure, axes, 1 / (2 * found["task"]["pairs"]))
    return figure


def _overlap(found: dict[str, Any]) -> Figure:
    longest, trained = max(found["task"]["test_floods"]), found["task"]["overlap"]
    figure = Figure(figsize=(5.6, 4.2), layout="constrained")
    axis = figure.subplots()
    _curves(
        axis,
        found,
        "overlap",
        lambda t: t["flood"] == longest and t["overlap"][0] == t["overlap"][1],
        lambda t: t["overlap"][0],
    )
    axis.axvspan(*trained, color="black", alpha=0.06, linewidth=0)
    axis.set_xlabel("overlap of target and distractor (shaded: trained on)")
    axis.set_title(f"{longest} writes of each distractor", fontsize=10)
    _finish(figure, [axis], 1 / (2 * found["task"]["pairs"]))
    return figure


def _random(found: dict[str, Any], width: int) -> Figure:
    figure = Figure(figsize=(5.6, 4.2), layout="constrained")
    axis = figure.subplots()
    _curves(axis, found, "writes", lambda _: True, lambda t: t["writes"] / width)
    axis.set_xscale("log", base=2)
    at = [n / width for n in found["task"]["test_writes"]]
    axis.set_xticks(at, [f"{x:g}" for x in at])
    axis.axvspan(min(at) / 1.2, max(found["task"]["writes"]) / width, color="black", alpha=0.06, linewidth=0)
    axis.set_xlim(min(at) / 1.2, max(at) * 1.2)
    axis.set_xlabel("random keys per key channel, n/D (shaded: trained on)")
    _finish(figure, [axis], 1 / found["task"]["labels"])
    return figure


def _curves(axis: Axes, found: dict[str, Any], key: str, chosen: Any, at: Any = None) -> None:
    """A curve a mixer through its chosen tests, with the deviation over seeds as a band."""
    style = styles([m["mixer"] for m in found["mixers"]])
    for m in found["mixers"]:
        tests = [t for t in m["tests"] if chosen(t) and t["accuracy"]["mean"] is not None]
        x = [at(t) if at else t[key] for t in tests]
        band(axis, x, [t["accuracy"] for t in tests], style[m["mixer"]], m["mixer"])


def _finish(figure: Figure, axes: Sequence[Axes], chance: float) -> None:
    for axis in axes:
        axis.axhline(chance, color="black", linewidth=0.8, linestyle=":")
        axis.set_ylim(-0.03, 1.03)
    axes[0].set_ylabel("accuracy (dotted: chance)")
    legend(figure, axes[0])
