"""The recurrence as the paper writes it, one token after the other: what every fast path is compared with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from regraft.ops.kalman import FilterInputs


def reference_filter(x: FilterInputs) -> tuple[Tensor, Tensor, Tensor | None]:
    """Walk the tokens (paper 000, Proposition 1); also the decoding path.

    Returns:
        `o [B,H,G,T,Vg]`, the final mean `[B,H,G,D,Vg]`, the final covariance `[B,H,G,D,D]` or None.
    """
    M, P = x.mean, x.cov
    eye = torch.eye(x.k.shape[-1], dtype=x.k.dtype, device=x.k.device)
    evidence = x.evidence[:, None, None, None]
    outputs = []
    for t in range(x.k.shape[2]):
        k, q = x.k[:, :, None, t, :, None], x.q[:, :, None, t, :, None]  # [B,H,1,D,1]
        a = x.g[:, :, t].exp()[..., None, None, None]
        r2, r2_cov = x.obs_var[..., t, None, None], x.obs_var_cov[..., t, None, None]
        if P is None:
            u = x.prior_var[:, None, None, None] * k.expand(*r2.shape[:3], -1, -1)
        else:
            Pbar = a**2 * P + x.process_var[:, :, t, None, None, None] * eye
            u = Pbar @ k  # [B,H,G,D,1]
        s = k.mT @ u
        innovation = x.v[..., t, None, :] - k.mT @ (a * M)  # [B,H,G,1,Vg]
        M = a * M + u / (r2 + s) * innovation
        if P is not None:
            P = Pbar - evidence / (r2_cov + evidence * s) * (u @ u.mT)
        outputs.append(q.mT @ M)
    return torch.cat(outputs, dim=-2), M, P
