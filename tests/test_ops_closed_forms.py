"""The filter against closed forms and against independent loops."""

from __future__ import annotations

import math

import pytest
import torch
from filter_problems import (
    TOLERANCE,
    TRANSITIONS,
    Problem,
    make_problem,
    run,
)
from torch import Tensor

from regraft.ops import kalman_delta_rule

torch.set_num_threads(1)


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


@pytest.mark.parametrize("backend", ["reference", "chunk"])
def test_delta_rule_of_one_key_then_of_another(backend: str) -> None:
    """DeltaNet, no decay: writes of one key contract its error, a flood of another reaches its plateau.

    Paper 000, Appendix E.3: after n writes of A `Mᵀk_A - v_A` is the first error times the product of
    `1 - beta_i`, and a key B keeps `M0ᵀk_B + rho (1 - that product) (v_A - M0ᵀk_A)`.
    """
    x = make_problem(40, G=1)
    k_A, k_B = x["k"][:, :1], x["k"][:, 1:2]  # [B,1,H,D], norm at most 1
    k_A, k_B = k_A / k_A.norm(dim=-1, keepdim=True), k_B / k_B.norm(dim=-1, keepdim=True)
    v_A, k = x["v"][:, :1], k_A.expand_as(x["k"])
    o_A, o_B = (
        kalman_delta_rule(
            q.expand_as(k),
            k,
            v_A.expand_as(x["v"]),
            torch.zeros_like(x["g"]),
            x["obs_var"],
            x["process_var"],
            covariance="reset",
            scale=1.0,
            initial_state=(x["mean"], None),
            backend=backend,
            chunk_size=16,
        )[0]
        for q in (k_A, k_B)
    )
    left = (1 - 1 / (1 + x["obs_var"])).cumprod(1)  # [B,T,H,1]
    read_A, read_B = (torch.einsum("bohd,bhdv->bohv", key, x["mean"]) for key in (k_A, k_B))
    rho = (k_A * k_B).sum(-1, keepdim=True)
    torch.testing.assert_close(o_A, v_A + left * (read_A - v_A), **TOLERANCE)
    torch.testing.assert_close(o_B, read_B + rho * (1 - left) * (v_A - read_A), **TOLERANCE)


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
