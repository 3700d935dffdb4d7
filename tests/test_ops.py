"""The filter against its reference, against closed forms and against an independent Gated DeltaNet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from regraft.ops import kalman_delta_rule

torch.set_num_threads(1)

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
        (x * torch.randn(x.shape, generator=rng, dtype=torch.float64).to(x.dtype)).sum()
        for x in results.values()
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


@pytest.mark.parametrize("T", [1, 7, 8, 9, 29])
@pytest.mark.parametrize("family, transition", CASES)
def test_chunk_equals_reference(family: str, transition: str, T: int) -> None:
    problem = make_problem(T, family, evidence=0.7, **TRANSITIONS[transition])
    assert_backends_agree(problem, covariance=family)


@pytest.mark.parametrize("evidence", [0.0, 0.3, 1.0, 2.5])
@pytest.mark.parametrize("family", TRACKED)
def test_chunk_equals_reference_at_any_evidence(family: str, evidence: float) -> None:
    assert_backends_agree(make_problem(19, family, evidence=evidence), covariance=family)


SHAPES = [
    {"H": 1, "B": 1},
    {"V": 3, "G": 3},
    {"V": 8, "D": 3, "G": 1},
    {"D": 1, "V": 2},
    {"H": 4, "key_heads": 2},
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("start", [True, False], ids=["given start", "prior start"])
@pytest.mark.parametrize("family", FAMILIES)
def test_chunk_equals_reference_at_other_shapes(family: str, shape: dict[str, int], start: bool) -> None:
    problem = make_problem(19, family, evidence=0.7, **shape)
    assert_backends_agree(problem, covariance=family, state=start, scale=0.3, obs_var_floor=0.4)


def assert_backends_agree(problem: Problem, **settings: Any) -> None:
    """Outputs, states and every gradient of the chunk path equal the reference's."""
    chunk = results_and_gradients(problem, backend="chunk", chunk_size=8, **settings)
    assert_same(chunk, results_and_gradients(problem, backend="reference", **settings))


@pytest.mark.parametrize("backend", ["reference", "chunk"])
@pytest.mark.parametrize("family, transition", CASES)
def test_gradcheck(family: str, transition: str, backend: str) -> None:
    evidence = 0.0 if transition == "scalar" else 0.8
    problem = make_problem(4, family, B=1, H=1, D=2, V=2, evidence=evidence, **TRANSITIONS[transition])
    names, leaves = list(problem), [x.requires_grad_() for x in problem.values()]

    def outputs(*leaves: Tensor) -> tuple[Tensor, ...]:
        x = dict(zip(names, leaves, strict=True))
        # Finite differences step out of the ranges, so values are not checked.
        results = run(x, covariance=family, backend=backend, chunk_size=3, check=False)
        return tuple(y for y in results if y is not None)

    assert torch.autograd.gradcheck(outputs, leaves)


def test_auto_agrees_with_the_reference() -> None:
    for family, transition in CASES:
        problem = make_problem(40, family, **TRANSITIONS[transition])
        assert_same(
            results_and_gradients(problem, covariance=family),
            results_and_gradients(problem, covariance=family, backend="reference"),
        )


def test_fewer_key_heads_are_repeated() -> None:
    problem = make_problem(20, H=4, key_heads=2)
    repeated = {n: problem[n].repeat_interleave(2, dim=2) for n in ("q", "k")}
    assert torch.equal(run(problem)[0], run({**problem, **repeated})[0])


DOCUMENTS = [0, 5, 6, 14, 41, 49]  # shorter than a chunk, one token, a whole chunk, several


@pytest.mark.parametrize("backend", ["reference", "chunk"])
@pytest.mark.parametrize("family, transition", CASES)
def test_packed_documents_equal_separate_ones(family: str, transition: str, backend: str) -> None:
    """Outputs, final states and gradients, into the initial states too."""
    N = len(DOCUMENTS) - 1
    starts = make_problem(1, family, B=N, seed=1)
    problem = make_problem(DOCUMENTS[-1], family, B=1, **TRANSITIONS[transition])
    problem |= {name: starts[name] for name in ("mean", "cov") if name in starts}
    leaves = {name: x.clone().requires_grad_() for name, x in problem.items()}
    settings: dict[str, Any] = {"covariance": family, "backend": backend, "chunk_size": 8}
    packed = run(leaves, cu_seqlens=torch.tensor(DOCUMENTS), **settings)
    parts = []
    for i, (start, stop) in enumerate(pairwise(DOCUMENTS)):
        own = {name: leaves[name][i : i + 1] for name in ("mean", "cov") if name in leaves}
        parts.append(run({**piece(leaves, start, stop), **own}, **settings))
    o, mean, cov = zip(*parts, strict=True)
    separate = (torch.cat(o, dim=1), torch.cat(mean), None if cov[0] is None else torch.cat(cov))
    gradients = []
    for results in (packed, separate):
        rng = torch.Generator().manual_seed(1)
        loss = sum(
            (x * torch.randn(x.shape, generator=rng, dtype=x.dtype)).sum() for x in results if x is not None
        )
        gradients.append(
            torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
        )
    for left, right in zip((*packed, *gradients[0]), (*separate, *gradients[1]), strict=True):
        torch.testing.assert_close(left, right, **TOLERANCE)


def gated_delta_net(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Gated DeltaNet as its paper writes it: `S = S a (I - beta k kT) + beta v kT`, one token at a time.

    With `g` per channel, `[B,T,H,D]`, it is KDA.
    """
    B, T, H, D = q.shape
    S = q.new_zeros(B, H, v.shape[-1], D)
    eye = torch.eye(D, dtype=q.dtype)
    outputs = []
    for t in range(T):
        b, kt = beta[:, t, :, None, None], k[:, t]
        decay = g[:, t].exp().reshape(B, H, 1, -1)
        S = (decay * S) @ (eye - b * kt[..., None] * kt[..., None, :])
        S = S + b * v[:, t][..., None] * kt[..., None, :]
        outputs.append((S @ q[:, t][..., None]).squeeze(-1))
    return torch.stack(outputs, dim=1) * D**-0.5


@pytest.mark.parametrize("family", ["dense", "reset"])
@pytest.mark.parametrize("backend", ["reference", "chunk"])
@pytest.mark.parametrize("floor", [0.0, 0.01])
def test_evidence_zero_is_gated_deltanet(family: str, backend: str, floor: float) -> None:
    x = make_problem(150)
    b = 4 * x["process_var"].sub(0.05)  # write strengths on both sides of one half
    b[:, ::7] = 6.0  # and close to 1, where obs_var lies below the floor
    o, state = kalman_delta_rule(
        x["q"],
        x["k"],
        x["v"],
        x["g"],
        (-b).exp(),
        -torch.expm1(2 * x["g"]),
        covariance=family,
        evidence=0.0,
        backend=backend,
        obs_var_floor=floor,
        output_final_state=True,
    )
    expected = gated_delta_net(x["q"], x["k"], x["v"], x["g"], b.sigmoid())
    torch.testing.assert_close(o, expected, **TOLERANCE)
    if family == "dense":
        assert state is not None and state[1] is not None
        torch.testing.assert_close(state[1], torch.eye(4, dtype=o.dtype).expand_as(state[1]), **TOLERANCE)


@pytest.mark.parametrize("backend", ["reference", "chunk"])
def test_reset_with_a_decay_per_channel_is_kda(backend: str) -> None:
    x = make_problem(60, G=1, channel_decay=True)
    o, _ = kalman_delta_rule(
        x["q"], x["k"], x["v"], x["g"], x["obs_var"], x["process_var"], covariance="reset", backend=backend
    )
    beta = 1 / (1 + x["obs_var"].squeeze(-1))
    torch.testing.assert_close(o, gated_delta_net(x["q"], x["k"], x["v"], x["g"], beta), **TOLERANCE)


def test_floor_acts_on_the_covariance_alone() -> None:
    problem = make_problem(20)
    problem["obs_var"] = torch.full_like(problem["obs_var"], 1e-3)
    raised = {**problem, "obs_var": torch.full_like(problem["obs_var"], 0.2)}
    o, _, cov = run(problem, obs_var_floor=0.2)
    o_raised, _, cov_raised = run(raised)
    torch.testing.assert_close(cov, cov_raised, **TOLERANCE)
    assert not torch.allclose(o, o_raised, rtol=1e-2)


@pytest.mark.parametrize("backend", ["reference", "chunk"])
def test_ridge_regression(backend: str) -> None:
    """No decay, no process noise, evidence 1: the mean is ridge regression on the prefix."""
    x = make_problem(30, G=1)
    r2, p0 = 0.3, 1.7
    q = torch.eye(4, dtype=torch.float64)[torch.arange(30) % 4].expand(2, 2, 30, 4).transpose(1, 2)
    o, state = kalman_delta_rule(
        q,
        x["k"],
        x["v"],
        torch.zeros_like(x["g"]),
        torch.full_like(x["g"], r2),
        torch.zeros_like(x["g"]),
        prior_var=p0,
        scale=1.0,
        backend=backend,
        chunk_size=8,
        output_final_state=True,
    )
    assert state is not None
    for t in (0, 6, 7, 8, 29):
        K, Y = x["k"][:, : t + 1].transpose(1, 2), x["v"][:, : t + 1].transpose(1, 2)
        precision = K.mT @ K / r2 + torch.eye(4, dtype=K.dtype) / p0
        M = torch.linalg.solve(precision, K.mT @ Y / r2)
        torch.testing.assert_close(o[:, t], M[..., t % 4, :], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(state[0], M, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(state[1], torch.linalg.inv(precision)[:, :, None], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("r2, l2", [(0.05, 0.05), (1.0, 1e-3), (0.01, 2.0)])
def test_repeated_key_reaches_the_riccati_root(r2: float, l2: float) -> None:
    """Paper 000, Proposition 4: the root of x² - l2 x - r2 l2 = 0; the others grow by (1 - rho²) l2."""
    T, D, rho = 2000, 4, 0.92
    k = torch.zeros(1, T, 1, D, dtype=torch.float64)
    k[..., 0] = 1.0
    noise = torch.ones(1, T, 1, dtype=torch.float64)

    def covariance_after(T: int) -> Tensor:
        k_T, one = k[:, :T], noise[:, :T]
        _, state = kalman_delta_rule(
            k_T, k_T, k_T, 0 * one, r2 * one, l2 * one, prior_var=3.0, output_final_state=True
        )
        assert state is not None and state[1] is not None
        return state[1][0, 0, 0]

    P = covariance_after(T)
    root = (l2 + math.sqrt(l2**2 + 4 * r2 * l2)) / 2
    assert float(P[0, 0] + l2) == pytest.approx(root, rel=1e-9)
    other = torch.tensor([rho, math.sqrt(1 - rho**2), 0, 0], dtype=torch.float64)
    growth = other @ (P - covariance_after(T - 1)) @ other
    assert float(growth) == pytest.approx((1 - rho**2) * l2, rel=1e-6)


@pytest.mark.parametrize("transition", TRANSITIONS)
def test_additive_family_is_its_closed_sum(transition: str) -> None:
    """`M_T = Σ_s A_T … A_{s+1} omega_s k_s v_sᵀ` with omega = prior / (prior + obs_var)."""
    x = make_problem(12, "none", **TRANSITIONS[transition])
    x["obs_var"][:, ::3] = 0.0  # allowed here: a write in full
    _, mean, _ = run(x, covariance="none", backend="chunk", chunk_size=8)
    expected = torch.zeros_like(mean)
    for s in range(-1, 12):
        if s < 0:
            term = x["mean"]
        else:
            omega = x["prior_var"][:, None] / (x["prior_var"][:, None] + x["obs_var"][:, s])  # [B,H,G]
            term = x["k"][:, s, :, :, None] * (omega.repeat_interleave(3, -1) * x["v"][:, s])[..., None, :]
        for t in range(s + 1, 12):
            term = transition_matrix(x, t) @ term
        expected = expected + term
    torch.testing.assert_close(mean, expected, **TOLERANCE)


def transition_matrix(x: Problem, t: int) -> Tensor:
    """`R diag(a)` of token t, `[B,H,D,D]`, block by block."""
    g = x["g"][:, t]
    A = torch.diag_embed((g if g.dim() == 3 else g[..., None].expand(*g.shape, 4)).exp())
    if "rotation" not in x:
        return A
    R = torch.zeros_like(A)
    for i, angle in enumerate(x["rotation"][:, t].unbind(-1)):
        R[..., 2 * i, 2 * i] = R[..., 2 * i + 1, 2 * i + 1] = angle.cos()
        R[..., 2 * i + 1, 2 * i], R[..., 2 * i, 2 * i + 1] = angle.sin(), -angle.sin()
    return R @ A


def test_rotation_with_noise_on_the_real_rows_alone() -> None:
    """Paper 000, Appendix D: damped rotations, noise diag(1,0,1,0,…), keys on the real rows."""
    x = make_problem(25, G=1, rotation=True, channel_noise=True)
    x["k"][..., 1::2] = 0
    x["process_var"][..., 1::2] = 0
    o, mean, cov = run(x)
    M, P = x["mean"], x["cov"][:, :, 0]
    for t in range(25):
        A, k = transition_matrix(x, t), x["k"][:, t, :, :, None]
        Pbar = A @ P @ A.mT + torch.diag_embed(x["process_var"][:, t])
        kappa = Pbar @ k / (x["obs_var"][:, t, :, :, None] + k.mT @ Pbar @ k)
        F_t = torch.eye(4, dtype=o.dtype) - kappa @ k.mT
        M = F_t @ A @ M + kappa @ x["v"][:, t, :, None, :]
        P = F_t @ Pbar
        torch.testing.assert_close(o[:, t], 0.5 * (M.mT @ x["q"][:, t, :, :, None]).squeeze(-1), **TOLERANCE)
    assert cov is not None
    torch.testing.assert_close((mean, cov[:, :, 0]), (M, P), **TOLERANCE)


def test_diagonal_step_is_the_mean_field_projection_of_the_exact_one() -> None:
    """Paper 002: the same posterior mean, and the inverse diagonal of the posterior precision."""
    x = make_problem(1, "diagonal")
    _, mean, p = run(x, covariance="diagonal")
    assert p is not None
    _, exact_mean, P = run({**x, "cov": torch.diag_embed(x["cov"])})
    assert P is not None
    torch.testing.assert_close(mean, exact_mean, **TOLERANCE)
    torch.testing.assert_close(p, 1 / torch.linalg.inv(P).diagonal(dim1=-2, dim2=-1), **TOLERANCE)


@pytest.mark.parametrize("family", ["diagonal", "isotropic"])
def test_families_agree_where_the_covariance_is_a_number(family: str) -> None:
    """D = 1: diagonal and isotropic are the exact filter."""
    x = make_problem(20, family, D=1)
    exact = {**x, "cov": x["cov"][..., None]}
    o, mean, p = run(x, covariance=family)
    assert p is not None
    o_dense, mean_dense, P = run(exact)
    assert P is not None
    torch.testing.assert_close((o, mean, p), (o_dense, mean_dense, P[..., 0]), **TOLERANCE)


@pytest.mark.parametrize("rho", [0.45, 0.92, 0.99])
def test_flood_plateau(rho: float) -> None:
    """A long flood is one noise-free observation with covariance `P0 + x I`, x the Riccati root."""
    x = make_problem(1, B=1, H=1, G=1)
    k_A = torch.tensor([1.0, 0, 0, 0], dtype=torch.float64)
    k_B = torch.tensor([rho, math.sqrt(1 - rho**2), 0, 0], dtype=torch.float64)
    T, r2, l2 = 400, 0.05, 0.05
    flood = {
        **x,
        "q": k_B.expand(1, T, 1, 4),
        "k": k_A.expand(1, T, 1, 4),
        "v": x["v"].expand(1, T, 1, 6),
        "g": torch.zeros(1, T, 1, dtype=torch.float64),
        "obs_var": torch.full((1, T, 1, 1), r2, dtype=torch.float64),
        "process_var": torch.full((1, T, 1), l2, dtype=torch.float64),
    }
    o = run(flood, scale=1.0)[0]
    root = (l2 + math.sqrt(l2**2 + 4 * r2 * l2)) / 2
    M0, C = x["mean"][0, 0], x["cov"][0, 0, 0] + root * torch.eye(4, dtype=torch.float64)
    share = (k_B @ C @ k_A) / (k_A @ C @ k_A)
    torch.testing.assert_close(
        o[0, -1, 0], k_B @ M0 + share * (x["v"][0, 0, 0] - k_A @ M0), rtol=1e-10, atol=1e-10
    )


@pytest.mark.parametrize("backend", ["reference", "chunk"])
@pytest.mark.parametrize("family, transition", CASES)
def test_a_padding_step_changes_nothing(family: str, transition: str, backend: str) -> None:
    problem = make_problem(20, family, **TRANSITIONS[transition])
    for name in ("k", "g", "process_var", "rotation"):
        if name in problem:
            problem[name][:, 5:] = 0
    for long, short in zip(
        run(problem, covariance=family, backend=backend, chunk_size=8)[1:],
        run(piece(problem, 0, 5), covariance=family, backend=backend, chunk_size=8)[1:],
        strict=True,
    ):
        torch.testing.assert_close(long, short, **TOLERANCE)


def in_pieces(problem: Problem, cuts: Sequence[int], **settings: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    """The op called piece after piece, the state handed on."""
    outputs, state = [], {"mean": problem["mean"], "cov": problem.get("cov")}
    for start, stop in pairwise((0, *cuts, problem["q"].shape[1])):
        o, *final = run({**piece(problem, start, stop), **state}, **settings)  # type: ignore[dict-item]
        state = dict(zip(("mean", "cov"), final, strict=True))
        outputs.append(o)
    mean, cov = state.values()
    return torch.cat(outputs, dim=1), mean, cov


@pytest.mark.parametrize("family, transition", CASES)
@pytest.mark.parametrize("cuts", [(1,), (7,), (8,), (9,), (29,), (8, 9, 10, 24), tuple(range(1, 30))])
def test_any_split_gives_the_same(family: str, transition: str, cuts: tuple[int, ...]) -> None:
    problem = make_problem(30, family, **TRANSITIONS[transition])
    whole = run(problem, covariance=family, chunk_size=8)
    for left, right in zip(in_pieces(problem, cuts, covariance=family, chunk_size=8), whole, strict=True):
        torch.testing.assert_close(left, right, **TOLERANCE)


@pytest.mark.parametrize("backend", ["reference", "chunk"])
@pytest.mark.parametrize("evidence", [0.0, 1.0, 30.0])
def test_covariance_is_symmetric_and_positive(backend: str, evidence: float) -> None:
    problem = make_problem(1, evidence=evidence)
    for t in range(12):
        step = {**make_problem(20, evidence=evidence, seed=t), "cov": problem["cov"]}
        _, _, cov = run(step, backend=backend, chunk_size=8)
        assert cov is not None
        torch.testing.assert_close(cov, cov.mT, rtol=0, atol=0 if backend == "chunk" else 1e-14)
        assert float(torch.linalg.eigvalsh(cov).min()) > 0
        problem["cov"] = cov


def hard_problem(T: int, D: int, spread: float = 0.3, l2: float = 1e-4) -> Problem:
    """Four keys, repeated up to `spread`, and little noise: where float32 loses most."""
    rng = torch.Generator().manual_seed(3)
    keys = F.normalize(torch.randn(4, D, generator=rng, dtype=torch.float64), dim=-1)
    off = torch.randn(1, T, 1, D, generator=rng, dtype=torch.float64) / D**0.5
    problem = make_problem(T, B=1, H=1, D=D, V=16, G=1)
    return {
        **problem,
        "k": F.normalize(keys[torch.randint(4, (1, T, 1), generator=rng)] + spread * off, dim=-1),
        "g": torch.full_like(problem["g"], -1e-3),
        "obs_var": torch.full_like(problem["obs_var"], 0.01),
        "process_var": torch.full_like(problem["process_var"], l2),
    }


def test_float32_holds_on_repeated_keys() -> None:
    problem = hard_problem(2048, 32)
    exact = run(problem, state=False)
    single = run({name: x.float() for name, x in problem.items()}, state=False)
    assert single[2] is not None and exact[2] is not None
    assert relative_error(single[0], exact[0]) < 1e-4
    assert relative_error(single[2], exact[2]) < 1e-4
    assert float(torch.linalg.eigvalsh(single[2]).min()) > 0


@pytest.mark.parametrize("spread, l2", [(0.05, 1e-4), (0.0, 1e-5)])
@torch.no_grad()
def test_float32_holds_on_long_sequences_of_wide_repeated_keys(spread: float, l2: float) -> None:
    """T = 4096, D = 256, r2 = 0.01, four keys written a thousand times each."""
    problem = hard_problem(4096, 256, spread, l2)
    exact = run(problem, state=False)
    single = run({name: x.float() for name, x in problem.items()}, state=False)
    for x, y in zip(single, exact, strict=True):
        assert x is not None and y is not None
        assert relative_error(x, y) < 1e-3
    assert single[2] is not None
    assert float(torch.linalg.eigvalsh(single[2]).min()) > 0


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


def test_float32_gradients_hold_on_repeated_keys() -> None:
    problem = hard_problem(1024, 32)
    exact = results_and_gradients(problem, state=False)
    single = results_and_gradients({name: x.float() for name, x in problem.items()}, state=False)
    for name in ("dq", "dk", "dv", "dg", "dobs_var", "dprocess_var", "devidence", "dprior_var"):
        assert relative_error(single[name], exact[name]) < 1e-3, name


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


def relative_error(x: Tensor, y: Tensor) -> float:
    return float((x.double() - y).norm() / y.norm())


def test_output_keeps_the_dtype_of_v_and_the_state_is_float32() -> None:
    problem = make_problem(20, dtype=torch.bfloat16)
    o, mean, cov = run(problem)
    assert cov is not None
    assert (o.dtype, mean.dtype, cov.dtype) == (torch.bfloat16, torch.float32, torch.float32)


@pytest.mark.parametrize(
    "name, change",
    [
        ("q, k", {"k": torch.zeros(2, 9, 2, 5)}),
        ("q, k", {"q": torch.zeros(2, 9, 2)}),
        ("v", {"v": torch.zeros(2, 8, 2, 6)}),
        ("g", {"g": torch.zeros(2, 9, 3)}),
        ("process_var", {"process_var": torch.zeros(2, 9)}),
        ("obs_var", {"obs_var": torch.ones(2, 9, 3)}),
        ("obs_var", {"obs_var": torch.ones(2, 9, 2, 4)}),
        ("evidence", {"evidence": torch.ones(3)}),
        ("prior_var", {"prior_var": torch.ones(2, 2)}),
        ("initial_state", {"initial_state": (torch.zeros(2, 2, 4, 5), None)}),
        ("initial_state", {"initial_state": (torch.zeros(2, 2, 4, 6), torch.zeros(2, 2, 1, 4, 4))}),
        ("covariance", {"covariance": "full"}),
        ("backend", {"backend": "fast"}),
        ("chunk_size", {"chunk_size": 0}),
    ],
)
def test_a_bad_argument_is_named(name: str, change: dict[str, Any]) -> None:
    problem = make_problem(9)
    arguments = {key: problem[key] for key in TOKENS if key in problem}
    with pytest.raises(ValueError, match=f"^{name}: "):
        kalman_delta_rule(**{**arguments, **change})


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    "name, value",
    [
        ("q", NAN),
        ("k", NAN),
        ("v", INF),
        ("g", NAN),
        ("g", 0.01),
        ("obs_var", 0.0),
        ("obs_var", -1.0),
        ("obs_var", INF),
        ("process_var", -1e-9),
        ("process_var", NAN),
        ("rotation", NAN),
        ("evidence", -0.1),
        ("evidence", NAN),
        ("prior_var", 0.0),
        ("mean", NAN),
        ("cov", INF),
        ("k", 1.0),
    ],
)
def test_a_value_out_of_range_is_named(name: str, value: float) -> None:
    problem = make_problem(9, rotation=True)
    problem[name].view(-1)[-1] = value
    argument = "initial_state" if name in ("mean", "cov") else name
    with pytest.raises(ValueError, match=f"^{argument}: "):
        run(problem)


@pytest.mark.parametrize("family, name, value", [("none", "obs_var", -1.0), ("diagonal", "evidence", -1.0)])
def test_ranges_of_the_other_families(family: str, name: str, value: float) -> None:
    problem = make_problem(9, family)
    problem[name].view(-1)[-1] = value
    with pytest.raises(ValueError, match=f"^{name}: "):
        run(problem, covariance=family)


def test_the_additive_family_takes_keys_of_any_norm() -> None:
    problem = make_problem(9, "none")
    problem["k"] *= 7
    run(problem, covariance="none")


@pytest.mark.parametrize(
    "name, family, change",
    [
        ("rotation", "diagonal", {"rotation": torch.zeros(1, 9, 2, 2)}),
        ("rotation", "dense", {"rotation": torch.zeros(1, 9, 2, 4)}),
        ("rotation", "dense", {"rotation": torch.zeros(1, 9, 2, 2), "g": torch.zeros(1, 9, 2, 4)}),
        ("initial_state", "reset", {"initial_state": (None, torch.ones(1, 2, 2, 4))}),
        ("initial_state", "isotropic", {"initial_state": (None, torch.ones(1, 2, 2, 4))}),
        ("cu_seqlens", "dense", {"cu_seqlens": torch.tensor([0, 5])}),
        ("cu_seqlens", "dense", {"cu_seqlens": torch.tensor([0, 5, 5, 9])}),
        ("cu_seqlens", "dense", {"cu_seqlens": torch.tensor([1, 9])}),
        ("obs_var_floor", "dense", {"obs_var_floor": -1.0}),
    ],
)
def test_arguments_that_do_not_go_together(name: str, family: str, change: dict[str, Any]) -> None:
    problem = make_problem(9, B=1)
    arguments = {key: problem[key] for key in TOKENS if key in problem}
    with pytest.raises(ValueError, match=f"^{name}: "):
        kalman_delta_rule(**{**arguments, "covariance": family, "backend": "chunk", **change})


def test_documents_are_packed_into_one_row() -> None:
    with pytest.raises(ValueError, match=r"^cu_seqlens: .* 2 rows"):
        run(make_problem(9), cu_seqlens=torch.tensor([0, 9]))
