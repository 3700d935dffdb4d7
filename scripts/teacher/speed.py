"""Which form of the filter trains fastest here, and whether both compute the same.

    python -m scripts.teacher.speed --preset replication --graph --compile --speed-out speed.json

Each way runs in a process of its own, both at once but for the timing: what is compiled here is found in the
caches when the training begins. A way that fails, or whose gradient is another one, is not chosen.
"""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regraft.layers import RegraftForCausalLM
from scripts.teacher.model import new_model
from scripts.teacher.step import Step, choose_kernels, loss_of
from scripts.teacher.train import arguments

WAYS = ("torch", "triton")  # the first one is what the others have to agree with
TOLERANCE = 0.03  # of loss and gradient norm in bfloat16
SECONDS = 150  # a way that takes longer, compilation included, is none
STEPS = 10
VOCABULARY = 8192


def measure(given: list[str], lock: Path) -> dict[str, float]:
    """Loss and gradient norm of a few rows, then milliseconds of a whole step."""
    args = arguments(given)
    torch.manual_seed(0)
    model = new_model(args, VOCABULARY).to(args.device)
    choose_kernels(model, args.kernels)
    ids = torch.randint(VOCABULARY, (args.last_rows, args.length), device=args.device)
    batch = (ids, torch.ones(ids.shape, device=args.device), ids[:, 0] % 2 == 0)
    found = _gradient(model, [x[:4] for x in batch])
    step = Step(model, args)
    if args.compile:
        step.compile()
    for _ in range(5):
        step(batch, 1e-4)
    _wait()
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        start = time.perf_counter()
        for _ in range(STEPS):
            step(batch, 1e-4)
        _wait()
        found["ms"] = (time.perf_counter() - start) * 1000 / STEPS
    found["tokens_per_second"] = ids.numel() / found["ms"] * 1000
    if torch.cuda.is_available():
        found["memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
    return {name: round(value, 5) for name, value in found.items()}


def _gradient(model: RegraftForCausalLM, batch: list[Tensor]) -> dict[str, float]:
    device = batch[0].device.type
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        loss, _ = loss_of(model, *batch)
    loss.backward()
    norms = torch.stack([p.grad.float().norm() for p in model.parameters() if p.grad is not None])
    model.zero_grad(set_to_none=True)
    return {"loss": float(loss.detach()), "gradient": float(norms.norm())}


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def choose(found: dict[str, dict[str, Any]]) -> str:
    """The fastest way that agrees with the first."""
    reference = found[WAYS[0]]

    def agrees(way: dict[str, Any]) -> bool:
        return "ms" in way and all(
            abs(way[name] - reference[name]) <= TOLERANCE * abs(reference[name])
            for name in ("loss", "gradient")
            if name in reference
        )

    good = [name for name, way in found.items() if agrees(way)]
    return min(good, key=lambda name: found[name]["ms"]) if good else WAYS[0]


def main() -> None:
    given = sys.argv[1:]
    if "--one" in given:
        given.remove("--one")
        lock = Path(given.pop())
        print(json.dumps(measure(given, lock)))
        return
    place = given.index("--speed-out")
    out = Path(given[place + 1])
    given = [*given[:place], *given[place + 2 :], "--out", str(out.parent)]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "scripts.teacher.speed", *given, "--one"]
        running = {
            way: subprocess.Popen(
                [*command, "--kernels", way, f"{folder}/lock"], stdout=subprocess.PIPE, text=True
            )
            for way in WAYS
        }
        deadline = time.monotonic() + SECONDS
        found = {way: _result(process, deadline) for way, process in running.items()}
    result = {"chosen": choose(found), "ways": found}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


def _result(process: subprocess.Popen[str], deadline: float) -> dict[str, Any]:
    try:
        printed, _ = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
        return dict(json.loads(printed.splitlines()[-1])) if process.returncode == 0 else {"failed": True}
    except (subprocess.TimeoutExpired, ValueError, IndexError):
        process.kill()
        process.wait()
        return {"failed": True}


if __name__ == "__main__":
    main()
