"""Figure of the fitted kernels: weight by lag, of every mixer beside the Bayes kernel's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from regraft.probes.plots import legend, save, styles

EACH = 8  # lags that a point of the distance is over


def draw(summary: dict[str, Any], path: Path) -> Path:
    """Above the kernels, a column a regime; below their distance to Bayes' kernel, a few lags a point."""
    regimes = summary["regimes"]
    figure = Figure(figsize=(1 + 4.6 * len(regimes), 6.2), layout="constrained")
    axes = figure.subplots(2, len(regimes), sharex=True, squeeze=False)
    style = styles([m["mixer"] for m in regimes[0]["mixers"]])
    for (top, bottom), found in zip(axes.T, regimes, strict=True):
        exact = np.array(found["kernel"])[::-1]  # by lag: the newest first
        lag = np.arange(len(exact))
        top.plot(lag, exact, color="black", linewidth=2.5, alpha=0.55, label="Bayes")
        for m in found["mixers"]:
            if not m["kernels"]:
                continue
            look, kernels = style[m["mixer"]], np.array(m["kernels"])[:, ::-1]
            mean, deviation = kernels.mean(0), kernels.std(0)
            every, first = 2 * EACH, EACH + len(top.lines)  # markers aside of one another
            top.plot(lag, mean, label=m["mixer"], markersize=4, markevery=(first, every), **look._asdict())
            top.fill_between(
                lag, mean - deviation, mean + deviation, color=look.color, alpha=0.15, linewidth=0
            )
            bottom.plot(*distance(kernels, exact), markersize=4, **look._asdict())
        top.set_title(f"{found['regime']} kernel", fontsize=10)
        bottom.set_xlabel("lag")
        bottom.set_yscale("log")
    axes[0, 0].set_ylabel("weight in the last estimate")
    axes[1, 0].set_ylabel(f"distance to the Bayes kernel\n(rms of {EACH} lags)")
    legend(figure, axes[0, 0])
    return save(figure, path)


def distance(kernels: np.ndarray, exact: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean lags of `EACH` each, the last maybe of fewer, and the root mean square distance there.

    Args:
        kernels: `[seeds, lags]`.
        exact: `[lags]`.
    """
    starts = np.arange(0, len(exact), EACH)
    counts = np.diff([*starts, len(exact)])
    square = np.add.reduceat(np.square(kernels - exact).mean(0), starts) / counts
    return starts + (counts - 1) / 2, np.sqrt(square)
