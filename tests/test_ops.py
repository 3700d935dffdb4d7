"""The chunk path against the reference: every family, transition and shape, split, packed and padded."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from filter_problems import (
    CASES,
    FAMILIES,
    TOLERANCE,
    TRACKED,
    TRANSITIONS,
    Problem,
    assert_same,
    in_pieces,
    make_problem,
    piece,
    results_and_gradients,
    run,
)
from torch import Tensor

torch.set_num_threads(1)


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
