"""Gradients of one training step under an engine, for `test_distill_engine.py`: here or by torchrun.

python engine_worker.py JOB.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from loops import LAYERS, make_loop, outcome, same
from safetensors.torch import save_file
from torch import Tensor

from regraft.convert import load_model
from regraft.distill.data import Rows
from regraft.distill.engine import Engine, whole
from regraft.distill.loop import Loop, _Run
from regraft.distill.stage import Stage
from regraft.distill.trainable import shares_prefix, trainable_names
from regraft.recipes.schema import BoundaryMSE, CrossEntropy, ForwardKL, LayerNMSE, Optimiser

LOSSES = {
    "layers": (LayerNMSE(),),
    "joint": (ForwardKL(), BoundaryMSE(weight=0.3), CrossEntropy(weight=0.1)),
}


def make_rows(lengths: list[list[int]], width: int) -> Rows:
    """Rows of documents of these lengths, ids drawn from a fixed seed."""
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 97, (len(lengths), width), generator=random)
    real, first = torch.zeros_like(ids, dtype=torch.bool), torch.zeros_like(ids, dtype=torch.bool)
    first[:, 0] = True
    for i, row in enumerate(lengths):
        real[i, : sum(row)] = True
        for n in range(1, len(row)):
            first[i, sum(row[:n])] = True
    return Rows(torch.where(real, ids, 0), real, first)


def gradients(folder: Path, job: dict[str, Any], engine: Engine) -> dict[str, Tensor]:
    """Gradient of every trained parameter, and the losses, after all of a step's micro-batches."""
    teacher, student = load_model(str(folder / "teacher")), load_model(str(folder / "student"))
    for i in LAYERS:
        student.model.layers[i].attn.evidence.data.fill_(0.7)
    names = trainable_names(student, job["train"], LAYERS)
    stage = Stage(
        name="test",
        losses=LOSSES[job["losses"]],
        train=job["train"],
        lr=1e-3,
        optimiser=Optimiser(),
        segments=((1000, 4),),
        micro_batch=job["micro_batch"],
        logit_chunk=16,
        evidence=None,
    )
    loop = Loop(student, teacher, LAYERS, [stage], None, Path(), 1, 1, engine=engine)  # type: ignore[arg-type]
    loop._alike = shares_prefix(student, teacher, LAYERS, ())
    module = engine.place(student, teacher)
    run = _Run(loop, module, stage, 0, names, set(names), None, [False], None)
    found = {}
    for _ in range(2):  # the second time the gradients of the first must be gone
        run.optimizer.zero_grad()
        found = run._backward(make_rows(job["rows"], job["width"]))
    parameters = dict(student.named_parameters())
    grads = {n: p.grad for n in names if (p := parameters[n]).grad is not None}
    result = {f"grad.{n}": whole(g).contiguous() for n, g in grads.items()}
    return result | {f"loss.{n}": torch.tensor(v, dtype=torch.float64) for n, v in found.items()}


class Died(Exception):
    """A process that went away; the loop knows nothing of it and saves nothing."""


def straight_and_resumed(models: Path, folder: Path, sharded: bool) -> None:
    """A run in one go equals, bit for bit, one that died in step 5 and was resumed."""

    def loop(name: str) -> Loop:
        return make_loop(models, folder / name, engine=Engine(student_sharded=sharded))

    straight = loop("straight")
    straight.run()
    original = _Run._backward

    def dies(self: _Run, rows: Rows) -> dict[str, float]:
        if self.at.step == 4:
            raise Died
        return original(self, rows)

    _Run._backward = dies  # type: ignore[method-assign]
    try:
        loop("died").run()
        raise AssertionError("it should have died")
    except Died:
        pass
    finally:
        _Run._backward = original  # type: ignore[method-assign]
    resumed = loop("died")
    assert resumed.resume() and resumed.at.step == 4
    resumed.run()
    assert resumed.at.step > 11
    assert same(outcome(resumed), outcome(straight))


def main(job_file: str) -> None:
    """Do every job of a file and write `N.safetensors` beside it."""
    todo = json.loads(Path(job_file).read_text())
    for sharded in (False, True):
        folder = Path(job_file).parent / f"sharded-{sharded}"
        straight_and_resumed(Path(todo["models"]), folder, sharded)
    for number, job in enumerate(todo["jobs"]):
        engine = Engine(**job["engine"])
        assert engine.world == 2
        done = gradients(Path(todo["models"]), job, engine)
        if engine.main:
            save_file(done, Path(job_file).parent / f"{number}.safetensors")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1])
