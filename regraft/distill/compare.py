"""A run and its control side by side: tokens, FLOPs, seconds; and how long a control of equal FLOPs is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.table import Table

from regraft.distill.cost import Cost
from regraft.distill.parent import CONTROL, SPENT, read_manifest, spending
from regraft.errors import UserError


def side_by_side(run: Path) -> dict[str, dict[str, float]]:
    """What `distill` and `control` took; empty as long as one of them is not finished."""
    folders = {"distill": run, "control": run / CONTROL}
    if not all((folder / "manifest.json").is_file() for folder in folders.values()):
        return {}
    manifests = {name: read_manifest(folder) for name, folder in folders.items()}
    if not all("finished" in manifest for manifest in manifests.values()):
        return {}
    return {name: spending(manifest) for name, manifest in manifests.items()}


def cost_table(both: dict[str, dict[str, float]]) -> Table:
    """The same as a table with the control's share of each number."""
    table = Table("", "tokens", "FLOPs", "of these the teacher's", "device-seconds", box=None)
    rows = [[taken[name] for name in SPENT] for taken in both.values()]
    for name, (tokens, flops, teacher, seconds) in zip(both, rows, strict=True):
        table.add_row(name, f"{tokens:,.0f}", f"{flops:.3g}", f"{teacher / flops:.0%}", f"{seconds:,.0f}")
    a, b = rows
    shares = [f"{mine / max(theirs, 1e-9):.2f}" for theirs, mine in zip(a, b, strict=True)]
    table.add_row("control / distill", shares[0], shares[1], "", shares[3])
    return table


def tokens_of_equal_flops(run: dict[str, Any], control: Cost) -> int:
    """Tokens for a control that takes as many FLOPs as its run, rows as full as the run's.

    Args:
        run: manifest of the distillation, finished.
        control: cost of the control.
    """
    places = sum(stage["token_places"] for stage in run["finished"]["stages"].values())
    full = run["finished"]["tokens"] / places
    return round(spending(run)["flops"] / control.flops * full)


def check_same_rows(run: Path) -> None:
    """Student and control saw the same rows in the same order, as far as both went.

    Both metrics hold, with every step, a hash over all rows so far.

    Raises:
        UserError: they did not.
    """
    theirs, own = (_rows(folder / "metrics.jsonl") for folder in (run, run / CONTROL))
    offset = 0
    parent = read_manifest(run).get("parent")
    if parent is not None and read_manifest(run / CONTROL).get("parent") is None:  # its rows came first
        hashes = list(own.values())
        offset = hashes.index(parent["data_sha256"][:16]) + 1 if parent["data_sha256"][:16] in hashes else -1
    shared = [step for step in theirs if step + offset in own]
    # The last step of a shorter control is cut to its budget.
    cut = max(own) if read_manifest(run / CONTROL).get("match") == "flops" else None
    apart = [s for s in shared if theirs[s] != own[s + offset] and s + offset != cut]
    if offset < 0 or apart:
        raise UserError(run, "the control saw other rows than the student.", "restore the run's data files.")


def _rows(metrics: Path) -> dict[int, str]:
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    return {line["step"]: line["rows"] for line in lines}
