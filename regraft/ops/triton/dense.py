"""The gain pass of a dense covariance: `docs/filter.md` derives both directions, `gains.py` is it in torch.

What is sequential is kept small: a chain over the chunks in either direction, and kernels beside it that take
all chunks at once. Names follow `docs/filter.md`: K keys, `R = b² K P0 + n K`, `A = L Δ Lᵀ`, `X = L⁻¹`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from regraft.ops.triton.chunks import Chunks
from regraft.ops.triton.dense_backward import backward
from regraft.ops.triton.dense_forward import forward


def dense_gains(
    k: Tensor,
    g: Tensor,
    obs_var: Tensor,
    obs_var_cov: Tensor,
    process_var: Tensor,
    evidence: Tensor,
    cov: Tensor,
    chunks: Chunks,
    precision: str,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Write vectors and final covariance of the dense family, differentiable in every tensor.

    Args:
        k: keys `[N,Hk,D]`, D 16, 32, 64, 128 or 256.
        g, process_var: `[N,H]`, float32.
        obs_var, obs_var_cov: `[N,H,G]`, float32; the second in the covariance.
        evidence: `[H]`, float32.
        cov: before the first token of each document, `[documents,H,G,D,D]`, float32, symmetric.
        chunks: which tokens a chunk has; its size 16, 32 or 64.
        precision: of matrix products, as Triton names it: `tf32x3`, `tf32` or `ieee`. Gradients of bfloat16
            keys take `tf32` where it is `tf32x3`.
        dtype: of the write vectors.

    Returns:
        kappa `[N,H,G,D]` and the covariance after the last token, shaped as `cov`.
    """
    kappa, final = _DenseGains.apply(
        k, g, obs_var, obs_var_cov, process_var, evidence, cov, chunks, precision, dtype
    )
    return kappa, final


class _DenseGains(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, k: Tensor, g: Tensor, obs: Tensor, obs_cov: Tensor, process: Tensor, evidence: Tensor,
        cov: Tensor, chunks: Chunks, precision: str, dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        k, g, obs, obs_cov, process, evidence, cov = inputs = tuple(
            x.contiguous() for x in (k, g, obs, obs_cov, process, evidence, cov)
        )
        save = any(ctx.needs_input_grad)
        kappa, final, saved = forward(
            k, g, obs, obs_cov, process, evidence, cov, chunks, precision, dtype, save
        )
        ctx.chunks, ctx.precision = chunks, precision
        if save:
            ctx.save_for_backward(*inputs[:6], *saved)
        return kappa, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dkappa: Tensor, dfinal: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # asked for once: under checkpointing that computes them again
        precision = ctx.precision
        if precision == "tf32x3" and saved[0].dtype == torch.bfloat16:
            # beside keys and write vectors of 8 bits the 11 of one product change nothing: docs/benchmarks.md
            precision = "tf32"
        grads = backward(saved, dkappa, dfinal, ctx.chunks, precision)
        return (*grads, None, None, None)
