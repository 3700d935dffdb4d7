"""The filter against its reference, against closed forms and against an independent Gated DeltaNet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from regraft.ops import kalman_delta_rule

torch.set_num_threads(1)

Problem = dict[str, Tensor]
TOLERANCE = {"rtol": 1e-12, "atol": 1e-12}
TOKENS = ("q", "k", "v", "g", "obs_var", "process_var")


def make_problem(
    T: int,
    *,
    B: int = 2,
    H: int = 2,
    D: int = 5,
    V: int = 6,
    G: int = 2,
    evidence: float = 1.0,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> Problem:
    """A random filtering problem with a given start; every entry may be differentiated."""
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    factor = normal(B, H, G, D, D)
    problem = {
        "q": normal(B, T, H, D),
        "k": F.normalize(normal(B, T, H, D), dim=-1),
        "v": normal(B, T, H, V),
        "g": -0.3 * normal(B, T, H).abs(),
        "obs_var": 0.05 + normal(B, T, H, G).exp(),
        "process_var": 0.1 * normal(B, T, H).abs(),
        "evidence": torch.full((H,), evidence, dtype=torch.float64),
        "prior_var": 0.5 + normal(H).abs(),
        "mean": normal(B, H, D, V),
        "cov": factor @ factor.mT / D + 0.1 * torch.eye(D, dtype=torch.float64),
    }
    return {name: x.to(dtype) for name, x in problem.items()}


def run(problem: Problem, *, state: bool = True, **settings: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    """`(o, mean, cov)` of the op, from the problem's start or from the prior."""
    inputs = {name: problem[name] for name in (*TOKENS, "evidence", "prior_var")}
    start = (problem["mean"], problem["cov"]) if state else None
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
    loss = sum((x * torch.randn(x.shape, generator=rng, dtype=x.dtype)).sum() for x in results.values())
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


@pytest.mark.parametrize("family", ["dense", "reset"])
@pytest.mark.parametrize("evidence", [0.0, 0.3, 1.0, 2.5])
@pytest.mark.parametrize("T", [1, 7, 8, 9, 29])
def test_chunk_equals_reference(family: str, evidence: float, T: int) -> None:
    problem = make_problem(T, evidence=evidence)
    chunk = results_and_gradients(problem, covariance=family, backend="chunk", chunk_size=8)
    assert_same(chunk, results_and_gradients(problem, covariance=family, backend="reference"))


@pytest.mark.parametrize(
    "shape", [{"H": 1, "B": 1}, {"V": 3, "G": 3}, {"V": 8, "D": 3, "G": 1}, {"D": 1, "V": 2}]
)
@pytest.mark.parametrize("start", [True, False], ids=["given start", "prior start"])
def test_chunk_equals_reference_at_other_shapes(shape: dict[str, int], start: bool) -> None:
    problem = make_problem(19, evidence=0.7, **shape)
    settings: dict[str, Any] = {"state": start, "scale": 0.3, "obs_var_floor": 0.4}
    chunk = results_and_gradients(problem, backend="chunk", chunk_size=8, **settings)
    assert_same(chunk, results_and_gradients(problem, backend="reference", **settings))


@pytest.mark.parametrize("backend", ["reference", "chunk"])
@pytest.mark.parametrize("evidence", [0.0, 1.0])
def test_gradcheck(backend: str, evidence: float) -> None:
    problem = make_problem(5, B=1, D=2, V=2, evidence=evidence)
    names, leaves = list(problem), [x.requires_grad_() for x in problem.values()]

    def outputs(*leaves: Tensor) -> tuple[Tensor | None, ...]:
        return run(dict(zip(names, leaves, strict=True)), backend=backend, chunk_size=3)

    assert torch.autograd.gradcheck(outputs, leaves)


def test_auto_takes_the_sequential_path_for_few_tokens_and_agrees() -> None:
    problem = make_problem(40)
    assert_same(
        dict(zip("oMP", run(problem), strict=True)),  # type: ignore[arg-type]
        dict(zip("oMP", run(problem, backend="reference"), strict=True)),  # type: ignore[arg-type]
    )


def gated_delta_net(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Gated DeltaNet as its paper writes it: `S = S a (I - beta k kT) + beta v kT`, one token at a time."""
    B, T, H, D = q.shape
    S = q.new_zeros(B, H, v.shape[-1], D)
    eye = torch.eye(D, dtype=q.dtype)
    outputs = []
    for t in range(T):
        b, kt = beta[:, t, :, None, None], k[:, t]
        S = S @ (g[:, t].exp()[..., None, None] * (eye - b * kt[..., None] * kt[..., None, :]))
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
        torch.testing.assert_close(state[1], torch.eye(5, dtype=o.dtype).expand_as(state[1]), **TOLERANCE)


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
    q = torch.eye(5, dtype=torch.float64)[torch.arange(30) % 5].expand(2, 2, 30, 5).transpose(1, 2)
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
        precision = K.mT @ K / r2 + torch.eye(5, dtype=K.dtype) / p0
        M = torch.linalg.solve(precision, K.mT @ Y / r2)
        torch.testing.assert_close(o[:, t], M[..., t % 5, :], rtol=1e-10, atol=1e-10)
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


@pytest.mark.parametrize("family", ["dense", "reset"])
@pytest.mark.parametrize("backend", ["reference", "chunk"])
def test_a_padding_step_changes_nothing(family: str, backend: str) -> None:
    problem = make_problem(20)
    for name in ("k", "g", "process_var"):
        problem[name][:, 5:] = 0
    for long, short in zip(
        run(problem, covariance=family, backend=backend, chunk_size=8)[1:],
        run(piece(problem, 0, 5), covariance=family, backend=backend, chunk_size=8)[1:],
        strict=True,
    ):
        torch.testing.assert_close(long, short, **TOLERANCE)


def in_pieces(problem: Problem, cuts: Sequence[int], **settings: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    """The op called piece after piece, the state handed on."""
    outputs, mean, cov = [], problem["mean"], problem["cov"]
    for start, stop in zip((0, *cuts), (*cuts, problem["q"].shape[1]), strict=True):
        o, mean, cov = run({**piece(problem, start, stop), "mean": mean, "cov": cov}, **settings)
        outputs.append(o)
    return torch.cat(outputs, dim=1), mean, cov


@pytest.mark.parametrize("family", ["dense", "reset"])
@pytest.mark.parametrize("cuts", [(1,), (7,), (8,), (9,), (29,), (8, 9, 10, 24), tuple(range(1, 30))])
def test_any_split_gives_the_same(family: str, cuts: tuple[int, ...]) -> None:
    problem = make_problem(30)
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


def hard_problem(T: int, D: int) -> Problem:
    """Strongly repeated keys, little noise: where float32 loses most."""
    rng = torch.Generator().manual_seed(3)
    base = torch.randn(4, D, generator=rng, dtype=torch.float64)
    k = base[torch.randint(4, (1, T, 1), generator=rng)]
    k = F.normalize(k + 0.05 * torch.randn(1, T, 1, D, generator=rng, dtype=torch.float64), dim=-1)
    problem = make_problem(T, B=1, H=1, D=D, V=16, G=1)
    return {
        **problem,
        "k": k,
        "g": torch.full_like(problem["g"], -1e-3),
        "obs_var": torch.full_like(problem["obs_var"], 0.01),
        "process_var": torch.full_like(problem["process_var"], 1e-4),
    }


def relative_error(x: Tensor, y: Tensor) -> float:
    return float((x.double() - y).norm() / y.norm())


def test_float32_holds_on_repeated_keys() -> None:
    problem = hard_problem(2048, 32)
    exact = run(problem, state=False)
    single = run({name: x.float() for name, x in problem.items()}, state=False)
    assert single[2] is not None and exact[2] is not None
    assert relative_error(single[0], exact[0]) < 1e-4
    assert relative_error(single[2], exact[2]) < 1e-4
    assert float(torch.linalg.eigvalsh(single[2]).min()) > 0


def test_output_keeps_the_dtype_of_v_and_the_state_is_float32() -> None:
    problem = make_problem(20, dtype=torch.bfloat16)
    o, mean, cov = run(problem)
    assert cov is not None
    assert (o.dtype, mean.dtype, cov.dtype) == (torch.bfloat16, torch.float32, torch.float32)


@pytest.mark.parametrize(
    "name, change",
    [
        ("q, k", {"k": torch.zeros(2, 9, 2, 4)}),
        ("q, k", {"q": torch.zeros(2, 9, 2)}),
        ("v", {"v": torch.zeros(2, 8, 2, 6)}),
        ("g", {"g": torch.zeros(2, 9, 3)}),
        ("process_var", {"process_var": torch.zeros(2, 9)}),
        ("obs_var", {"obs_var": torch.ones(2, 9, 3)}),
        ("obs_var", {"obs_var": torch.ones(2, 9, 2, 4)}),
        ("evidence", {"evidence": torch.ones(3)}),
        ("prior_var", {"prior_var": torch.ones(2, 2)}),
        ("initial_state", {"initial_state": (torch.zeros(2, 2, 5, 5), None)}),
        ("initial_state", {"initial_state": (torch.zeros(2, 2, 5, 6), torch.zeros(2, 2, 1, 5, 5))}),
        ("covariance", {"covariance": "full"}),
        ("backend", {"backend": "fast"}),
        ("chunk_size", {"chunk_size": 0}),
    ],
)
def test_a_bad_argument_is_named(name: str, change: dict[str, Any]) -> None:
    problem = make_problem(9)
    arguments = {key: problem[key] for key in TOKENS}
    with pytest.raises(ValueError, match=f"^{name}: "):
        kalman_delta_rule(**{**arguments, **change})
