"""The recurrence as the papers write it, one token after the other: what every fast path is compared with."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from regraft.ops.inputs import FilterInputs
from regraft.ops.rotation import rotate_both, rotate_rows


def reference_filter(x: FilterInputs) -> tuple[Tensor, Tensor, Tensor | None]:
    """Walk the tokens; also the decoding path.

    Returns:
        `o [B,T,H,G,Vg]`, the final mean `[N,H,G,D,Vg]`, the final covariance as in `FilterInputs` or None.
    """
    if x.boundaries is not None:
        o, means, covs = zip(*(reference_filter(d) for d in _documents(x, x.boundaries)), strict=True)
        return torch.cat(o, dim=1), torch.cat(means), None if x.cov is None else torch.cat(covs)
    M, P = x.mean, x.cov
    outputs = []
    for t in range(x.k.shape[1]):
        q, k = x.q[:, t, ..., None], x.k[:, t, ..., None]  # [B,H,1,D,1]
        a = x.g[:, t, ..., None].exp()  # [B,H,1,1 or D,1]
        M = a * M
        if x.rotation is not None:
            M = rotate_rows(M, x.rotation[:, t])
        kappa, P = _gain(x, t, P, k, a)
        written = x.v[:, t, :, :, None]  # [B,H,G,1,Vg]
        if x.covariance != "none":
            written = written - k.mT @ M
        M = M + kappa * written
        outputs.append((q.mT @ M).squeeze(-2))
    return torch.stack(outputs, dim=1), M, P


def _gain(x: FilterInputs, t: int, P: Tensor | None, k: Tensor, a: Tensor) -> tuple[Tensor, Tensor | None]:
    """The write vector kappa `[B,H,G,D,1]` of token t and the covariance after it."""
    r2, r2_cov = x.obs_var[:, t, ..., None], x.obs_var_cov[:, t, ..., None]  # [B,H,G,1,1]
    prior, evidence = x.prior_var, x.evidence
    if x.covariance == "none":  # latent-input model, paper 000 §3.2
        return prior / (prior + r2) * k, None
    if x.covariance == "reset":  # Pbar = prior · I, paper 000 §3.1
        return prior * k / (r2 + prior * (k.mT @ k)), None
    assert P is not None
    w = x.process_var[:, t]  # [B,H,1,1 or D]
    if x.covariance == "dense":  # paper 000, Proposition 1
        P = a * P * a.mT
        if x.rotation is not None:
            P = rotate_both(P, x.rotation[:, t])
        P = P + torch.diag_embed(w.expand(*w.shape[:-1], k.shape[-2]))
        u = P @ k
        s = k.mT @ u
        return u / (r2 + s), P - evidence / (r2_cov + evidence * s) * (u @ u.mT)
    a2, k2 = a.squeeze(-1).square(), k.squeeze(-1).square()
    if x.covariance == "isotropic":  # paper 002: the diagonal rule, averaged over the channels
        a2, k2, w = (y.mean(-1, keepdim=True) for y in (a2, k2, w))
    p = a2 * P + w  # [B,H,G,D or 1]
    s = (p[..., None] * k.square()).sum(-2, keepdim=True)
    return p[..., None] * k / (r2 + s), p / (1 + evidence.squeeze(-1) / r2_cov.squeeze(-1) * k2 * p)


def _documents(x: FilterInputs, boundaries: list[int]) -> list[FilterInputs]:
    """The documents of a packed row, each as a row of its own."""
    return [
        replace(
            x.map_tokens(lambda _, t, start=start, stop=stop: t[:, start:stop]),  # type: ignore[misc]
            mean=x.mean[i : i + 1],
            cov=None if x.cov is None else x.cov[i : i + 1],
            boundaries=None,
        )
        for i, (start, stop) in enumerate(pairwise(boundaries))
    ]
