"""The trained probes at full size on one GPU, in one go, and everything that came out in one archive.

    python scripts/bench/probes_gpu.py OUT --check
    python scripts/bench/probes_gpu.py OUT --minutes 20
    python scripts/bench/probes_gpu.py OUT --minutes 20 --resume OUT/probes.tar.xz

Several recipes at once, each in processes of its own. None begins a run that would end after its time, and
what is finished is kept: a second call with the archive of the first goes on where that ended. `--check` does
a few updates of every mixer instead, recorded as they will be, against the same updates on the CPU; it leaves
all kernels compiled, which takes two minutes where none is (and as long in the first runs, without it).

OUT gets `check.json`, or `probes.tar.xz`: the folders of the probes (cells, tables, JSON, figures) and logs.
On an H200 15 processes did 320 updates a second together: the contexts of processes take turns on a GPU.
With NVIDIA's MPS their kernels run side by side: 27 runs of `recall full` by twelve processes, six of
`mqar blocks` beside them, took 247 seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from regraft.probes.load import load
from regraft.probes.pool import probe_of
from regraft.probes.runner import Cell, no_tick
from regraft.probes.schema import Training
from regraft.probes.train import train

ROOT = Path(__file__).parents[2]
# Recipes and processes: 15 of 16 cores.
PLAN = ("recall-full:9", "mqar-widths:3", "mqar-medium:2", "mqar-blocks:1")
CHECKED = (("recall", "full"), ("mqar", "widths"))
UPDATES, ROWS = 5, 4  # of the check: three of the same shape are plain, so the later ones are recorded
TOLERANCE = 5e-3  # of the losses of the check


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=7.0, help="of all, but the archive")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--check", action="store_true", help="against the CPU, nothing else")
    parser.add_argument("--resume", type=Path, help="archive of an earlier call")
    parser.add_argument("--only", nargs="+", default=PLAN, metavar="VERB-RECIPE:PROCESSES", help="what runs")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.check:
        found = {verb: check(verb, recipe, args.device) for verb, recipe in CHECKED}
        (args.out / "check.json").write_text(json.dumps(found, indent=1))
        print(json.dumps(found, indent=1))
        sys.exit(0 if all(part["agree"] for part in found.values()) else 1)
    start, work = time.monotonic(), Path(tempfile.mkdtemp())
    if args.resume:
        with tarfile.open(args.resume) as archive:
            archive.extractall(work, filter="data")
    running = []
    for entry in args.only:
        name, _, jobs = entry.partition(":")
        verb, _, recipe = name.partition("-")
        running.append((name, begin(verb, recipe, int(jobs or 1), args.minutes, args.device, work)))
    hard = start + 60 * args.minutes + 15
    for name, process in running:
        try:
            process.wait(max(1.0, hard - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait(20)
        cells = len(list((work / name / "cells").glob("*.json"))) if (work / name).is_dir() else 0
        seconds = round(time.monotonic() - start)
        print(f"{name}: {cells} runs after {seconds} s, exit {process.returncode}", flush=True)
    for file in sorted(work.glob("*.log")):
        print(f"== {file.name}\n" + "\n".join(file.read_text().splitlines()[-6:])[-1500:], flush=True)
    with tarfile.open(args.out / "probes.tar.xz", "w:xz") as archive:
        archive.add(work, ".")


def begin(
    verb: str, recipe: str, jobs: int, minutes: float, device: str, work: Path
) -> subprocess.Popen[bytes]:
    """Start one recipe."""
    name = f"{verb}-{recipe}"
    command = [sys.executable, "-m", "regraft", "probe", verb, recipe, "--out", str(work / name)]
    command += ["--overwrite", "--device", device, "--jobs", str(jobs)]
    command += ["--minutes", str(minutes)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    with (work / f"{name}.log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)


def check(verb: str, recipe: str, device: str) -> dict[str, Any]:
    """A few updates of every mixer here and on the CPU: whether their losses agree."""
    rows = []
    for cell in chosen(verb, recipe):
        row: dict[str, Any] = {"cell": cell.name}
        try:
            there, here = losses(verb, cell, "cpu"), losses(verb, cell, device)
            row["error"] = max(abs(a - b) / max(abs(a), 1e-6) for a, b in zip(here, there, strict=True))
        except Exception as error:  # the other mixers are still worth knowing
            row["error"] = None
            row["said"] = "".join(traceback.format_exception(error))[-800:]
        rows.append(row)
    fine = all(r["error"] is not None and r["error"] < TOLERANCE for r in rows)
    return {"agree": fine, "mixers": rows}


def chosen(verb: str, recipe: str) -> list[Cell]:
    """A cell of every mixer at the narrowest width, and of the Bayesian Layer at all."""
    cells: dict[tuple[str, int], Cell] = {}
    for cell in probe_of(verb).cells(load(verb, recipe)):
        mixer, width = cell.settings["mixer"]["name"] or "attention", cell.settings["model"]["width"]
        if width == 64 or mixer == "Bayesian Layer":
            cells.setdefault((mixer, width), cell)
    return list(cells.values())


def losses(verb: str, cell: Cell, device: str) -> list[float]:
    """Of the first updates, all on one shape of batch."""
    probe, s = probe_of(verb), cell.settings
    torch.manual_seed(s["seed"])
    model = probe.model_of(s).to(device)
    training = Training.model_validate({**s["train"], "steps": UPDATES, "batch": ROWS, "warmup": 0.0})
    batch = probe.batch_of(s, training.batch, 0).to(device)
    found = train(model, lambda _: batch, probe.loss, training, no_tick)
    return list(found["losses"])


if __name__ == "__main__":
    main()
