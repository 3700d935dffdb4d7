"""Figures of MQAR: accuracy by width, and of updated beside untouched keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from regraft.probes.plots import Style, band, legend, save, styles


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
    for axis, task in zip(axes, tasks, strict=False):
        _by_size(axis, task, "accuracy", "", _styles(summary))
    return _finished(figure, axes)


def _updates(summary: dict[str, Any]) -> Figure:
    """Two panels a task with rewritten keys: those written twice, and those that should be left alone."""
    tasks = [t for t in summary["tasks"] if t["task"]["updated"]]
    figure, axes = _panels(2 * len(tasks))
    panels = [(task, kind) for task in tasks for kind in ("updated", "untouched")]
    for axis, (task, kind) in zip(axes, panels, strict=False):
        _by_size(axis, task, kind, f": {kind} keys", _styles(summary))
    return _finished(figure, axes)


def _styles(summary: dict[str, Any]) -> dict[str, Style]:
    """The look of every mixer, the same in all tasks."""
    return styles([m["mixer"] for task in summary["tasks"] for m in task["mixers"]])


def _by_size(axis: Axes, task: dict[str, Any], key: str, suffix: str, style: dict[str, Style]) -> None:
    """One accuracy by test size at the largest width, with what was trained on shaded."""
    sizes = [f"{n} in {T}" for T, n in task["task"]["test"]]
    width = _largest(task)
    for m in task["mixers"]:
        tests = [t.get(key, {"mean": None}) for t in _tests(m, width)]
        x = [i for i, t in enumerate(tests) if t["mean"] is not None]
        band(axis, x, [tests[i] for i in x], style[m["mixer"]], m["mixer"])
    known = sum(n <= _longest(task) for _, n in task["task"]["test"])
    axis.axvspan(-0.3, known - 0.5, color="black", alpha=0.06, linewidth=0)
    axis.set_xlim(-0.3, len(sizes) - 0.7)
    axis.set_xticks(range(len(sizes)), sizes, fontsize=8)
    axis.set_title(f"{task['task']['name']}{suffix}, width {width}", fontsize=9)
    axis.set_xlabel("pairs in tokens (shaded: trained on)", fontsize=9)


def _longest(task: dict[str, Any]) -> int:
    """The most pairs that a task trains on."""
    return max(n for _, n in task["task"]["train"])


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
    style = _styles(summary)
    for axis, (task, i) in zip(axes, panels, strict=False):
        for m in task["mixers"]:
            points = [(w["width"], w["tests"][i]["accuracy"]) for w in m["widths"] if w["tests"]]
            points = [p for p in points if p[1]["mean"] is not None]
            band(axis, [p[0] for p in points], [p[1] for p in points], style[m["mixer"]], m["mixer"])
        T, n = task["task"]["test"][i]
        beyond = " (beyond training)" if n > _longest(task) else ""
        axis.set_title(f"{task['task']['name']}: {n} pairs in {T} tokens{beyond}", fontsize=9)
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
    legend(figure, axes[0])
    return figure
