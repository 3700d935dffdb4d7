"""The filter on a GPU: the gain pass of a family, then the memory pass, as in `regraft.ops.chunk`."""

from __future__ import annotations

import torch
from torch import Tensor

from regraft.ops.gains import untracked_gains
from regraft.ops.inputs import FilterInputs
from regraft.ops.triton.chunks import Chunks
from regraft.ops.triton.dense import dense_gains
from regraft.ops.triton.memory import MAX_COLUMNS, SIZES, WIDTHS, largest_chunk, memory_pass
from regraft.ops.triton.memory_forward import NARROW
from regraft.ops.triton.scans import moebius_gains

_HALF = (torch.bfloat16, torch.float16)


def unsupported(
    q: Tensor,
    v: Tensor,
    g: Tensor,
    obs_var: Tensor,
    process_var: Tensor,
    covariance: str,
    rotation: Tensor | None,
    chunk_size: int,
) -> str | None:
    """Why the kernels cannot take these arguments, starting with an argument's name, or None if they can."""
    groups = obs_var.shape[-1] if obs_var.dim() == 4 else 1
    columns = v.shape[-1] // max(groups, 1)
    gained = covariance in ("dense", "diagonal", "isotropic")
    for wrong, reason in (
        (q.shape[-1] not in WIDTHS, f"q, k: the kernels have the widths {WIDTHS}, got {q.shape[-1]}"),
        (
            columns % 16 or columns > MAX_COLUMNS,
            f"v: the kernels take multiples of 16 up to {MAX_COLUMNS} value columns a group, got {columns}",
        ),
        (torch.float64 in (q.dtype, v.dtype, g.dtype), "backend: the kernels compute in float32"),
        (g.dim() == 4, "g: the kernels have one decay a head, not one a channel"),
        (gained and process_var.dim() == 4, "process_var: the kernels have one variance a head"),
        (rotation is not None, "rotation: the kernels have none"),
        (chunk_size not in SIZES, f"chunk_size: the kernels have {SIZES}, got {chunk_size}"),
    ):
        if wrong:
            return reason
    return None


def triton_filter(
    x: FilterInputs, scale: float | None, chunk_size: int, precision: str
) -> tuple[Tensor, Tensor, Tensor | None]:
    """What `chunk_filter` returns, from inputs that are not spread (see `prepare`)."""
    B, T, _, _, D = x.k.shape
    chunks = Chunks.of(B, T, min(chunk_size, largest_chunk(D)), x.boundaries, x.k.device)
    q, k, v, g, obs, obs_cov, process = (
        t.flatten(0, 1) for t in (x.q, x.k, x.v, x.g, x.obs_var, x.obs_var_cov, x.process_var)
    )
    q, k, g, obs, obs_cov = q.squeeze(2), k.squeeze(2), g[..., 0, 0], obs.squeeze(-1), obs_cov.squeeze(-1)
    if D < NARROW:  # ptxas compiles halves wrongly
        q, k, v = q.float(), k.float(), v.float()
    same = q.dtype == k.dtype == v.dtype and v.dtype in _HALF
    dtype = v.dtype if same else torch.float32
    evidence = x.evidence.flatten()
    cov: Tensor | None = None
    if x.covariance == "dense":
        assert x.cov is not None
        kappa, cov = dense_gains(
            k, g, obs, obs_cov, process[..., 0, 0], evidence, x.cov, chunks, precision, dtype
        )
    elif x.covariance in ("diagonal", "isotropic"):
        assert x.cov is not None
        kappa, cov = moebius_gains(
            k, g, obs, obs_cov, process[..., 0, 0], evidence, x.cov, chunks, x.covariance == "isotropic"
        )
    else:
        wide = k.float().repeat_interleave(g.shape[1] // k.shape[1], 1)[:, :, None]  # [N,H,1,D]
        kappa = untracked_gains(x.covariance, wide, obs[..., None], x.prior_var.squeeze(-1))
    o, mean = memory_pass(
        q.to(dtype), k.to(dtype), kappa.to(dtype), v.to(dtype), g, x.mean, chunks,
        scale=D**-0.5 if scale is None else scale, innovation=x.covariance != "none", precision=precision,
    )  # fmt: skip
    return o.unflatten(0, (B, T)), mean, cov
