"""Figures of MQAR: accuracy by width, and of updated beside untouched keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from regraft.probes.plots import band, legend, save, styles


def draw(summary: dict[str, Any], folder: Path) -> list[Path]:
    """`width.png` where there are several widths, `pairs.png`, and `updates.png` where keys are rewritten."""
    widths = sorted({w["width"] for t in summary["tasks"] for m in t["mixers"] for w in m["widths"]})
    files = [save(_pairs(summary), folder / "pairs.png")]
    if len(widths) > 1:
        files.append(save(_width(summary, widths), folder / "width.png"))
    if any(t["task"]["updated"] for t in summary["tasks"]):
        files.append(save(_updates(summary), folder / "updates.png"))
    return files


def _pairs(summary: dict[str, Any]) -> Figure:
    """A panel a task: accuracy by test size at the largest width."""
    tasks = summary["tasks"]
    figure, axes = _panels(len(tasks))
    style = styles([m["mixer"] for m in tasks[0]["mixers"]])
    for axis, task in zip(axes, tasks, strict=False):
        sizes = [f"{n} in {T}" for T, n in task["task"]["test"]]
        width = _largest(task)
        for m in task["mixers"]:
            tests = [t["accuracy"] for t in _tests(m, width)]
            x = [i for i, t in enumerate(tests) if t["mean"] is not None]
            band(axis, x, [tests[i] for i in x], style[m["mixer"]], m["mixer"])
        longest = max(n for _, n in task["task"]["train"])
        known = sum(n <= longest for _, n in task["task"]["test"])
        axis.axvspan(-0.3, known - 0.5, color="black", alpha=0.06, linewidth=0)
        axis.set_xlim(-0.3, len(sizes) - 0.7)
        axis.set_xticks(range(len(sizes)), sizes, fontsize=8)
        axis.set_title(f"{task['task']['name']}, width {width}", fontsize=9)
        axis.set_xlabel("pairs in tokens (shaded: trained on)", fontsize=9)
    return _finished(figure, axes)


def _largest(task: dict[str, Any]) -> int:
    """The largest width that all mixers have, or any has."""
    each = [{w["width"] for w in m["widths"]} for m in task["mixers"]]
    return max(set.intersection(*each) or set.union(*each))


def _tests(mixer: dict[str, Any], width: int) -> list[dict[str, Any]]:
    """The tests of a mixer at a width, if it was run there."""
    return next((w["tests"] for w in mixer["widths"] if w["width"] == width), [])


def _width(summary: dict[str, Any], widths: list[int]) -> Figure:
    """A panel a task and size: accuracy by width."""
    panels = [(t, i) for t in summary["tasks"] for i in range(len(t["task"]["test"]))]
    figure, axes = _panels(len(panels))
    style = styles([m["mixer"] for m in summary["tasks"][0]["mixers"]])
    for axis, (task, i) in zip(axes, panels, strict=False):
        for m in task["mixers"]:
            points = [(w["width"], w["tests"][i]["accuracy"]) for w in m["widths"] if w["tests"]]
            points = [p for p in points if p[1]["mean"] is not None]
            band(axis, [p[0] for p in points], [p[1] for p in points], style[m["mixer"]], m["mixer"])
        T, n = task["task"]["test"][i]
        axis.set_title(f"{task['task']['name']}: {n} pairs in {T} tokens", fontsize=9)
        axis.set_xscale("log", base=2)
        axis.set_xticks(widths, [str(w) for w in widths])
        axis.minorticks_off()
        axis.set_xlabel("width")
    return _finished(figure, axes)


def _panels(count: int) -> tuple[Figure, Any]:
    columns = min(4, count)
    rows = -(-count // columns)
    width = max(5.6, 1 + 3 * columns)  # a legend of three columns fits
    figure = Figure(figsize=(width, 1 + 2.7 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, sharey=True, squeeze=False).flatten()
    for axis in axes[count:]:
        axis.set_visible(False)
    return figure, axes


def _finished(figure: Figure, axes: Any) -> Figure:
    axes[0].set_ylim(-0.03, 1.03)
    axes[0].set_ylabel("accuracy")
    legend(figure, axes[0], 3)
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
            tests = [t for t in _tests(m, _largest(task)) if "updated" in t and "untouched" in t]
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
