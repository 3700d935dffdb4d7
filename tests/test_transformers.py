"""A converted model among transformers' tools: LoRA, streaming, saving after both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from folders import write_teacher
from torch import Tensor

from regraft.convert import load_model, make_student
from regraft.layers import RegraftForCausalLM

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_teacher(tmp_path_factory.mktemp("transformers") / "t")


def tokens(*shape: int) -> Tensor:
    return torch.randint(3, 97, shape, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def student(folder) -> RegraftForCausalLM:
    student = make_student(str(folder), "1,3").student
    for layer in (1, 3):
        student.model.layers[layer].attn.evidence.data.fill_(0.7)
    return student


def test_lora_on_the_kept_layers(student, tmp_path) -> None:
    """Inject, train a step, save, merge: the converted layers stay, and merged logits are the adapter's."""
    peft = pytest.importorskip("peft")
    ids = tokens(2, 70)
    before = {name: p.clone() for name, p in student.named_parameters()}
    settings = peft.LoraConfig(
        r=4,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        layers_to_transform=[0, 2],
        layers_pattern="layers",
        task_type="CAUSAL_LM",
    )
    with torch.no_grad():
        start = student(ids).logits
    model = peft.get_peft_model(student, settings)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained and all(".layers.0." in name or ".layers.2." in name for name in trained)
    optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(2):  # the first step moves B alone, for it starts at zero
        optimiser.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimiser.step()
    model.eval()
    with torch.no_grad():
        adapted = model(input_ids=ids).logits
    assert (adapted - start).abs().max() > 1e-2
    model.save_pretrained(tmp_path / "adapter")
    merged = model.merge_and_unload()
    assert isinstance(merged, RegraftForCausalLM)
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, adapted, rtol=1e-4, atol=1e-4)
    for name, p in merged.named_parameters():
        touched = any(f"layers.{i}." in name for i in (0, 2)) and name.endswith("proj.weight")
        assert touched or torch.equal(p, before[name]), name
    merged.save_pretrained(tmp_path / "merged")
    again = RegraftForCausalLM.from_pretrained(tmp_path / "merged").eval()
    with torch.no_grad():
        assert torch.equal(again(ids).logits, merged(ids).logits)


def test_streaming_gives_the_same_tokens(student) -> None:
    class Streamer:
        def __init__(self) -> None:
            self.tokens: list[int] = []
            self.ended = False

        def put(self, value: Tensor) -> None:
            self.tokens += value.flatten().tolist()

        def end(self) -> None:
            self.ended = True

    streamer, ids = Streamer(), tokens(1, 12)
    settings: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    out = student.generate(ids, attention_mask=torch.ones_like(ids), streamer=streamer, **settings)
    assert streamer.ended and streamer.tokens == out[0].tolist()


@torch.no_grad()
def test_left_padded_beams_equal_each_row_alone(student) -> None:
    ids = tokens(2, 12)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    settings: dict[str, Any] = {"max_new_tokens": 5, "num_beams": 3, "do_sample": False, "pad_token_id": 0}
    together = student.generate(ids, attention_mask=mask, eos_token_id=-1, **settings)
    for row in (0, 1):
        own = ids[row, mask[row].bool()][None]
        alone = student.generate(own, attention_mask=torch.ones_like(own), eos_token_id=-1, **settings)
        assert torch.equal(together[row, 12:], alone[0, own.shape[1] :])


@torch.no_grad()
def test_kept_and_converted_layers_share_nothing_with_a_second_load(folder) -> None:
    """The student of a conversion shares memory with its teacher; a loaded model is on its own."""
    first, second = load_model(str(folder)), load_model(str(folder))
    first.model.norm.weight.zero_()
    assert second.model.norm.weight.abs().min() > 0
