"""`regraft scan`: the table, the disturbance of one layer, and `--layers scan:N`."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from folders import edit_tensors, write_teacher

from regraft.convert import load_model
from regraft.convert.scan import forgetting, scan, scan_checkpoint

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> Path:
    """Layer 2 alone remembers: it hardly decays, the others forget at once, and layer 0 says nothing."""
    folder = write_teacher(tmp_path_factory.mktemp("scan") / "t", tokenizer=True)

    def change(tensors) -> None:
        for i in range(4):
            layer = f"model.layers.{i}.attn."
            tensors[layer + "A_log"].fill_(-9.0 if i == 2 else 3.0)
            tensors[layer + "a_proj.weight"].zero_()
            tensors[layer + "b_proj.weight"].zero_()
            tensors[layer + "dt_bias"].zero_()
        tensors["model.layers.0.attn.o_proj.weight"].zero_()

    edit_tensors(folder, change)
    return folder


def test_the_table_and_its_numbers(regraft, teacher, tmp_path) -> None:
    out = tmp_path / "scan.json"
    code, printed, err = regraft("scan", teacher, "--samples", 2, "--length", 256, "--out", out)
    assert code == 0, err
    table = json.loads(out.read_text())
    assert [row["layer"] for row in table["layers"]] == [0, 1, 2, 3] and table["samples"] == 2
    slow, fast = table["layers"][2], table["layers"][1]
    assert all(g == pytest.approx(0.9999145, abs=1e-6) for g in slow["decay"]) and max(fast["decay"]) < 1e-5
    assert slow["half_life"][0] == pytest.approx(0.6931 / 8.554e-5, rel=1e-3)  # ln 2 / (exp(-9) ln 2)
    assert all(b == pytest.approx(0.5) for row in table["layers"] for b in row["gain"])
    assert slow["loss_rise"] != 0
    assert table["layers"][0]["loss_rise"] == table["layers"][1]["loss_rise"] == 0  # nothing to forget
    assert "retrieved" in printed and f"{slow['answer_loss']:.3f}" in printed


def test_the_same_seed_is_the_same_scan(teacher) -> None:
    assert scan(str(teacher), samples=1, length=256) == scan(str(teacher), samples=1, length=256)


@torch.no_grad()
def test_forgetting_is_over_afterwards(teacher) -> None:
    model, ids = load_model(str(teacher)), torch.arange(200).view(1, -1)
    before = model(ids).logits
    with forgetting(model.model.layers[2].attn):
        assert not torch.equal(model(ids).logits, before)
    assert torch.equal(model(ids).logits, before)


def test_a_scan_chooses_the_layers_of_a_conversion(regraft, teacher, tmp_path, monkeypatch) -> None:
    short = partial(scan_checkpoint, samples=1, length=256)
    monkeypatch.setattr(sys.modules["regraft.convert.convert"], "scan_checkpoint", short)
    code, _, err = regraft("convert", teacher, "--layers", "scan:1", "--out", tmp_path / "s")
    assert code == 0, err
    table = scan(str(teacher), samples=1, length=256)
    (most,) = table.best(1)
    assert table.layers[most].loss_rise == max(row.loss_rise for row in table.layers)
    assert load_model(str(tmp_path / "s")).config.layers_of("bayesian") == (most,)
    assert regraft("convert", teacher, "--layers", "scan:5", "--out", tmp_path / "s2")[0] == 2
    code, _, err = regraft("convert", teacher, "--layers", "scan:1", "--dry-run")
    assert code == 2 and "run `regraft scan`" in err


def test_the_attention_of_a_hybrid_has_no_memory_to_cut(regraft, tmp_path) -> None:
    attn = {"layers": [1, 2], "num_heads": 4}
    folder = write_teacher(tmp_path / "t", tokenizer=True, attn=attn)
    assert [row.layer for row in scan(str(folder), samples=1, length=256).layers] == [0, 3]
    code, _, err = regraft("convert", folder, "--layers", "scan:3", "--out", tmp_path / "s")
    assert code == 2 and "2 layers that can be converted" in err


def test_a_teacher_without_a_tokenizer_is_refused(regraft, tmp_path) -> None:
    folder = write_teacher(tmp_path / "t")
    code, _, err = regraft("scan", folder)
    assert code == 2 and "tokenizer" in err
