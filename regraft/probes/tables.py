"""Means over seeds and Markdown tables, for all probes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any


def spread(values: Sequence[float | None]) -> dict[str, Any]:
    """Mean and sample deviation of the runs that have a value, and all of them; a diverged run has None."""
    known = [v for v in values if v is not None]
    return {
        "mean": statistics.fmean(known) if known else None,
        "deviation": statistics.stdev(known) if len(known) > 1 else 0.0,
        "values": list(values),
    }


def told(found: dict[str, Any], digits: int = 3) -> str:
    """`mean ± deviation` of a spread; runs that diverged are named."""
    lost = found["values"].count(None)
    if found["mean"] is None:
        return "diverged"
    text = f"{found['mean']:.{digits}f}"
    if len(found["values"]) - lost > 1:
        text += f" ± {found['deviation']:.{digits}f}"
    return f"{text} ({lost} diverged)" if lost else text


def counted(name: str, found: dict[str, Any], seeds: Sequence[int]) -> str:
    """The name of a row, with the number of its runs where some of the seeds are missing."""
    runs = len(found["values"])
    return name if runs == len(seeds) else f"{name} ({runs} of {len(seeds)} seeds)"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table."""
    lines = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows)]
