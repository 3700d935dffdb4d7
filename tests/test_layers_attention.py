"""Attention layers of hybrids: against transformers' own, and with caches, padding, packing and windows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_layers import assert_packed_equals_separate, make_config, make_model, tokens
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

from regraft.layers import RegraftCache, RegraftForCausalLM
from regraft.layers.attention import Attention, mixers_of

torch.set_num_threads(1)

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"num_heads": 4},
    "grouped keys": {"num_heads": 4, "num_kv_heads": 2, "qkv_bias": True, "rope_theta": 500.0},
    "window": {"num_heads": 2, "num_kv_heads": 1, "window_size": 5},
}


def hybrid(settings: dict[str, Any]) -> RegraftForCausalLM:
    attention = {"kind": "attention", **settings}
    mixers = [attention, {"kind": "gated_deltanet"}, {"kind": "bayesian"}, attention]
    return make_model(num_hidden_layers=4, mixers=mixers)


@pytest.mark.parametrize("name", SETTINGS)
@torch.no_grad()
def test_against_the_layer_of_transformers(name: str) -> None:
    settings, T = SETTINGS[name], 20
    torch.manual_seed(0)
    ours = Attention(make_config(), **settings)
    config = LlamaConfig(
        hidden_size=32,
        num_attention_heads=settings["num_heads"],
        num_key_value_heads=settings.get("num_kv_heads", settings["num_heads"]),
        attention_bias=settings.get("qkv_bias", False),
        rope_parameters={"rope_type": "default", "rope_theta": settings.get("rope_theta", 10000.0)},
        attn_implementation="eager",
    )
    theirs = LlamaAttention(config, 0)
    missing, unexpected = theirs.load_state_dict(ours.state_dict(), strict=False)
    assert not unexpected and set(missing) <= {"o_proj.bias"}
    if theirs.o_proj.bias is not None:
        theirs.o_proj.bias.zero_()
    x, position = torch.randn(2, T, 32), torch.arange(T)[None]
    distance = position.mT - position
    seen = (distance >= 0) & (distance < settings.get("window_size", T))
    mask = torch.zeros(T, T).masked_fill(~seen, -torch.inf)[None, None]
    expected, _ = theirs(x, LlamaRotaryEmbedding(config)(x, position), mask)
    torch.testing.assert_close(ours(x)[0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("cuts", [(1, 2, 3, 13), (7, 8, 12), (2, 11)])
@torch.no_grad()
def test_pieces_equal_the_whole(name: str, cuts: tuple[int, ...]) -> None:
    model, ids = hybrid(SETTINGS[name]), tokens(2, 14)
    whole, cache, logits = model(ids).logits, None, []
    for start, end in zip((0, *cuts), (*cuts, 14), strict=True):
        out = model(ids[:, start:end], cache=cache, use_cache=True)
        cache = out.cache
        logits.append(out.logits)
    torch.testing.assert_close(torch.cat(logits, dim=1), whole, rtol=1e-4, atol=1e-4)
    if window := SETTINGS[name].get("window_size"):
        assert cache.states[0].k.shape[1] == window - 1  # what no later token sees is gone


MASKS = {
    "left": [[0] * 5 + [1] * 7, [1] * 12],
    "ragged": [[0, 1, 1, 0, 0, 1, 0, 1, 1, 1, 0, 1], [1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]],
    "an empty row": [[0] * 12, [1] * 12],
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("cut", [12, 4, 8])
@torch.no_grad()
def test_padding_changes_nothing(name: str, mask: str, cut: int) -> None:
    model, real = hybrid(SETTINGS[name]), torch.tensor(MASKS[mask])
    ids = tokens(*real.shape)
    out = model(ids[:, :cut], attention_mask=real[:, :cut], use_cache=True)
    logits = out.logits
    if cut < 12:
        rest = model(ids[:, cut:], attention_mask=real, cache=out.cache)
        logits = torch.cat([logits, rest.logits], dim=1)
    assert bool(logits.isfinite().all())
    last = tokens(2, 1, seed=1)
    full = torch.cat([real, torch.ones(2, 1, dtype=real.dtype)], dim=1)
    following = model(last, attention_mask=full, cache=out.cache).logits
    for row, keep in enumerate(real.bool()):
        alone = model(torch.cat([ids[row, keep], last[row]])[None]).logits[0]
        torch.testing.assert_close(logits[row, keep], alone[:-1], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(following[row, 0], alone[-1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", SETTINGS)
@torch.no_grad()
def test_packing_beams_and_sampling(name: str) -> None:
    model, ids = hybrid(SETTINGS[name]), tokens(2, 9)
    assert_packed_equals_separate(model)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    for settings in ({"num_beams": 3, "num_return_sequences": 2}, {}):
        common = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "attention_mask": mask}
        with_cache = model.generate(ids, **common, **settings)
        assert torch.equal(with_cache, model.generate(ids, use_cache=False, **common, **settings))


@torch.no_grad()
def test_caches_of_different_lengths_join() -> None:
    model = hybrid(SETTINGS["plain"])
    long, short, last = tokens(1, 9), tokens(1, 4, seed=2), tokens(2, 1, seed=3)
    caches = [model(ids, use_cache=True).cache for ids in (long, short)]
    logits = model(last, cache=RegraftCache.joined(caches)).logits[:, 0]
    for row, ids in enumerate((long, short)):
        alone = model(torch.cat([ids, last[row : row + 1]], dim=1)).logits[0, -1]
        torch.testing.assert_close(logits[row], alone, rtol=1e-4, atol=1e-4)


def test_every_parameter_gets_a_gradient() -> None:
    model, ids = hybrid(SETTINGS["grouped keys"]), tokens(2, 23)
    model(ids, labels=ids).loss.backward()
    rows: dict[str, Tensor | None] = {name: p.grad for name, p in model.named_parameters()}
    # softmax does not see what all keys have in common
    assert all(g is not None and (bool(g.any()) or name.endswith("k_proj.bias")) for name, g in rows.items())


def test_what_the_config_of_a_hybrid_may_say() -> None:
    entry = {"layers": [1, 3], "num_heads": 4, "window_size": None, "rope_theta": 500.0}
    expected = {"kind": "attention", "num_heads": 4, "rope_theta": 500.0}
    assert mixers_of(entry, 4) == mixers_of([entry], 4) == {1: expected, 3: expected}
    for wrong, message in (
        ({**entry, "layers": [4]}, "layer 4"),
        ([entry, {**entry, "layers": [3]}], "layer 3"),
        ({**entry, "alibi": True}, "alibi unknown"),
        ({"num_heads": 4}, "does not name layers"),
    ):
        with pytest.raises(ValueError, match=message):
            mixers_of(wrong, 4)
    with pytest.raises(ValueError, match="do not divide width 32"):
        Attention(make_config(), num_heads=5)
