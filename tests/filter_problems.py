"""Random filtering problems, and running the op on them whole, in pieces and with gradients."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regraft.ops import kalman_delta_rule

Problem = dict[str, Tensor]
TOLERANCE = {"rtol": 1e-12, "atol": 1e-12}
TOKENS = ("q", "k", "v", "g", "obs_var", "process_var", "rotation")
FAMILIES = ("dense", "diagonal", "isotropic", "reset", "none")
TRACKED = ("dense", "diagonal", "isotropic")
# What may vary in a transition, and the families and backends that have it.
TRANSITIONS: dict[str, dict[str, Any]] = {
    "scalar": {},
    "decay per channel": {"channel_decay": True},
    "noise per channel": {"channel_noise": True},
    "both per channel": {"channel_decay": True, "channel_noise": True},
    "rotation": {"rotation": True},
}
CASES = [
    (family, transition)
    for family in FAMILIES
    for transition in TRANSITIONS
    if (family, transition) != ("diagonal", "rotation")
]


def make_problem(
    T: int,
    family: str = "dense",
    *,
    B: int = 2,
    H: int = 2,
    D: int = 4,
    V: int = 6,
    G: int = 2,
    key_heads: int | None = None,
    channel_decay: bool = False,
    channel_noise: bool = False,
    rotation: bool = False,
    evidence: float = 1.0,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> Problem:
    """A random filtering problem with a given start; every entry may be differentiated."""
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    factor = normal(B, H, G, D, D)
    cov = factor @ factor.mT / D + 0.1 * torch.eye(D, dtype=torch.float64)
    covs = {"dense": cov, "diagonal": cov.diagonal(dim1=-2, dim2=-1), "isotropic": cov[..., 0, :1]}
    problem = {
        "q": normal(B, T, key_heads or H, D),
        "k": F.normalize(normal(B, T, key_heads or H, D), dim=-1),
        "v": normal(B, T, H, V),
        "g": -0.3 * normal(*(B, T, H, D)[: 4 if channel_decay else 3]).abs(),
        "obs_var": 0.05 + normal(B, T, H, G).exp(),
        "process_var": 0.1 * normal(*(B, T, H, D)[: 4 if channel_noise else 3]).abs(),
        "evidence": torch.full((H,), evidence, dtype=torch.float64),
        "prior_var": 0.5 + normal(H).abs(),
        "mean": normal(B, H, D, V),
    }
    if family in covs:
        problem["cov"] = covs[family]
    if rotation:
        problem["rotation"] = normal(B, T, H, D // 2)
    return {name: x.to(dtype) for name, x in problem.items()}


def run(problem: Problem, *, state: bool = True, **settings: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    """`(o, mean, cov)` of the op, from the problem's start or from the prior."""
    inputs = {name: problem[name] for name in (*TOKENS, "evidence", "prior_var") if name in problem}
    start = (problem["mean"], problem.get("cov")) if state else None
    o, final = kalman_delta_rule(**inputs, initial_state=start, output_final_state=True, **settings)
    assert final is not None
    return o, *final


def piece(problem: Problem, start: int, stop: int) -> Problem:
    """The problem with only these tokens."""
    return {name: x[:, start:stop] if name in TOKENS else x for name, x in problem.items()}


def results_and_gradients(problem: Problem, **settings: Any) -> dict[str, Tensor]:
    """Everything a backend computes: outputs, states, and the gradient of a fixed functional of them."""
    leaves = {name: x.clone().requires_grad_() for name, x in problem.items()}
    results = {
        name: x
        for name, x in zip(("o", "mean", "cov"), run(leaves, **settings), strict=True)
        if x is not None
    }
    rng = torch.Generator().manual_seed(1)
    loss = sum(
        (x * torch.randn(x.shape, generator=rng, dtype=torch.float64).to(x)).sum() for x in results.values()
    )
    gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return {
        **{name: x.detach() for name, x in results.items()},
        **{f"d{name}": x for name, x in zip(leaves, gradients, strict=True)},
    }


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor], **tolerance: float) -> None:
    for name, x in right.items():
        torch.testing.assert_close(
            left[name], x, **(tolerance or TOLERANCE), msg=lambda m, n=name: f"{n}: {m}"
        )


def in_pieces(problem: Problem, cuts: Sequence[int], **settings: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    """The op called piece after piece, the state handed on."""
    outputs, state = [], {"mean": problem["mean"], "cov": problem.get("cov")}
    for start, stop in pairwise((0, *cuts, problem["q"].shape[1])):
        o, *final = run({**piece(problem, start, stop), **state}, **settings)  # type: ignore[dict-item]
        state = dict(zip(("mean", "cov"), final, strict=True))
        outputs.append(o)
    mean, cov = state.values()
    return torch.cat(outputs, dim=1), mean, cov


def hard_problem(
    T: int,
    D: int,
    spread: float = 0.3,
    l2: float = 1e-4,
    *,
    g: float = -1e-3,
    keys: int = 4,
    correlation: float = 0.0,
) -> Problem:
    """A few keys, repeated up to `spread`, and little noise: where float32 loses most."""
    rng = torch.Generator().manual_seed(3)
    centres = torch.randn(keys, D, generator=rng, dtype=torch.float64)
    if correlation:  # of each key with every other one
        orthonormal = torch.linalg.qr(torch.randn(D, keys + 1, generator=rng, dtype=torch.float64))[0].mT
        centres = correlation**0.5 * orthonormal[:1] + (1 - correlation) ** 0.5 * orthonormal[1:]
    centres = F.normalize(centres, dim=-1)
    off = torch.randn(1, T, 1, D, generator=rng, dtype=torch.float64) / D**0.5
    problem = make_problem(T, B=1, H=1, D=D, V=16, G=1)
    return {
        **problem,
        "k": F.normalize(centres[torch.randint(keys, (1, T, 1), generator=rng)] + spread * off, dim=-1),
        "g": torch.full_like(problem["g"], g),
        "obs_var": torch.full_like(problem["obs_var"], 0.01),
        "process_var": torch.full_like(problem["process_var"], l2),
    }


def relative_error(x: Tensor, y: Tensor) -> float:
    return float((x.double() - y).norm() / y.norm())
