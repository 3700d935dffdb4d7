"""The op against flash-linear-attention's naive functions, where they compute the same rule.

Skipped where fla is not installed; then `test_ops_closed_forms.py` covers the same rules with loops and sums.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from regraft.ops import kalman_delta_rule

torch.set_num_threads(1)
pytest.importorskip("einops")
SPEC = importlib.util.find_spec("fla")
if SPEC is None or not SPEC.submodule_search_locations:
    pytest.skip("flash-linear-attention is not installed", allow_module_level=True)
OPS = Path(SPEC.submodule_search_locations[0]) / "ops"

B, T, H, D, V = 2, 37, 3, 8, 12


def naive(module: str, function: str) -> Callable[..., Any]:
    """A function of one file: importing fla itself would need triton."""
    spec = importlib.util.spec_from_file_location(f"fla_{module}_naive", OPS / module / "naive.py")
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return getattr(loaded, function)


def inputs(channels: bool = False, key_heads: int = H) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng)

    return {
        "q": normal(B, T, key_heads, D),
        "k": F.normalize(normal(B, T, key_heads, D), dim=-1),
        "v": normal(B, T, H, V),
        "g": -0.2 * normal(*(B, T, H, D)[: 4 if channels else 3]).abs(),
        "b": normal(B, T, H),
        "start": normal(B, H, D, V),
    }


def assert_agree(ours: Callable[..., Any], theirs: Callable[..., Any], x: dict[str, Tensor]) -> None:
    """Outputs, final states and gradients, in float32, which the naive functions compute in."""
    results = []
    for function in (ours, theirs):
        leaves = {name: t.clone().requires_grad_() for name, t in x.items()}
        outputs = [y for y in function(leaves) if y is not None]
        rng = torch.Generator().manual_seed(1)
        loss = sum((y * torch.randn(y.shape, generator=rng)).sum() for y in outputs)
        gradients = torch.autograd.grad(
            loss, list(leaves.values()), allow_unused=True, materialize_grads=True
        )
        results.append([*outputs, *gradients])
    for left, right in zip(*results, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4)


def reset(x: dict[str, Tensor], g: Tensor, **settings: Any) -> tuple[Tensor, Tensor]:
    """The delta-rule family with write strength `sigmoid(b)`."""
    obs_var = (-x["b"]).exp() + 1 - x["k"].square().sum(-1).repeat_interleave(H // x["k"].shape[2], 2)
    o, state = kalman_delta_rule(
        x["q"],
        x["k"],
        x["v"],
        g,
        obs_var,
        torch.zeros_like(x["b"]),
        covariance="reset",
        initial_state=(x["start"], None),
        output_final_state=True,
        **settings,
    )
    assert state is not None
    return o, state[0]


def additive(x: dict[str, Tensor], g: Tensor, start: bool = True, **settings: Any) -> tuple[Tensor, Tensor]:
    """The additive family with writes in full."""
    o, state = kalman_delta_rule(
        x["q"],
        x["k"],
        x["v"],
        g,
        torch.zeros_like(x["b"]),
        torch.zeros_like(x["b"]),
        covariance="none",
        initial_state=(x["start"], None) if start else None,
        output_final_state=True,
        **settings,
    )
    assert state is not None
    return o, state[0]


def test_delta_rule() -> None:
    function = naive("delta_rule", "delta_rule_recurrence")

    def theirs(x: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        q, k, v, b = (x[n].transpose(1, 2) for n in "qkvb")
        o, state = function(q, k, v, b.sigmoid(), initial_state=x["start"])
        return o.transpose(1, 2), state

    assert_agree(lambda x: reset(x, torch.zeros_like(x["b"])), theirs, inputs())


@pytest.mark.parametrize("form", ["recurrent", "chunk"])
def test_gated_delta_rule(form: str) -> None:
    function = naive("gated_delta_rule", f"naive_{form}_gated_delta_rule")

    def theirs(x: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return function(
            **{n: x[n] for n in "qkvg"},
            beta=x["b"].sigmoid(),
            initial_state=x["start"],
            output_final_state=True,
        )

    assert_agree(lambda x: reset(x, x["g"]), theirs, inputs())


@pytest.mark.parametrize("key_heads", [H, 1])
def test_kda(key_heads: int) -> None:
    function = naive("kda", "naive_recurrent_kda")

    def theirs(x: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return function(
            **{n: x[n] for n in "qkvg"},
            beta=x["b"].sigmoid(),
            initial_state=x["start"],
            output_final_state=True,
        )

    assert_agree(lambda x: reset(x, x["g"]), theirs, inputs(channels=True, key_heads=key_heads))


def test_gla() -> None:
    function = naive("gla", "naive_recurrent_gla")

    def theirs(x: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return function(*(x[n] for n in "qkvg"), initial_state=x["start"], output_final_state=True)

    assert_agree(lambda x: additive(x, x["g"]), theirs, inputs(channels=True))


def test_simple_gla() -> None:
    function = naive("simple_gla", "naive_recurrent_simple_gla")

    def theirs(x: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return function(*(x[n] for n in "qkvg"), initial_state=x["start"])

    assert_agree(lambda x: additive(x, x["g"]), theirs, inputs())


def test_retention() -> None:
    function = naive("retention", "naive_retention")
    decay = torch.log1p(-torch.exp2(-5.0 - torch.arange(H))).expand(B, T, H)

    def theirs(x: dict[str, Tensor]) -> tuple[Tensor]:
        return (function(*(x[n].transpose(1, 2) for n in "qkv")).transpose(1, 2),)

    assert_agree(lambda x: additive(x, decay, start=False)[:1], theirs, inputs())


def test_linear_attention() -> None:
    function = naive("linear_attn", "naive_recurrent_linear_attn")

    def theirs(x: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return function(*(x[n] for n in "qkv"), initial_state=x["start"], output_final_state=True)

    assert_agree(lambda x: additive(x, torch.zeros_like(x["b"])), theirs, inputs())
