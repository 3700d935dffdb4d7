"""Figure of the bandits: S of every rule between the prior's 0 and the Bayes predictor's 1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from regraft.probes.plots import save, styles


def draw_scores(summary: dict[str, Any], path: Path) -> Path:
    """One panel a task, a bar a rule with its 95 % interval."""
    tasks = summary["tasks"]
    names = list(dict.fromkeys(r["rule"] for t in tasks for r in t["rules"]))
    colour = styles(names)
    figure = Figure(figsize=(3.2 + 2.6 * len(tasks), 3.4), layout="constrained")
    axes = figure.subplots(1, len(tasks), sharey=True, sharex=True, squeeze=False)[0]
    for axis, found in zip(axes, tasks, strict=True):
        for r in found["rules"]:
            row = len(names) - names.index(r["rule"])
            axis.barh(row, r["value"], color=colour[r["rule"]].color, height=0.7)
            axis.plot((r["low"], r["high"]), (row, row), color="black", linewidth=1.2)
            axis.text(1.03, row, f"{r['value']:.3f}", va="center", fontsize=8)
        t = found["task"]
        axis.set_title(f"{t['kind']}\n{t['arms']} arms, {t['length']} steps, delay {t['delay']}", fontsize=9)
        axis.axvline(1, color="black", linewidth=0.8)
        axis.set_xlabel("S")
    axes[0].set_xlim(0, 1.25)
    axes[0].set_yticks([len(names) - i for i in range(len(names))], names, fontsize=9)
    return save(figure, path)
