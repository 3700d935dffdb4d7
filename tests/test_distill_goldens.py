"""Twenty steps of each shipped recipe, shrunk: losses that change only when the training does.

Written by `python tests/test_distill_goldens.py`. Tolerances are several times what another instruction set
(SSE instead of AVX) changes: rounding grows in AdamW's first steps, where a gradient near 0 counts as a whole
one, on single rows more than in the median, and with the learning rate. The demo's notices a rate 5 % higher.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from folders import edit_tensors, write_teacher

from regraft.distill import distill
from regraft.recipes import load_recipe, shipped

GOLDENS = Path(__file__).parent / "goldens.json"
LOSSES = ("loss", "layer_nmse", "forward_kl", "boundary_mse")
KEPT = ("step", "stage", "tokens", "rows", "evidence", *LOSSES)
MEDIAN = {"demo": 2e-4, "kdn": 2e-4, "lora": 1e-3, "one-gpu": 3e-3, "paper-340m": 5e-3}  # relative
WORST = 0.06


def shrunk(name: str, folder: Path):
    """The recipe on few numbers and rows, ten steps a phase; layers, losses, schedules, sets are its own."""
    recipe = load_recipe(name)
    layers = 6 if recipe.teacher.model == "embedded" else 24
    teacher = folder / f"teacher-{layers}"
    if not teacher.exists():
        write_teacher(teacher, tokenizer=True, num_hidden_layers=layers)
        edit_tensors(teacher, lambda tensors: tensors["lm_head.weight"].mul_(0.2))  # logits of usual size
    keys = ("tokens=320", "batch_tokens=32", "micro_batch=1")
    small = [f"phases.{i}.{key}" for i in (0, 1) for key in keys]
    local = [f"teacher.model={teacher}", "data.source={kind: builtin}", "data.seq_len=32", "data.pack=true"]
    # bfloat16 rounds differently from one processor to the next
    return load_recipe(name, ["teacher.dtype=float32", *local, *small])


def losses(name: str, folder: Path) -> list[dict]:
    distill(shrunk(name, folder), folder / name)
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return [{key: line[key] for key in KEPT if key in line} for line in lines]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield tmp_path_factory.mktemp("goldens")
    torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(shipped()))
def test_twenty_steps_are_those_of_before(name, folder):
    expected = json.loads(GOLDENS.read_text())[name]
    found = losses(name, folder)
    assert len(found) == len(expected) == 20
    apart = []
    for line, golden in zip(found, expected, strict=True):
        assert line.keys() == golden.keys()
        for key, value in golden.items():
            if key in LOSSES:
                apart.append(abs(line[key] - value) / value)
                assert apart[-1] < WORST, (line["step"], key)
            else:
                assert line[key] == pytest.approx(value) if key == "evidence" else line[key] == value
    assert statistics.median(apart) < MEDIAN[name]


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = {name: losses(name, Path(folder)) for name in shipped()}
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else GOLDENS
    lines = (f"{json.dumps(name)}: [\n" + ",\n".join(map(json.dumps, found[name])) + "\n]" for name in found)
    target.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
