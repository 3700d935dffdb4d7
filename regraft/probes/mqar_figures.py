"""Figures of MQAR: accuracy by width, and of updated beside untouched keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from regraft.probes.plots import band, legend, save, styles


def draw(summary: dict[str, Any], folder: Path) -> list[Path]:
    """`width.png`, and `updates.png` where keys are rewritten."""
    files = [save(_width(summary), folder / "width.png")]
    if any(t["task"]["updated"] for t in summary["tasks"]):
        files.append(save(_updates(summary), folder / "updates.png"))
    return files


def _width(summary: dict[str, Any]) -> Figure:
    """A panel a task and size, a curve a mixer."""
    panels = [(t, i) for t in summary["tasks"] for i in range(len(t["task"]["test"]))]
    columns = min(4, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(1 + 3 * columns, 1 + 2.7 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, sharey=True, squeeze=False).flatten()
    style = styles([m["mixer"] for m in summary["tasks"][0]["mixers"]])
    for axis, (task, i) in zip(axes, panels, strict=False):
        for m in task["mixers"]:
            points = [(w["width"], w["tests"][i]["accuracy"]) for w in m["widths"] if w["tests"]]
            points = [p for p in points if p[1]["mean"] is not None]
            band(axis, [p[0] for p in points], [p[1] for p in points], style[m["mixer"]], m["mixer"])
        T, n = task["task"]["test"][i]
        trained = "trained on" if [T, n] in task["task"]["train"] else "longer than in training"
        axis.set_title(f"{task['task']['name']}: {n} pairs in {T} tokens\n({trained})", fontsize=9)
        widths = [w["width"] for w in task["mixers"][0]["widths"]]
        axis.set_xscale("log", base=2)
        axis.set_xticks(widths, [str(w) for w in widths])
        axis.minorticks_off()
        axis.set_ylim(-0.03, 1.03)
        axis.set_xlabel("width")
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    axes[0].set_ylabel("accuracy")
    legend(figure, axes[0], 4)
    return figure


def _updates(summary: dict[str, Any]) -> Figure:
    """At the largest width: keys written twice against keys that should be left alone."""
    tasks = [t for t in summary["tasks"] if t["task"]["updated"]]
    figure = Figure(figsize=(1 + 3.6 * len(tasks), 4.2), layout="constrained")
    axes = figure.subplots(1, len(tasks), sharey=True, sharex=True, squeeze=False)[0]
    style = styles([m["mixer"] for m in tasks[0]["mixers"]])
    for axis, task in zip(axes, tasks, strict=True):
        axis.plot((0, 1), (0, 1), color="black", linewidth=0.6, linestyle=":")
        for m in task["mixers"]:
            look = style[m["mixer"]]
            tests = [t for t in m["widths"][-1]["tests"] if "updated" in t and "untouched" in t]
            x, y = ([t[key]["mean"] for t in tests] for key in ("untouched", "updated"))
            axis.plot(x, y, label=m["mixer"], **look._asdict())
            dx, dy = ([t[key]["deviation"] for t in tests] for key in ("untouched", "updated"))
            axis.errorbar(x, y, dy, dx, color=look.color, linewidth=0.8, linestyle="none")
        axis.set_title(f"{task['task']['name']}, from shortest to longest test", fontsize=9)
        axis.set_xlabel("accuracy of untouched keys")
        axis.set_xlim(-0.03, 1.03)
        axis.set_ylim(-0.03, 1.03)
    axes[0].set_ylabel("accuracy of updated keys")
    legend(figure, axes[0], 3)
    return figure
