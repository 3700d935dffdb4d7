"""The memory pass on a GPU: the delta rule with write vectors kappa, the same for every covariance family."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from regraft.ops.triton.chunks import Chunks
from regraft.ops.triton.memory_backward import backward
from regraft.ops.triton.memory_forward import NARROW, Pass, Saved, forward

WIDTHS = (16, 32, 64, 128, 256)
SIZES = (16, 32, 64)
MAX_COLUMNS = 512
PRECISIONS = ("tf32x3", "tf32", "ieee")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def largest_chunk(D: int) -> int:
    """Tokens of a chunk for keys of width D, at most.

    A product of 64 rows is a warp group's, and in heads narrower than that some of them read beyond shared
    memory as ptxas 12.8 compiles them; with 32 rows all products of narrow keys are single warps' own.
    """
    return max(SIZES) if D >= NARROW else 32


def memory_pass(
    q: Tensor,
    k: Tensor,
    kappa: Tensor,
    v: Tensor,
    g: Tensor,
    mean: Tensor,
    chunks: Chunks,
    *,
    scale: float,
    innovation: bool = True,
    precision: str = "tf32x3",
    recompute: bool = False,
) -> tuple[Tensor, Tensor]:
    """Outputs and final memory of `M = a M + kappa (v - (a M)ᵀ k)ᵀ`, `o = scale Mᵀ q`, `a = exp(g)`.

    Differentiable in every tensor, once. Forward and backward are deterministic.

    Args:
        q, k: queries and keys `[N,Hk,D]` of all tokens in one line, Hk a divisor of H, D one of `WIDTHS`.
        kappa: write vectors `[N,H,G,D]`.
        v: values `[N,H,G,Vg]` in the dtype of q, k and kappa; Vg a multiple of 16, at most 512.
        g: log-decay `[N,H]` in float32, at most 0.
        mean: memory before the first token of each document `[documents,H,G,D,Vg]`, float32.
        chunks: which tokens a chunk has; its size one of `SIZES`, at most `largest_chunk(D)`.
        scale: factor of the readout.
        innovation: whether the prediction `(a M)ᵀ k` is subtracted; without it the write is additive.
        precision: of products of float32 inputs, as Triton names it: `tf32x3`, `tf32` or `ieee`. Inputs of 16
            bits are multiplied as they are and summed in float32.
        recompute: keep only the inputs for the backward pass, which then runs the forward pass again. The
            memory at every chunk's entry costs D Vg / C numbers a token, head and group to keep.

    Returns:
        o `[N,H,G,Vg]` in the dtype of v, and the memory after the last token, shaped as `mean`.

    Raises:
        ValueError: the kernels have no such shape or dtype; the message starts with the argument's name.
    """
    _check(q, k, kappa, v, g, mean, chunks, precision)
    run = Pass(chunks, float(scale), innovation, precision)  # Triton would specialise on an integer 1
    D, V = mean.shape[-2:]
    narrow = V < NARROW <= D  # see `largest_chunk`: columns of zeros make it a wide head
    if narrow:
        v, mean = (pad(x, (0, NARROW - V)) for x in (v, mean))
    o, final = _MemoryPass.apply(q, k, kappa, v, g, mean, run, recompute)
    return (o[..., :V], final[..., :V]) if narrow else (o, final)


class _MemoryPass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        *tensors, ctx.run, ctx.recompute = arguments
        q, k, kappa, v, g, mean = (x.contiguous() for x in tensors)
        keep = any(ctx.needs_input_grad) and not ctx.recompute
        o, final, saved = forward(q, k, kappa, v, g, mean, ctx.run, train=keep)
        ctx.save_for_backward(q, k, kappa, g, *(vars(saved).values() if keep else (v, mean)))
        return o, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor, dfinal: Tensor) -> tuple[Tensor | None, ...]:
        q, k, kappa, g, *kept = ctx.saved_tensors
        if ctx.recompute:
            v, mean = kept
            saved = forward(q, k, kappa, v, g, mean, ctx.run, train=True)[2]
        else:
            saved = Saved(*kept)
        gradients = backward(q, k, kappa, g, saved, do.contiguous(), dfinal.contiguous(), ctx.run)
        return (*gradients, None, None)


def _check(
    q: Tensor, k: Tensor, kappa: Tensor, v: Tensor, g: Tensor, mean: Tensor, chunks: Chunks, precision: str
) -> None:
    (N, Hk, D), (_, H, G, V) = k.shape, v.shape
    if D not in WIDTHS:
        raise ValueError(f"k: the kernels have key widths D of {WIDTHS}, got D={D}")
    if V % 16 or not 0 < V <= MAX_COLUMNS:
        raise ValueError(f"v: a group has a multiple of 16 columns, at most {MAX_COLUMNS}, got {V}")
    if chunks.size not in SIZES:
        raise ValueError(f"chunks: the kernels have chunk sizes {SIZES}, got {chunks.size}")
    if chunks.size > (most := largest_chunk(D)):
        raise ValueError(f"chunks: keys of width {D} take chunks of at most {most} tokens, got {chunks.size}")
    if precision not in PRECISIONS:
        raise ValueError(f"precision: {precision!r} is not one of {PRECISIONS}")
    if H % Hk:
        raise ValueError(f"k: {Hk} key heads do not divide {H} heads")
    for name, x, shape in (
        ("q", q, (N, Hk, D)),
        ("kappa", kappa, (N, H, G, D)),
        ("v", v, (N, H, G, V)),
        ("g", g, (N, H)),
        ("mean", mean, (chunks.documents, H, G, D, V)),
    ):
        if x.shape != shape:
            raise ValueError(f"{name}: expected shape {list(shape)}, got {list(x.shape)}")
    if v.dtype not in DTYPES or not (q.dtype == k.dtype == kappa.dtype == v.dtype):
        got = (q.dtype, k.dtype, kappa.dtype, v.dtype)
        raise ValueError(f"q, k, kappa, v: expected one dtype of {DTYPES}, got {got}")
    for name, x in (("g", g), ("mean", mean)):
        if x.dtype != torch.float32:
            raise ValueError(f"{name}: expected float32, got {x.dtype}")
