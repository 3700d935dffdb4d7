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
        # float32 sums in another order
        assert float((found[name] - value).abs().max()) < 1e-4 * largest + 3e-7, name
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
    run("torch.distributed.run", "--standalone", "--nproc-per-node", "2", worker, tmp_path / "jobs.json")
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


@pytest.mark.slow
def test_both_launchers_give_one_result(models, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"""
version: 1
teacher: {{model: {models / "teacher"}}}
convert: {{layers: [1, 2]}}
data: {{source: {{kind: jsonl, path: {models / "docs.jsonl"}}}, seq_len: 24}}
phases: [{{name: joint, losses: [{{kind: forward_kl}}], tokens: 300, batch_tokens: 72, lr: 1e-3}}]
""")
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "regraft"]
    accelerate = ["accelerate.commands.launch", "--cpu", "--num_processes", "1", "-m", "regraft"]
    sharded = [x for name in ("student", "teacher") for x in ("--set", f"engine.{name}=sharded")]
    run(*torchrun, "distill", recipe, "--out", tmp_path / "two", *sharded)
    run(*accelerate, "distill", recipe, "--out", tmp_path / "one")
    exports = [load_file(tmp_path / name / "export" / "model.safetensors") for name in ("one", "two")]
    assert exports[0].keys() == exports[1].keys()
    assert all(torch.allclose(p, exports[1][n], rtol=1e-3, atol=1e-5) for n, p in exports[0].items())
    manifests = [json.loads((tmp_path / name / "manifest.json").read_text()) for name in ("one", "two")]
    assert [m["finished"]["processes"] for m in manifests] == [1, 2]
    for key in ("data_sha256", "tokens", "steps", "ledger"):
        assert manifests[0]["finished"][key] == manifests[1]["finished"][key]


def run(*arguments):
    """`python -m` with these arguments, which has to end well."""
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(regraft.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-m", *map(str, arguments)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]


def max_step(run):
    """Name of a run's newest checkpoint."""
    return checkpoint.existing(run / "checkpoints")[-1].name
