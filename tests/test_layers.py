"""The mixers and their decoder: decoding, padding, generation, exact start, saving and loading."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from regraft.layers import (
    MIXERS,
    BayesianLayer,
    CovarianceReset,
    DeltaNet,
    GatedDeltaNet,
    Mixer,
    RegraftCache,
    RegraftConfig,
    RegraftForCausalLM,
)

torch.set_num_threads(1)

VOCAB = 61
MIXED = [{"kind": "gated_deltanet"}, {"kind": "bayesian", "noise_groups": 2}]
EVERY_KIND: list[dict[str, Any]] = [
    *({"kind": kind} for kind in MIXERS),
    {"kind": "kalman_delta_net", "covariance": "isotropic", "learn_evidence": True},
]
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped heads": {"num_v_heads": 4, "expand_v": 2},
    "no gate": {"use_gate": False, "num_heads": 1},
}


def make_config(**changes: Any) -> RegraftConfig:
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "initializer_range": 0.3,
        "mixers": MIXED,
    }
    return RegraftConfig(**{**settings, **changes})


@torch.no_grad()
def stir(module: torch.nn.Module, seed: int = 0) -> None:
    """Move every noise parameter off its neutral start, so that a test sees it."""
    rng = torch.Generator().manual_seed(seed)
    for mixer in module.modules():
        if isinstance(mixer, Mixer):
            for name, parameter in mixer.named_parameters():
                if name.split(".")[0] in set(mixer.float32_parameters) - {"A_log", "dt_bias"}:
                    parameter.add_(0.3 * torch.randn(parameter.shape, generator=rng))
        if isinstance(mixer, BayesianLayer):
            mixer.evidence.fill_(0.8)


def make_model(**changes: Any) -> RegraftForCausalLM:
    torch.manual_seed(0)
    model = RegraftForCausalLM(make_config(**changes)).eval()
    stir(model)
    return model


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(1, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def assert_same_state(left: RegraftCache, right: RegraftCache) -> None:
    for a, b in zip(left.states, right.states, strict=True):
        assert a is not None and b is not None
        for x, y in zip((*a.conv, a.mean, a.cov), (*b.conv, b.mean, b.cov), strict=True):
            assert (x is None) == (y is None)
            if x is not None and y is not None:
                torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


def assert_decoding_agrees(model: RegraftForCausalLM, ids: Tensor, cut: int) -> None:
    whole = model(ids, use_cache=True)
    first = model(ids[:, :cut], use_cache=True)
    logits = [first.logits]
    for t in range(cut, ids.shape[1]):
        logits.append(model(ids[:, t : t + 1], cache=first.cache).logits)
    torch.testing.assert_close(torch.cat(logits, dim=1), whole.logits, rtol=1e-4, atol=1e-4)
    assert first.cache.get_seq_length() == ids.shape[1]
    assert_same_state(first.cache, whole.cache)


@pytest.mark.parametrize("shape", SHAPES)
@torch.no_grad()
def test_prefill_and_decoding_agree_at_every_split(shape: str) -> None:
    model, ids = make_model(**SHAPES[shape]), tokens(2, 13)
    for cut in range(1, 13):
        assert_decoding_agrees(model, ids, cut)


@pytest.mark.parametrize("mixer", EVERY_KIND, ids=lambda m: "-".join(map(str, m.values())))
@pytest.mark.parametrize("shape", ["plain", "grouped heads"])
def test_every_mixer(mixer: dict[str, Any], shape: str, tmp_path: Path) -> None:
    """Decoding, padding, packing, saving, and a gradient for every parameter."""
    model = make_model(mixers=[mixer] * 2, **SHAPES[shape])
    ids = tokens(2, 23)
    with torch.no_grad():
        for cut in (1, 2, 9):
            assert_decoding_agrees(model, ids, cut)
        mask = torch.ones_like(ids)
        mask[0, :6] = 0
        padded, alone = model(ids, attention_mask=mask).logits[0, 6:], model(ids[:1, 6:]).logits[0]
        torch.testing.assert_close(padded, alone, rtol=1e-4, atol=1e-4)
        assert_packed_equals_separate(model)
        model.save_pretrained(tmp_path)
        loaded = RegraftForCausalLM.from_pretrained(tmp_path).eval()
        assert torch.equal(loaded(ids).logits, model(ids).logits)
    model(ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and bool(parameter.grad.any()), name


def assert_packed_equals_separate(model: RegraftForCausalLM) -> None:
    cuts = [0, 2, 3, 14, 79]
    ids = tokens(1, cuts[-1], seed=4)
    packed = model(ids, cu_seqlens=torch.tensor(cuts)).logits
    separate = [model(ids[:, a:b]).logits for a, b in pairwise(cuts)]
    torch.testing.assert_close(packed, torch.cat(separate, dim=1), rtol=1e-4, atol=1e-4)


def test_packed_documents_do_not_leak() -> None:
    """No gradient from a document into another's inputs."""
    model = make_model()
    x = torch.randn(1, 20, 32, requires_grad=True)
    out = model(inputs_embeds=x, cu_seqlens=torch.tensor([0, 7, 20])).logits
    (gradient,) = torch.autograd.grad(out[:, 7:].square().sum(), x)
    assert not gradient[:, :7].any() and bool(gradient[:, 7:].any(-1).all())
    with pytest.raises(ValueError, match="cu_seqlens"):
        model(inputs_embeds=x, cu_seqlens=torch.tensor([0, 7, 20]), use_cache=True)


@torch.no_grad()
def test_prefill_in_two_pieces_longer_than_a_chunk() -> None:
    model, ids = make_model(), tokens(2, 150)
    whole = model(ids, use_cache=True)
    first = model(ids[:, :77], use_cache=True)
    second = model(ids[:, 77:], past_key_values=first.cache)
    torch.testing.assert_close(
        torch.cat([first.logits, second.logits], dim=1), whole.logits, rtol=1e-3, atol=1e-4
    )
    assert_same_state(second.cache, whole.cache)


MASKS = {
    "left": [[0] * 5 + [1] * 7, [1] * 12],
    "right": [[1] * 4 + [0] * 8, [1] * 9 + [0] * 3],
    "ragged": [[0, 1, 1, 0, 0, 1, 0, 1, 1, 1, 0, 1], [1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]],
    "one row": [[0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1]],
    "an empty row": [[0] * 12, [1] * 12],
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("cut", [12, 1, 4, 8])
@torch.no_grad()
def test_padding_changes_nothing(mask: str, cut: int) -> None:
    """Every row of a padded batch equals the row alone, also when the prefill comes in two calls."""
    model, real = make_model(), torch.tensor(MASKS[mask])
    ids = tokens(*real.shape)
    out = model(ids[:, :cut], attention_mask=real[:, :cut], use_cache=True)
    logits = out.logits
    if cut < 12:
        rest = model(ids[:, cut:], attention_mask=real, cache=out.cache)
        logits = torch.cat([logits, rest.logits], dim=1)
    next_ids = tokens(len(real), 1, seed=1)
    following = model(
        next_ids, attention_mask=torch.cat([real, torch.ones(len(real), 1)], dim=1), cache=out.cache
    ).logits
    for row, keep in enumerate(real.bool()):
        alone = model(torch.cat([ids[row, keep], next_ids[row]])[None]).logits[0]
        torch.testing.assert_close(logits[row, keep], alone[:-1], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(following[row, 0], alone[-1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("padded", [False, True])
@torch.no_grad()
def test_generation_with_a_cache_equals_generation_without(padded: bool) -> None:
    model, ids = make_model(), tokens(2, 9)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :4] = 0
    settings: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    with_cache = model.generate(ids, attention_mask=mask, **settings)
    without = model.generate(ids, attention_mask=mask, use_cache=False, **settings)
    assert torch.equal(with_cache, without)
    for row, keep in enumerate(mask.bool()):
        alone = model.generate(ids[row, keep][None], attention_mask=mask[row, keep][None], **settings)
        assert torch.equal(with_cache[row, 9:], alone[0, int(keep.sum()) :])


@torch.no_grad()
def test_beam_search_and_several_sequences_with_a_cache() -> None:
    model, ids = make_model(), tokens(2, 9)
    settings: dict[str, Any] = {
        "max_new_tokens": 6,
        "pad_token_id": 0,
        "attention_mask": torch.ones_like(ids),
    }
    beams = {"num_beams": 3, "num_return_sequences": 2, "do_sample": False}
    assert torch.equal(
        model.generate(ids, **settings, **beams), model.generate(ids, use_cache=False, **settings, **beams)
    )
    sampled = {"do_sample": True, "num_return_sequences": 3}
    torch.manual_seed(0)
    with_cache = model.generate(ids, **settings, **sampled)
    torch.manual_seed(0)
    assert torch.equal(with_cache, model.generate(ids, use_cache=False, **settings, **sampled))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("groups", [1, 2])
@torch.no_grad()
def test_bayesian_layer_at_evidence_zero_is_the_gated_deltanet(shape: str, groups: int) -> None:
    config, torch_rng = make_config(**SHAPES[shape]), torch.Generator().manual_seed(5)
    teacher, student = (
        GatedDeltaNet(
            config,
        ),
        BayesianLayer(config, noise_groups=groups),
    )
    for mixer in (teacher, student):
        for name, value in mixer.initial_parameters().items():
            getattr(mixer, name).copy_(value)
    for parameter in teacher.parameters():
        parameter.copy_(0.5 * torch.randn(parameter.shape, generator=torch_rng))
    missing, unexpected = student.load_state_dict(teacher.state_dict(), strict=False)
    assert not unexpected
    assert {name.removesuffix(".weight") for name in missing} <= set(BayesianLayer.float32_parameters)
    student.obs_proj.weight.zero_()
    student.process_proj.weight.zero_()
    x = torch.randn(2, 150, 32, generator=torch_rng)
    x[:, 10:14] *= 1e-5  # keys too short for the norm's epsilon
    torch.testing.assert_close(student(x)[0], teacher(x)[0], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_relations_between_the_mixers() -> None:
    """Without decay Gated DeltaNet is DeltaNet; the reset layer at its start is Gated DeltaNet."""
    config, x = make_config(), torch.randn(2, 40, 32)
    teacher = initialised(GatedDeltaNet(config))
    reset = initialised(CovarianceReset(config, noise_groups=2))
    reset.load_state_dict(teacher.state_dict(), strict=False)
    reset.obs_proj.weight.zero_()
    torch.testing.assert_close(reset(x)[0], teacher(x)[0], rtol=1e-4, atol=1e-5)
    plain = DeltaNet(config)
    plain.load_state_dict(teacher.state_dict(), strict=False)
    teacher.A_log.fill_(-100.0)
    torch.testing.assert_close(teacher(x)[0], plain(x)[0], rtol=1e-4, atol=1e-5)


def initialised(mixer: Any) -> Any:
    """The mixer with the starting values that a model gives it; its linear maps as torch makes them."""
    for name, value in mixer.initial_parameters().items():
        getattr(mixer, name).data.copy_(value)
    for conv in (mixer.q_conv1d, mixer.k_conv1d, mixer.v_conv1d):
        conv.weight.data.uniform_(-0.5, 0.5)
    return mixer


@pytest.mark.parametrize("weight", [1e3, -1e3])
@torch.no_grad()
def test_strong_logits_stay_finite(weight: float) -> None:
    """`exp(-b)` leaves float32 long before anything bounds a trained projection."""
    model = make_model(mixers=[{"kind": "bayesian"}] * 2)
    for block in model.model.layers:
        block.attn.b_proj.weight.fill_(weight)
    mask = torch.ones(2, 70)
    mask[0, :9] = 0
    assert bool(model(tokens(2, 70), attention_mask=mask).logits[:, 9:].isfinite().all())


@pytest.mark.parametrize("tied", [False, True])
@torch.no_grad()
def test_saving_and_loading_is_bit_equal(tied: bool, tmp_path: Path) -> None:
    model, ids = make_model(tie_word_embeddings=tied), tokens(2, 20)
    model.save_pretrained(tmp_path)
    loaded = RegraftForCausalLM.from_pretrained(tmp_path).eval()
    assert (loaded.lm_head.weight is loaded.model.embeddings.weight) == tied
    for (name, x), (_, y) in zip(model.state_dict().items(), loaded.state_dict().items(), strict=True):
        assert torch.equal(x, y), name
    assert torch.equal(loaded(ids).logits, model(ids).logits)


@pytest.mark.parametrize("kind", MIXERS)
@torch.no_grad()
def test_bfloat16_keeps_the_noise_parameters_in_float32(kind: str, tmp_path: Path) -> None:
    make_model(mixers=[{"kind": kind}] * 2).save_pretrained(tmp_path)
    loaded = RegraftForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for name, parameter in loaded.named_parameters():
        fine = any(part in MIXERS[kind].float32_parameters for part in name.split("."))
        assert parameter.dtype == (torch.float32 if fine else torch.bfloat16), name
    out = loaded(tokens(2, 70), use_cache=True)
    assert out.logits.dtype == torch.bfloat16 and bool(out.logits.isfinite().all())
    assert all(s.mean.dtype == torch.float32 for s in out.cache.states)


@torch.no_grad()
def test_a_checkpoint_loads_into_swapped_layers_with_a_neutral_start(tmp_path: Path) -> None:
    teacher = make_model(mixers=[{"kind": "gated_deltanet"}] * 2)
    teacher.save_pretrained(tmp_path)
    student = RegraftForCausalLM.from_pretrained(tmp_path, config=make_config()).eval()
    layer = student.model.layers[1].attn
    assert isinstance(layer, BayesianLayer)
    for name in ("evidence", "obs_log_scale", "process_log_scale"):
        assert torch.equal(getattr(layer, name), torch.zeros_like(getattr(layer, name))), name
    assert not layer.obs_proj.weight.any() and not layer.process_proj.weight.any()
    assert torch.equal(layer.A_log, teacher.model.layers[1].attn.A_log)
    ids = tokens(2, 100)
    torch.testing.assert_close(student(ids).logits, teacher(ids).logits, rtol=1e-4, atol=1e-4)


def test_autocast_leaves_the_filter_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    from regraft.ops import kalman

    seen = []

    def spy(inputs: Any, *rest: Any) -> Any:
        seen.append({x.dtype for x in vars(inputs).values() if isinstance(x, Tensor)})
        o, mean, cov = original(inputs, *rest)
        seen.append({x.dtype for x in (o, mean, cov) if x is not None})
        return o, mean, cov

    original = kalman.chunk_filter
    monkeypatch.setattr(kalman, "chunk_filter", spy)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        make_model()(tokens(2, 70))
    assert seen and all(dtypes == {torch.float32} for dtypes in seen)


def test_the_page_of_design_models_names_every_mixer() -> None:
    page = (Path(__file__).parents[1] / "docs" / "design-model.md").read_text(encoding="utf-8")
    assert all(f"`{kind}`" in page for kind in MIXERS)


def test_unknown_kinds_and_settings_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"mixers\[1\].kind"):
        RegraftForCausalLM(make_config(mixers=[{"kind": "gated_deltanet"}, {"kind": "hopfield"}]))
    with pytest.raises(ValueError, match=r"mixers\[1\].noise_group: .*noise_groups"):
        RegraftForCausalLM(make_config(mixers=[{"kind": "gla"}, {"kind": "bayesian", "noise_group": 2}]))
    with pytest.raises(ValueError, match="covariance"):
        RegraftForCausalLM(make_config(mixers=[{"kind": "kalman_delta_net", "covariance": "dense"}] * 2))
    with pytest.raises(ValueError, match="noise_groups"):
        RegraftForCausalLM(make_config(mixers=[{"kind": "bayesian", "noise_groups": 3}] * 2))
    with pytest.raises(ValueError, match="num_v_heads"):
        make_config(num_v_heads=3)
    with pytest.raises(ValueError, match="mixers"):
        make_config(mixers=MIXED * 2)
    assert set(MIXERS) >= {"gated_deltanet", "bayesian"}
