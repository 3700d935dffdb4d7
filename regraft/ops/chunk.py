"""The exact filter in chunk-parallel form: matrix products and one Cholesky factor a chunk.

Inside a chunk the observations are jointly Gaussian, so factorising their C×C covariance gives every Kalman
gain at once; `docs/filter.md` derives it. Two passes: `_dense_gains` (or `_reset_gains`) makes the gains
kappa, `_memory` is the delta rule with left vector kappa and right vector k, the same for every family.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from regraft.ops.kalman import FilterInputs


def chunk_filter(x: FilterInputs, chunk_size: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Filter in chunks of `chunk_size` tokens.

    Returns:
        `o [B,H,G,T,Vg]`, the final mean `[B,H,G,D,Vg]`, the final covariance `[B,H,G,D,D]` or None.
    """
    T = x.k.shape[2]
    x = _in_chunks(x, min(chunk_size, T))
    # dec[t,s] = exp(c_t - c_s) for s <= t: at most 1, so nothing is ever divided by a decayed-away exp(c).
    c = x.g.cumsum(-1)
    C = c.shape[-1]
    causal = torch.ones(C, C, dtype=torch.bool, device=c.device).tril()
    dec = (c[..., :, None] - c[..., None, :]).masked_fill(~causal, float("-inf")).exp()
    kk = x.k @ x.k.mT
    if x.cov is None:
        kappa, cov = _reset_gains(x, kk), None
    else:
        kappa, cov = _dense_gains(x, c.exp(), dec, kk)
    o, mean = _memory(x, kappa, c.exp(), dec)
    return o.flatten(3, 4)[..., :T, :], mean, cov


def _in_chunks(x: FilterInputs, C: int) -> FilterInputs:
    """Split T into N chunks of C tokens, filled up with steps that leave the state alone."""
    pad = -x.k.shape[2] % C

    def tokens(t: Tensor, fill: float = 0.0) -> Tensor:  # [..., T] -> [..., N, C]
        return F.pad(t, (0, pad), value=fill).unflatten(-1, (-1, C))

    def vectors(t: Tensor) -> Tensor:  # [..., T, D] -> [..., N, C, D]
        return F.pad(t, (0, 0, 0, pad)).unflatten(-2, (-1, C))

    return replace(
        x,
        q=vectors(x.q),
        k=vectors(x.k),
        v=vectors(x.v),
        g=tokens(x.g),
        obs_var=tokens(x.obs_var, 1.0),
        obs_var_cov=tokens(x.obs_var_cov, 1.0),
        process_var=tokens(x.process_var),
    )


def _reset_gains(x: FilterInputs, kk: Tensor) -> Tensor:
    """kappa `[B,H,G,N,C,D]` with Pbar = prior · I at every step (paper 000, equation 17)."""
    prior = x.prior_var[:, None, None]
    s = prior * kk.diagonal(dim1=-2, dim2=-1)  # [B,H,N,C]
    gain = prior[..., None] / (x.obs_var + s[:, :, None])
    return gain[..., None] * x.k[:, :, None]


def _dense_gains(x: FilterInputs, b: Tensor, dec: Tensor, kk: Tensor) -> tuple[Tensor, Tensor]:
    """kappa `[B,H,G,N,C,D]` and the final covariance `[B,H,G,D,D]`, chunk after chunk.

    The predicted observation covariance is scaled by the evidence instead of dividing the noise by it, so
    evidence 0 needs no case of its own and has a gradient.
    """
    assert x.cov is not None
    P = x.cov
    n = (dec**2 @ x.process_var[..., None]).squeeze(-1)  # [B,H,N,C] accumulated process noise
    lower = kk * dec * n[..., None, :]
    noise = lower + lower.tril(-1).mT
    evidence = x.evidence[:, None, None, None]
    eye = torch.eye(P.shape[-1], dtype=P.dtype, device=P.device)
    kappas = []
    for i in range(x.k.shape[2]):
        k = x.k[:, :, None, i]  # [B,H,1,C,D]
        bi, ni, di = b[:, :, None, i, :, None], n[:, :, None, i, :, None], dec[:, :, None, i]
        W = k @ P  # [B,H,G,C,D]
        S = bi * bi.mT * (k @ W.mT) + noise[:, :, None, i]
        L = torch.linalg.cholesky(evidence * S + torch.diag_embed(x.obs_var_cov[..., i, :]))
        pivots = L.diagonal(dim1=-2, dim2=-1)
        U = torch.linalg.solve_triangular(
            L / pivots[..., None, :] * di, bi**2 * W + ni * k, upper=False, unitriangular=True
        )
        s = (U * k).sum(-1)
        kappas.append(U / (x.obs_var[..., i, :] + s)[..., None])
        E = di[..., -1, :, None] * U
        P = bi[..., -1:, :] ** 2 * P + ni[..., -1:, :] * eye - E.mT @ (evidence / pivots[..., None] ** 2 * E)
        P = 0.5 * (P + P.mT)  # rounding alone would let it drift from symmetry
    return torch.stack(kappas, dim=3), P


def _memory(x: FilterInputs, kappa: Tensor, b: Tensor, dec: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs `[B,H,G,N,C,Vg]` and the final mean: the delta rule with left vector kappa, right vector k."""
    k, q, b, dec = x.k[:, :, None], x.q[:, :, None], b[:, :, None, ..., None], dec[:, :, None]
    A = (dec * (k @ kappa.mT)).tril(-1)  # the solver takes the unit diagonal as read
    rhs = torch.cat([x.v, (b * k).expand(*x.v.shape[:-1], -1)], dim=-1)
    solved = torch.linalg.solve_triangular(A, rhs, upper=False, unitriangular=True)
    innovations, seen = solved.split([x.v.shape[-1], k.shape[-1]], dim=-1)
    write = (dec[..., -1, :, None] * kappa).mT  # [B,H,G,N,D,C]
    M, means, errors = x.mean, [], []
    for i in range(kappa.shape[3]):
        E = innovations[..., i, :, :] - seen[..., i, :, :] @ M
        means.append(M)
        errors.append(E)
        M = b[..., i, -1:, :] * M + write[..., i, :, :] @ E
    o = b * (q @ torch.stack(means, dim=3)) + (dec * (q @ kappa.mT)) @ torch.stack(errors, dim=3)
    return o, M
