"""float32, and the memory that the chunk path needs."""

from __future__ import annotations

import pytest
import torch
from filter_problems import (
    hard_problem,
    make_problem,
    relative_error,
    results_and_gradients,
    run,
)
from torch import Tensor

torch.set_num_threads(1)


def test_float32_holds_on_repeated_keys() -> None:
    problem = hard_problem(2048, 32)
    exact = run(problem, state=False)
    single = run({name: x.float() for name, x in problem.items()}, state=False)
    assert single[2] is not None and exact[2] is not None
    assert relative_error(single[0], exact[0]) < 1e-4
    assert relative_error(single[2], exact[2]) < 1e-4
    assert float(torch.linalg.eigvalsh(single[2]).min()) > 0


KEYS = {
    "spread by 5 %": {"spread": 0.05},
    "one, repeated exactly": {"spread": 0.0, "keys": 1},
    "four, repeated exactly": {"spread": 0.0},
    "four, correlated by 0.999": {"spread": 0.0, "correlation": 0.999},
    "one, varied to a correlation of 0.999": {"spread": 0.0316, "keys": 1},
}


@pytest.mark.parametrize("g", [0.0, -1e-3], ids="g={}".format)
@pytest.mark.parametrize("l2", [0.0, 1e-7, 1e-5], ids="l2={}".format)
@pytest.mark.parametrize("keys", KEYS)
@torch.no_grad()
def test_float32_holds_on_long_sequences_of_wide_repeated_keys(keys: str, l2: float, g: float) -> None:
    """T = 4096, D = 256, r2 = 0.01, every key written a thousand times or more; the line is 1e-3."""
    problem = hard_problem(4096, 256, l2=l2, g=g, **KEYS[keys])  # type: ignore[arg-type]
    exact = run(problem, state=False, backend="chunk")
    single = run({name: x.float() for name, x in problem.items()}, state=False, backend="chunk")
    for x, y in zip(single, exact, strict=True):
        assert x is not None and y is not None
        assert relative_error(x, y) < 1e-5
    assert single[2] is not None
    assert float(torch.linalg.eigvalsh(single[2]).min()) > 0


@torch.no_grad()
def test_float64_chunks_equal_the_reference_on_exactly_repeated_keys() -> None:
    """What the float32 results above are compared with."""
    problem = hard_problem(4096, 64, spread=0.0, l2=0.0, g=0.0)
    for x, y in zip(
        run(problem, state=False, backend="chunk"),
        run(problem, state=False, backend="reference"),
        strict=True,
    ):
        assert x is not None and y is not None
        assert relative_error(x, y) < 1e-9


@pytest.mark.parametrize("family", ["dense", "diagonal", "isotropic", "reset"])
def test_a_reset_by_decay_leaves_the_digits_of_the_others(family: str) -> None:
    problem = make_problem(70, family, B=1, H=1, D=16, V=16, G=1)
    problem["g"][:, [3, 21, 50]] = -1e6
    exact = results_and_gradients(problem, covariance=family, backend="reference")
    single = {name: x.float() for name, x in problem.items()}
    found = results_and_gradients(single, covariance=family, backend="chunk")
    for name, x in exact.items():
        if float(x.norm()) > 0:
            assert relative_error(found[name], x) < 1e-5, name


@pytest.mark.parametrize("family", ["diagonal", "isotropic"])
@torch.no_grad()
def test_float32_holds_in_the_scanned_families(family: str) -> None:
    problem = hard_problem(2048, 32)
    problem["evidence"] *= 32
    exact = run(problem, state=False, covariance=family)
    single = run({name: x.float() for name, x in problem.items()}, state=False, covariance=family)
    for x, y in zip(single, exact, strict=True):
        assert x is not None and y is not None
        assert relative_error(x, y) < 1e-4


@pytest.mark.parametrize("spread, l2, g", [(0.3, 1e-4, -1e-3), (0.0, 0.0, 0.0)])
def test_float32_gradients_hold_on_repeated_keys(spread: float, l2: float, g: float) -> None:
    problem = hard_problem(1024, 32, spread, l2, g=g)
    exact = results_and_gradients(problem, state=False)
    single = results_and_gradients({name: x.float() for name, x in problem.items()}, state=False)
    for name in ("dq", "dk", "dv", "dg", "dobs_var", "dprocess_var", "devidence", "dprior_var"):
        assert relative_error(single[name], exact[name]) < 1e-4, name


def test_no_covariance_is_kept_per_token() -> None:
    """All that the chunk path keeps for its gradient is a fraction of one covariance a token."""
    T, D = 1024, 128
    problem = {name: x.float().requires_grad_() for name, x in hard_problem(T, D).items()}
    kept: dict[int, int] = {}

    def note(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        run(problem, state=False)
    assert sum(kept.values()) < T * D * D * 4 / 3


@torch.no_grad()
def test_shortcuts_of_float32_products_are_switched_off() -> None:
    """TF32 on an accelerator, bfloat16 products on a CPU that has them."""
    problem = {name: x.float() for name, x in hard_problem(256, 64).items()}
    exact = run(problem, state=False)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        quick = run(problem, state=False)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    for x, y in zip(quick, exact, strict=True):
        assert x is not None and y is not None
        assert torch.equal(x, y)


def test_output_keeps_the_dtype_of_v_and_the_state_is_float32() -> None:
    problem = make_problem(20, dtype=torch.bfloat16)
    o, mean, cov = run(problem)
    assert cov is not None
    assert (o.dtype, mean.dtype, cov.dtype) == (torch.bfloat16, torch.float32, torch.float32)
