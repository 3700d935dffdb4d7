"""A small training run without its run directory: two stages on a tiny teacher and its student."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from folders import write_teacher
from torch import Tensor

from regraft.convert import load_model, load_tokenizer, make_student
from regraft.convert.convert import write_student
from regraft.distill.data import RowStream
from regraft.distill.engine import Engine, whole
from regraft.distill.loop import Loop
from regraft.distill.stage import Stage
from regraft.recipes.load import parse_recipe
from regraft.recipes.schema import (
    BoundaryMSE,
    CrossEntropy,
    Data,
    Evidence,
    ForwardKL,
    JsonlSource,
    LayerNMSE,
    Optimiser,
    Recipe,
)

LAYERS = (1, 2)


def make_recipe(teacher: Path, *overrides: str) -> Recipe:
    """Two short phases on a teacher with at least three layers, 1 and 2 of them converted."""
    text = f"""
version: 1
teacher: {{model: {teacher}}}
convert: {{layers: [1, 2]}}
data: {{source: {{kind: builtin}}, seq_len: 32}}
phases:
  - {{name: match, losses: [{{kind: layer_nmse}}], tokens: 256, batch_tokens: 64, lr: 0.01}}
  - name: joint
    losses: [{{kind: forward_kl}}, {{kind: boundary_mse}}]
    tokens: 256
    batch_tokens: 64
    lr: 1e-3
checkpoint: {{every: 2, keep: 9}}
"""
    return parse_recipe(text, "test", overrides)


def write_models(folder: Path, *, tokenizer: bool = True) -> Path:
    """`teacher`, its exact copy `student` and `docs.jsonl` in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    teacher = write_teacher(folder / "teacher", tokenizer=tokenizer)
    (folder / "student").mkdir()
    write_student(make_student(str(teacher), list(LAYERS)), folder / "student")
    texts = [f"Document {i} says " + "nothing new, " * (i % 7) + "and ends." for i in range(40)]
    (folder / "docs.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    return folder


def make_loop(models: Path, folder: Path, *, kind: str = "distill", engine: Engine | None = None,
              evidence: Evidence | None = None, **settings: Any) -> Loop:  # fmt: skip
    """A loop at its start, 12 steps or so: match and joint, or the control of both."""
    tokens, rows = 370, 3
    evidence = evidence or Evidence(learn=True, end=0.8)

    def stage(name: str, losses: Any, segments: Any, micro_batch: int | None, evidence: Any = None) -> Stage:
        return Stage(name, losses, "converted", 1e-2, Optimiser(), segments, micro_batch, 64, evidence)

    stages = [
        stage("match", (LayerNMSE(),), ((tokens, rows),), 1, evidence),
        stage("joint", (ForwardKL(), BoundaryMSE()), ((tokens, rows),), 2),
    ]
    if kind == "control":
        stages = [stage("control", (CrossEntropy(),), ((tokens, rows),) * 2, 1)]
    folder.mkdir(parents=True, exist_ok=True)
    data = Data(source=JsonlSource(path=str(models / "docs.jsonl")), seq_len=24)
    teacher = load_model(str(models / "teacher"))
    return Loop(
        student=load_model(str(models / "student")) if kind == "distill" else teacher,
        teacher=teacher if kind == "distill" else None,
        layers=LAYERS,
        stages=stages,
        stream=RowStream(data, load_tokenizer(str(models / "teacher"))),
        folder=folder,
        engine=engine or Engine(),
        **{"every": 2, "keep": 2, **settings},
    )


def outcome(loop: Loop) -> tuple[dict[str, Tensor], list[dict[str, Any]], dict[str, Any]]:
    """Every parameter, the metrics without times, and the ledger of a finished loop."""
    lines = [json.loads(line) for line in (loop.folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        del line["tokens_per_second"], line["memory_gb"]
    parameters = {n: whole(p.detach()).clone() for n, p in loop.student.named_parameters()}
    return parameters, lines, loop.stream.closed_ledger()


def same(a: Any, b: Any) -> bool:
    """Whether two outcomes are the same, bit for bit."""
    return a[1:] == b[1:] and a[0].keys() == b[0].keys() and all(torch.equal(a[0][n], b[0][n]) for n in a[0])
