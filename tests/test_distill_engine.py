"""A step's gradients do not depend on how it is split: micro-batches, processes, shards, recomputation."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from engine_worker import gradients
from loops import make_loop, outcome, write_models
from safetensors.torch import load_file

import regraft
from regraft.distill import checkpoint
from regraft.distill.engine import Engine

RAGGED = [[9], [2], [12], [5], [7]]
ONE_ROW = [[11]]  # the second process has padding alone
PACKED = [[3, 4, 5], [12], [2, 9], [6]]
SPLITS = {
    "one by one": {"micro_batch": 1},
    "two, two, one": {"micro_batch": 2},
    "recomputed": {"engine": {"recompute": True}},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return write_models(tmp_path_factory.mktemp("engine"))


def job(losses="joint", rows=RAGGED, train="all", engine=None, micro_batch=None):
    return {"losses": losses, "rows": rows, "width": 12, "train": train, "micro_batch": micro_batch,
            "engine": engine or {}}  # fmt: skip


def agree(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        largest = max(float(value.abs().max()), 1e-3)
        assert float((found[name] - value).abs().max()) < 2e-5 * largest + 3e-7, name
    assert all(torch.isfinite(v).all() for v in found.values())


def here(models, a_job):
    return gradients(models, a_job, Engine(**a_job["engine"]))


@pytest.mark.parametrize("losses", ["layers", "joint"])
@pytest.mark.parametrize("rows", [RAGGED, PACKED], ids=["ragged", "packed"])
def test_gradients_do_not_depend_on_micro_batches_or_recomputation(models, losses, rows):
    train = "converted" if losses == "layers" else "all"
    whole = here(models, job(losses, rows, train))
    assert any(float(v.abs().max()) > 1e-3 for n, v in whole.items() if n.startswith("grad."))
    for split in SPLITS.values():
        agree(here(models, job(losses, rows, train, **split)), whole)


@pytest.mark.slow
def test_two_processes(models, tmp_path):
    """The gradients of one; a run that died goes on bit for bit, and in one process to the same losses."""
    engines = [
        ({}, 2),
        ({"student_sharded": True}, None),
        ({"student_sharded": True, "teacher_sharded": True, "recompute": True}, 2),
    ]
    cases = [("joint", RAGGED, "all"), ("joint", ONE_ROW, "all"), ("layers", PACKED, "converted")]
    jobs = [job(*case, engine=engine, micro_batch=size) for case in cases for engine, size in engines]
    (tmp_path / "jobs.json").write_text(json.dumps({"models": str(models), "jobs": jobs}))
    worker = Path(__file__).with_name("engine_worker.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, worker, tmp_path / "jobs.json"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(regraft.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    single = [here(models, job(*case)) for case in cases]
    for number in range(len(jobs)):
        agree(load_file(tmp_path / f"{number}.safetensors"), single[number // len(engines)])
    alone = make_loop(models, tmp_path / "alone")
    alone.run()
    for name in ("sharded-False", "sharded-True"):
        shutil.rmtree(tmp_path / name / "straight" / "checkpoints" / max_step(tmp_path / name / "straight"))
        rest = make_loop(models, tmp_path / name / "straight")  # one process goes on where two were
        assert rest.resume() and 0 < rest.at.step < alone.at.step
        rest.run()
        (_, lines, ledger), (_, expected, whole) = outcome(rest), outcome(alone)
        assert ledger == whole and [x["rows"] for x in lines] == [x["rows"] for x in expected]
        for a, b in zip(lines, expected, strict=True):
            assert abs(a["loss"] - b["loss"]) < 1e-3 * b["loss"]


def max_step(run):
    """Name of a run's newest checkpoint."""
    return checkpoint.existing(run / "checkpoints")[-1].name
