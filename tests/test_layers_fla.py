"""fla's kernels behind the delta-rule layers: when they are taken, and that they are asked the right thing.

A stand-in for fla computes the rule with a plain loop, so these run without a GPU and without fla.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from test_layers import assert_decoding_agrees, make_model, stir, tokens
from torch import Tensor

from regraft.convert.convert import cast_model
from regraft.layers import RegraftForCausalLM, fla_kernels

torch.set_num_threads(1)

GATED = [{"kind": "gated_deltanet"}] * 2


def plain_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    if cu_seqlens is not None:
        pieces = zip(*(x.split(cu_seqlens.diff().tolist(), dim=1) for x in (q, k, v, g, beta)), strict=True)
        return torch.cat([plain_rule(*piece)[0] for piece in pieces], dim=1), None
    dtype, repeats = v.dtype, v.shape[2] // q.shape[2]
    q, k = (x.float().repeat_interleave(repeats, dim=2) for x in (q, k))
    shape = (v.shape[0], v.shape[2], k.shape[3], v.shape[3])
    S = torch.zeros(shape) if initial_state is None else initial_state
    outputs = []
    for t in range(v.shape[1]):
        S = S * g[:, t].exp()[..., None, None]
        error = v[:, t].float() - torch.einsum("bhkv,bhk->bhv", S, k[:, t])
        S = S + torch.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t, :, None] * error)
        outputs.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]) * k.shape[-1] ** -0.5)
    return torch.stack(outputs, dim=1).to(dtype), S if output_final_state else None


class Fla:
    """Modules named like fla's, and what was called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, version: str = "0.6.0") -> None:
        self.calls: list[str] = []
        self.chunk: Callable[..., Any] = plain_rule
        fla, ops, rules = ModuleType("fla"), ModuleType("fla.ops"), ModuleType("fla.ops.gated_delta_rule")
        fla.__version__ = version  # type: ignore[attr-defined]
        for name in ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"):
            setattr(rules, name, self._kernel(name))
        for module in (fla, ops, rules):
            monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(fla_kernels, "installed", lambda: True)

    def _kernel(self, name: str) -> Callable[..., Any]:
        def run(**arguments: Any) -> tuple[Tensor, Tensor | None]:
            assert arguments["q"].dtype == arguments["k"].dtype == arguments["v"].dtype
            self.calls.append(name.removesuffix("_gated_delta_rule"))
            if name.startswith("chunk"):
                return self.chunk(**arguments)
            assert not any(isinstance(x, Tensor) and x.requires_grad for x in arguments.values())
            return plain_rule(**arguments)

        return run


def in_bfloat16(model: RegraftForCausalLM) -> RegraftForCausalLM:
    cast_model(model, torch.bfloat16)
    return model


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """Nothing that one test found out reaches another."""
    caches = (fla_kernels.problem_with, fla_kernels._import_problem, fla_kernels._warn)
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


@pytest.fixture
def fla(monkeypatch: pytest.MonkeyPatch) -> Fla:
    return Fla(monkeypatch)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors count as being on a GPU."""
    monkeypatch.setattr(fla_kernels, "_on_gpu", lambda x: True)


@pytest.mark.parametrize(
    "shape", [{}, {"num_v_heads": 4, "expand_v": 2}, {"allow_neg_eigval": True}], ids=lambda s: ",".join(s)
)
@torch.no_grad()
def test_logits_states_padding_and_packing_are_those_of_our_own_op(shape: dict[str, Any], fla: Fla) -> None:
    model, ids = make_model(mixers=GATED, **shape), tokens(2, 150)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    cuts = torch.tensor([0, 50, 114, 150])

    def everything() -> list[Tensor]:
        out = model(ids, attention_mask=mask, use_cache=True)
        step = model(ids[:, :1], cache=out.cache)
        packed = model(ids[:1], cu_seqlens=cuts).logits
        return [out.logits[mask.bool()], step.logits, packed, *(s.mean for s in step.cache.states)]

    model.set_kernels("regraft")
    expected = everything()
    assert not fla.calls
    model.set_kernels("fla")
    for got, want in zip(everything(), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert {"chunk", "fused_recurrent"} == set(fla.calls)
    assert_decoding_agrees(model, ids[:, :70], 66)


def test_gradients_are_those_of_our_own_op(fla: Fla) -> None:
    model, ids = make_model(mixers=[{"kind": "gated_deltanet"}, {"kind": "delta_net"}]), tokens(2, 20)
    gradients = []
    for kernels in ("regraft", "fla"):
        model.set_kernels(kernels)
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
    assert "chunk" in fla.calls
    for name, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], expected, rtol=1e-3, atol=1e-4, msg=name)


@torch.no_grad()
def test_auto_takes_them_on_a_gpu_in_16_bits_only(fla: Fla, gpu: None, monkeypatch) -> None:
    mixed = make_model(mixers=[{"kind": "gated_deltanet"}, {"kind": "bayesian"}])
    ids = tokens(1, 70)
    mixed(ids)
    assert not fla.calls  # float32
    model = in_bfloat16(mixed)
    model(ids)
    probe = fla.calls.copy()
    assert probe and probe.count("chunk") == 2  # the probe and one layer of two: the other has a covariance
    fla.calls.clear()
    model(ids)
    assert fla.calls == ["chunk"]  # probed once
    monkeypatch.setenv(fla_kernels.ENVIRONMENT, "regraft")
    fla.calls.clear()
    model(ids)
    assert not fla.calls
    monkeypatch.setattr(fla_kernels, "_on_gpu", lambda x: False)
    monkeypatch.delenv(fla_kernels.ENVIRONMENT)
    model(ids)
    assert not fla.calls


def test_the_probe_of_training_is_one_of_its_own(fla: Fla, gpu: None) -> None:
    """Right outputs, wrong gradients: taken without a backward pass, left alone with one, said once."""

    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return 1.3 * gradient

    fla.chunk = lambda **x: plain_rule(**{**x, "k": Wrong.apply(x["k"])})
    model, ids = in_bfloat16(make_model(mixers=GATED)), tokens(1, 70)
    with torch.no_grad():
        model(ids)
    assert "chunk" in fla.calls
    fla.calls.clear()
    with pytest.warns(RuntimeWarning, match=r"its d_k differs from ours by 0\.\d+ .*Fix") as caught:
        model(ids).logits.sum().backward()
        model(ids)
    assert len(caught) == 1 and fla.calls.count("chunk") == 1  # the probe alone
    model.set_kernels("fla")
    with pytest.raises(RuntimeError, match=r"'fla' was asked for, but its d_k differs"):
        model(ids)


@torch.no_grad()
def test_wrong_or_failing_kernels_are_left_alone_with_one_warning(fla: Fla, gpu: None) -> None:
    def broken(**x: Any) -> Any:
        raise ValueError("no kernel image")

    model, ids = in_bfloat16(make_model(mixers=GATED)), tokens(1, 70)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.set_kernels("regraft")
        expected = model(ids).logits
    model.set_kernels(None)
    for chunk, message in (
        (broken, "its kernels fail .*no kernel image"),
        (lambda **x: tuple(1.1 * y for y in plain_rule(**x)), "its output differs from ours by 0.1 "),
        (lambda **x: tuple(y * torch.nan for y in plain_rule(**x)), "its output differs from ours by nan"),
    ):
        fla.chunk = chunk
        fla_kernels.problem_with.cache_clear()
        with pytest.warns(RuntimeWarning, match=message) as caught:
            assert torch.equal(model(ids).logits, expected)
        assert len(caught) == 1


@torch.no_grad()
def test_an_fla_that_is_too_old_or_does_not_import(monkeypatch, gpu: None) -> None:
    model, ids = in_bfloat16(make_model(mixers=GATED)), tokens(1, 70)
    with monkeypatch.context() as patch:
        old = Fla(patch, version="0.5.2")
        with pytest.warns(RuntimeWarning, match=r"version 0\.5\.2 is too old. Fix: pip install"):
            model(ids)
        assert not old.calls
    fla_kernels.problem_with.cache_clear()
    fla_kernels._import_problem.cache_clear()
    monkeypatch.setitem(sys.modules, "fla", None)
    monkeypatch.setattr(fla_kernels, "installed", lambda: True)
    with pytest.warns(RuntimeWarning, match=r"cannot be imported \(ModuleNotFoundError"):
        model(ids)
    monkeypatch.setattr(fla_kernels, "installed", lambda: False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(ids)  # nothing is wrong with a machine that has no fla
    model.set_kernels("fla")
    with pytest.raises(RuntimeError, match="cannot be imported"):
        model(ids)


@pytest.mark.parametrize(
    ("triton", "capability", "bad"),
    [
        ("3.6.0", 9, True),
        ("3.7.0", 9, True),
        ("3.4.0+git1", 9, True),
        ("3.7.1", 9, False),
        ("3.3.1", 9, False),
        ("3.6.0", 8, False),
        ("3.10.0", 9, False),
    ],
)
def test_pairs_that_are_known_to_train_wrong(triton: str, capability: int, bad: bool, monkeypatch) -> None:
    module = ModuleType("triton")
    module.__version__ = triton  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton", module)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability, 0))
    problem = fla_kernels._known_problem(torch.device("cuda", 0))
    assert bool(problem) == bad and (not bad or "triton>=3.7.1" in problem)


def test_unknown_names(monkeypatch) -> None:
    model = make_model(mixers=GATED)
    with pytest.raises(ValueError, match="kernels: 'triton' is not one of"):
        model.set_kernels("triton")
    monkeypatch.setenv(fla_kernels.ENVIRONMENT, "cuda")
    with pytest.raises(ValueError, match="kernels: 'cuda'"):
        model(tokens(1, 5))


def test_stirred_reset_layers_keep_our_own_op(fla: Fla) -> None:
    """Noise in groups is no single write strength."""
    model = make_model(mixers=[{"kind": "covariance_reset", "noise_groups": 2}] * 2)
    stir(model)
    model.set_kernels("fla")
    model(tokens(1, 70))
    assert not fla.calls
