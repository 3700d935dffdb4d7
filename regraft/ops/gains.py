"""The gain pass: write vectors kappa of a whole sequence, one function a kind of covariance.

Arguments are in chunk layout: what belongs to a token is `[n,H,G,C,X]`, with 1 in place of G where groups
share it. Each function returns kappa `[n,H,G,C,D]` and the covariance after the last token.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from regraft.ops.decay import Decay
from regraft.ops.inputs import FilterInputs
from regraft.ops.layout import ChunkLayout
from regraft.ops.rotation import rotate_both

Moebius = tuple[Tensor, Tensor, Tensor]  # A, B, C of p -> (A p + B) / (C p + 1)


def gains(x: FilterInputs, layout: ChunkLayout) -> tuple[Tensor, Tensor | None]:
    """kappa and the final covariance of the family `x.covariance`."""
    if x.covariance in ("none", "reset"):
        return untracked_gains(x.covariance, x.k, x.obs_var, x.prior_var), None
    return _dense_gains(x, layout) if x.covariance == "dense" else _moebius_gains(x, layout)


def untracked_gains(covariance: str, k: Tensor, obs_var: Tensor, prior_var: Tensor) -> Tensor:
    """kappa of a family that tracks no covariance, in any layout in which the three broadcast."""
    if covariance == "none":  # latent-input model, paper 000 §3.2
        return prior_var / (prior_var + obs_var) * k
    # Pbar = prior · I at every step, paper 000 §3.1
    return prior_var * k / (obs_var + prior_var * k.square().sum(-1, keepdim=True))


def _dense_gains(x: FilterInputs, layout: ChunkLayout) -> tuple[Tensor, Tensor]:
    """The exact filter: inside a chunk the observations are jointly Gaussian, one Cholesky factor has it all.

    Their predicted covariance is scaled by the evidence instead of dividing the noise by it, so evidence 0
    needs no case of its own and has a gradient.
    """
    wide = _widened(x)
    assert wide.cov is not None
    decay, evidence = Decay.of(wide.g), wide.evidence
    n = decay.accumulate(wide.process_var)  # [n,H,1,C,1|D] process noise since the chunk's entry
    nk, h = n * wide.k, decay.entry * wide.k
    noise = decay.products(wide.k, nk)
    noise = evidence * (noise + noise.tril(-1).mT) + torch.diag_embed(wide.obs_var_cov.squeeze(-1))
    chunks = [h, nk, noise, n, decay.entry, decay.between]
    if wide.rotation is not None:
        chunks.append(wide.rotation[..., -1, :])
    warped, roots = [], []

    def step(
        P: Tensor,
        h: Tensor,
        nk: Tensor,
        noise: Tensor,
        n: Tensor,
        entry: Tensor,
        between: Tensor,
        *turn: Tensor,
    ) -> Tensor:
        decay, b = Decay(entry, between), entry[..., -1:, :]
        hP = h @ P  # [n,H,G,C,D]
        L = torch.linalg.cholesky(evidence * (hP @ h.mT) + noise)
        U = decay.solve(L, entry * hP + nk)  # the warped keys, each over the root of its innovation variance
        warped.append(U.to(x.k.dtype))
        roots.append(L.diagonal(dim1=-2, dim2=-1).to(x.k.dtype))
        E = decay.exit * U
        P = (b.mT * b) * P - (evidence * E).mT @ E
        P.diagonal(dim1=-2, dim2=-1).add_(n[..., -1, :])
        return rotate_both(P, *turn) if turn else P

    cov = layout.carry(wide.cov, step, *chunks).to(x.k.dtype)
    U = torch.cat(warped)
    # u / (r2 + u·k); the roots cancel
    kappa = U / (x.obs_var / torch.cat(roots)[..., None] + (U * x.k).sum(-1, keepdim=True))
    return kappa, 0.5 * (cov + cov.mT)  # rounding may leave it short of symmetry


def _widened(x: FilterInputs) -> FilterInputs:
    """With what the covariance depends on in float64.

    Along a key written n times the variance is about `r2 / n`, left over from numbers near the prior. Float32
    would err there by 1e-7 of the prior in directions that no later write of that key corrects.
    """
    if x.k.device.type == "mps":  # has no float64
        return x
    names = ("k", "g", "obs_var_cov", "process_var", "rotation", "evidence", "cov")
    return replace(x, **{name: t.double() for name in names if (t := getattr(x, name)) is not None})


def _moebius_gains(x: FilterInputs, layout: ChunkLayout) -> tuple[Tensor, Tensor]:
    """Diagonal and isotropic covariance (paper 002): every step maps p to `(A p + B) / (C p + 1)`.

    A, B and C are at least 0, and such maps compose into one of the same form without a subtraction, so an
    associative scan is as accurate as the recurrence.
    """
    assert x.cov is not None
    a2, w, k2 = (2 * x.g).exp(), x.process_var, x.k.square()
    if x.covariance == "isotropic":  # the diagonal rule, averaged over the channels
        a2, w, k2 = (y.mean(-1, keepdim=True) for y in (a2, w, k2))
    information = x.evidence / x.obs_var_cov * k2  # [n,H,G,C,D or 1]
    A, B, C = _scan(_normalised(a2, w, information * a2, 1 + information * w))
    entries = []

    def step(p: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
        entries.append(p)
        return (A * p + B) / (C * p + 1)

    cov = layout.carry(x.cov, step, *(m[..., -1, :] for m in (A, B, C)))
    entry = torch.cat(entries)[..., None, :]
    after = (A * entry + B) / (C * entry + 1)
    predicted = a2 * torch.cat([entry, after[..., :-1, :]], dim=-2) + w
    s = (predicted * x.k.square()).sum(-1, keepdim=True)
    return predicted * x.k / (x.obs_var + s), cov


def _scan(maps: Moebius) -> Moebius:
    """Maps from the entry to after each step, `[...,C,X]`: pairs first, then from those what lies between."""
    steps = maps[0].shape[-2]
    if steps == 1:
        return maps
    if steps % 2:
        A, B, C = _scan(_with_identity(maps, (0, 1)))
        return A[..., :steps, :], B[..., :steps, :], C[..., :steps, :]
    A, B, C = maps
    first, second = ((A[..., i::2, :], B[..., i::2, :], C[..., i::2, :]) for i in (0, 1))
    after_second = _scan(_compose(second, first))
    before_first = _with_identity(after_second, (1, -1))
    after_first = _compose(first, before_first)
    A, B, C = (
        torch.stack(pair, dim=-2).flatten(-3, -2) for pair in zip(after_first, after_second, strict=True)
    )
    return A, B, C


def _compose(second: Moebius, first: Moebius) -> Moebius:
    (A2, B2, C2), (A1, B1, C1) = second, first
    return _normalised(A2 * A1 + B2 * C1, A2 * B1 + B2, C2 * A1 + C1, C2 * B1 + 1)


def _normalised(A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> Moebius:
    """`(A p + B) / (C p + D)` with D made 1; D >= 1, so nothing overflows."""
    return A / D, B / D, C / D


def _with_identity(maps: Moebius, padding: tuple[int, int]) -> Moebius:
    """Steps that change nothing put before or after, or steps cut off where the padding is negative."""
    A, B, C = maps
    pad = (0, 0, *padding)
    return F.pad(A, pad, value=1.0), F.pad(B, pad), F.pad(C, pad)
