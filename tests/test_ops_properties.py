"""What has to hold of the filter for any shape, family, transition and noise (hypothesis)."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from filter_problems import CASES, TOKENS, TRACKED, TRANSITIONS, Problem, in_pieces, make_problem, piece, run
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

torch.set_num_threads(1)
settings.register_profile("filter", deadline=None, max_examples=100, derandomize=True)
settings.load_profile("filter")

TRACKED_CASES = [case for case in CASES if case[0] in TRACKED]


@st.composite
def problems(draw: Callable[..., Any], cases: list[tuple[str, str]] = CASES) -> tuple[str, Problem]:
    """A family and a problem of any shape, noise from 1e-3 to 1e3, evidence from 0 to 20."""
    family, transition = draw(st.sampled_from(cases))
    G, key_heads = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    problem = make_problem(
        draw(st.integers(1, 24)),
        family,
        B=draw(st.integers(1, 2)),
        H=key_heads * draw(st.integers(1, 2)),
        D=2 * draw(st.integers(1, 3)),
        V=G * draw(st.integers(1, 2)),
        G=G,
        key_heads=key_heads,
        evidence=draw(st.sampled_from([0.0, 0.01, 0.5, 1.0, 3.0, 20.0])),
        seed=draw(st.integers(0, 2**20)),
        **TRANSITIONS[transition],
    )
    problem["obs_var"] *= draw(st.sampled_from([1e-3, 1.0, 1e3]))
    problem["process_var"] *= draw(st.sampled_from([0.0, 1.0, 30.0]))
    problem["g"] *= draw(st.sampled_from([0.0, 1.0, 100.0]))  # exp(-30) underflows after a few steps
    return family, problem


def assert_close(left: Any, right: Any) -> None:
    for x, y in zip(left, right, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)


@given(problems(), st.integers(1, 9))
def test_chunk_equals_reference(case: tuple[str, Problem], chunk_size: int) -> None:
    family, problem = case
    chunk = run(problem, covariance=family, backend="chunk", chunk_size=chunk_size)
    assert_close(chunk, run(problem, covariance=family, backend="reference"))


@given(problems(), st.data())
def test_any_split_gives_the_same(case: tuple[str, Problem], data: st.DataObject) -> None:
    family, problem = case
    T = problem["v"].shape[1]
    cuts = sorted(data.draw(st.sets(st.integers(1, T - 1)))) if T > 1 else []
    split = in_pieces(problem, cuts, covariance=family, chunk_size=5)
    assert_close(split, run(problem, covariance=family, chunk_size=7))


@given(problems(), st.data())
def test_packed_equals_separate(case: tuple[str, Problem], data: st.DataObject) -> None:
    family, problem = case
    problem = {name: x[:1] if name in TOKENS else x for name, x in problem.items()}
    T = problem["v"].shape[1]
    cuts = [0, *sorted(data.draw(st.sets(st.integers(1, T - 1)))), T] if T > 1 else [0, 1]
    settings: dict[str, Any] = {"covariance": family, "state": False, "chunk_size": 5}
    packed = run(problem, cu_seqlens=torch.tensor(cuts), **settings)
    parts = [run(piece(problem, a, b), **settings) for a, b in pairwise(cuts)]
    o, mean, cov = zip(*parts, strict=True)
    assert_close(packed, (torch.cat(o, dim=1), torch.cat(mean), None if cov[0] is None else torch.cat(cov)))


@given(problems(), st.sampled_from(["reference", "chunk"]), st.data())
def test_padding_anywhere_is_the_identity(
    case: tuple[str, Problem], backend: str, data: st.DataObject
) -> None:
    """Steps put in at random places change neither mean nor covariance, nor any other step's output."""
    family, problem = case
    T = problem["v"].shape[1]
    real = torch.tensor(sorted(data.draw(st.permutations(range(2 * T)))[:T]))
    padded = {**problem}
    for name in TOKENS:
        if name in problem:
            x = problem[name]
            junk = torch.zeros if name in ("k", "g", "process_var", "rotation") else torch.ones
            padded[name] = junk(x.shape[0], 2 * T, *x.shape[2:], dtype=x.dtype).index_copy(1, real, x)
    o, *state = run(padded, covariance=family, backend=backend, chunk_size=5)
    assert_close((o[:, real], *state), run(problem, covariance=family, backend=backend, chunk_size=5))


def smallest_variance(family: str, cov: Tensor) -> float:
    return float((torch.linalg.eigvalsh(cov) if family == "dense" else cov).min())


@given(problems(TRACKED_CASES), st.sampled_from(["reference", "chunk"]))
def test_covariance_gains_and_predicted_variance(case: tuple[str, Problem], backend: str) -> None:
    """Step by step: P symmetric and PSD, `0 <= s <= trace(Pbar)`, gains along unit keys in [0,1)."""
    family, problem = case
    D = problem["q"].shape[-1]
    for t in range(problem["v"].shape[1]):
        step = piece(problem, t, t + 1)
        # The memory's gain along the key: write ones into an empty memory and read at the key.
        probe = {**step, "q": step["k"], "v": torch.ones_like(step["v"]), "mean": 0 * step["mean"]}
        gain, _, cov = run(probe, covariance=family, backend=backend, scale=1.0)
        assert cov is not None
        assert bool((gain >= -1e-12).all()) and bool((gain < 1).all())
        # s from the gain: gain = s / (r2 + s)
        r2 = step["obs_var"].repeat_interleave(gain.shape[-1] // step["obs_var"].shape[-1], -1)
        s = gain * r2 / (1 - gain)
        quiet = {**step, "evidence": 0 * step["evidence"]}  # at evidence 0 the step returns Pbar
        _, _, predicted = run(quiet, covariance=family, backend=backend)
        assert predicted is not None
        trace = {
            "dense": lambda P: P.diagonal(dim1=-2, dim2=-1).sum(-1),
            "diagonal": lambda p: p.sum(-1),
            "isotropic": lambda b: D * b.sum(-1),
        }[family](predicted)
        bound = trace.repeat_interleave(s.shape[-1] // trace.shape[-1], -1)[:, None]
        assert bool((s <= bound * (1 + 1e-6) + 1e-9).all())
        if family == "dense":
            torch.testing.assert_close(cov, cov.mT, rtol=1e-12, atol=1e-12)
        assert smallest_variance(family, cov) > -1e-12 * float(predicted.abs().max())
        problem["cov"] = cov


@given(problems(TRACKED_CASES), st.sampled_from(["reference", "chunk"]))
def test_evidence_zero_with_stationary_noise_is_the_reset_family(
    case: tuple[str, Problem], backend: str
) -> None:
    """`process_var = prior (1 - a²)`: Gated DeltaNet, with per-channel decay KDA, with a rotation theirs."""
    family, problem = case
    prior = problem["prior_var"].reshape(-1, *[1] * (problem["g"].dim() - 3))
    problem = {
        **problem,
        "evidence": 0 * problem["evidence"],
        "process_var": prior * -torch.expm1(2 * problem["g"]),
    }
    settings: dict[str, Any] = {"state": False, "chunk_size": 5}
    tracked = run(problem, covariance=family, backend=backend, **settings)
    assert_close(tracked[:2], run(problem, covariance="reset", backend=backend, **settings)[:2])


@given(problems([("dense", "scalar")]), st.sampled_from(["reference", "chunk"]))
def test_static_memory_is_ridge_regression(case: tuple[str, Problem], backend: str) -> None:
    """`l2 = 0`, `g = 0`, `mu = 1`: `M = (Σ k kᵀ/r2 + I/p0)^-1 Σ k vᵀ/r2`, whatever the order and the r2."""
    _, problem = case
    for name, fill in (("g", 0.0), ("process_var", 0.0), ("evidence", 1.0)):
        problem[name] = torch.full_like(problem[name], fill)
    G, D, H = problem["obs_var"].shape[-1], problem["q"].shape[-1], problem["v"].shape[2]
    _, mean, cov = run(problem, backend=backend, state=False, chunk_size=5)
    k = problem["k"].repeat_interleave(H // problem["k"].shape[2], 2).permute(0, 2, 1, 3)[:, :, None]
    v = problem["v"].unflatten(-1, (G, -1)).permute(0, 2, 3, 1, 4)  # [B,H,G,T,Vg]
    precision_of = 1 / problem["obs_var"].permute(0, 2, 3, 1)[..., None]
    prior = torch.eye(D, dtype=k.dtype) / problem["prior_var"][:, None, None, None]
    precision = k.mT @ (precision_of * k) + prior
    expected = torch.linalg.solve(precision, k.mT @ (precision_of * v))
    scale = max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(mean, expected.movedim(2, -2).flatten(-2), rtol=1e-7, atol=1e-7 * scale)
    torch.testing.assert_close(cov, torch.linalg.inv(precision), rtol=1e-7, atol=1e-9)


positive = st.floats(1e-2, 10.0)


@given(positive, positive, st.floats(-0.99, 0.99), st.sampled_from(TRACKED))
def test_repeated_key_reaches_the_riccati_root(r2: float, l2: float, rho: float, family: str) -> None:
    """Along an axis every tracked family is a scalar filter; other directions grow by (1 - rho²) l2."""
    D = 1 if family == "isotropic" else 3
    k = torch.zeros(1, 1, 1, D, dtype=torch.float64)
    k[..., 0] = 1.0
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    root = (l2 + math.sqrt(l2**2 + 4 * r2 * l2)) / 2
    T = 30 + int(20 * math.sqrt(r2 / l2))  # the contraction of the Riccati map is about 1 - 2 sqrt(l2/r2)

    def covariance_after(steps: int) -> Tensor:
        problem = {"q": k, "k": k, "v": k, "g": 0 * one, "obs_var": r2 * one, "process_var": l2 * one}
        problem = {name: x.expand(1, steps, *x.shape[2:]) for name, x in problem.items()}
        problem |= {"evidence": torch.ones(1), "prior_var": torch.full((1,), 3.0)}
        cov = run(problem, covariance=family, state=False)[2]
        assert cov is not None
        return cov[0, 0, 0]

    P, before = covariance_after(T), covariance_after(T - 1)
    assert math.isclose(float(P.flatten()[0]) + l2, root, rel_tol=1e-9)
    if family == "dense":
        other = torch.tensor([rho, math.sqrt(1 - rho**2), 0.0], dtype=torch.float64)
        growth = float(other @ (P - before) @ other)
        assert math.isclose(growth, (1 - rho**2) * l2, rel_tol=1e-6, abs_tol=1e-9)
