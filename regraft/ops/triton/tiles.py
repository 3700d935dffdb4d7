"""Pieces that the kernels of the memory pass share: tiles in and out, products, decays, an inverse.

A product just made is never transposed in registers to be the left factor of the next one: on Hopper,
Triton 3.4 to 3.7 may compute that wrongly in blocks of 64 with four warps or more (flash-linear-attention,
issues 640 and 984). Where a transpose is needed it is loaded as one, or made in the first place.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Triton's interpreter keeps bfloat16 as integers and would multiply those.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """`acc + a b`, acc in float32; `PRECISION` matters where a and b are float32."""
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def rows(x, stride, n, first, width, R: tl.constexpr, W: tl.constexpr):
    """`[R,W]`: columns `first …` of a matrix of n rows and `width` columns, 0 outside."""
    r, c = tl.arange(0, R)[:, None], first + tl.arange(0, W)[None, :]
    return tl.load(x + r * stride + c, mask=(r < n) & (c < width), other=0.0)


@triton.jit
def columns(x, stride, n, first, width, R: tl.constexpr, W: tl.constexpr):
    """`[W,R]`, the transpose of what `rows` loads."""
    r, c = tl.arange(0, R)[None, :], first + tl.arange(0, W)[:, None]
    return tl.load(x + r * stride + c, mask=(r < n) & (c < width), other=0.0)


@triton.jit
def put_rows(x, value, stride, n, first, width, R: tl.constexpr, W: tl.constexpr):
    """The counterpart of `rows`."""
    r, c = tl.arange(0, R)[:, None], first + tl.arange(0, W)[None, :]
    tl.store(x + r * stride + c, value.to(x.dtype.element_ty), mask=(r < n) & (c < width))


@triton.jit
def scalars(x, stride, n, C: tl.constexpr):
    """`[C]`: one number a token, 0 where there is no token."""
    t = tl.arange(0, C)
    return tl.load(x + t * stride, mask=t < n, other=0.0)


@triton.jit
def put_scalars(x, value, stride, n, C: tl.constexpr):
    """The counterpart of `scalars`."""
    t = tl.arange(0, C)
    tl.store(x + t * stride, value, mask=t < n)


@triton.jit
def decay_between(g, C: tl.constexpr):
    """From log-decays `[C]`: `exp(g_{s+1} + … + g_t)` at `[s,t]` for s <= t, else 0.

    Every sum is made of its own terms. As a difference of running sums it would lose what one strong decay,
    such as a reset, leaves of the digits.
    """
    s, t = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    steps = tl.cumsum(tl.where(s < t, g[None, :], 0.0), axis=1)
    return tl.where(s <= t, tl.exp(steps), 0.0)


@triton.jit
def _row_block(A, number: tl.constexpr, C: tl.constexpr):
    """Rows `16 number` to `16 number + 15` of `A [C,C]`."""
    block = tl.arange(0, C // 16)[:, None, None]
    return tl.sum(tl.where(block == number, tl.reshape(A, [C // 16, 16, C]), 0.0), axis=0)


@triton.jit
def upper_inverse(N, C: tl.constexpr):
    """`(I + N)⁻¹` of a strictly upper triangular `N [C,C]`, in float32.

    The diagonal blocks of 16 by substitution, all at once; then a row of blocks at a time from below. Whole
    matrices at once would be fewer products, but in three parts of TF32 they do not fit the registers.
    """
    B: tl.constexpr = C // 16
    own = tl.arange(0, C)[:, None, None] // 16 == tl.arange(0, B)[None, :, None]
    blocks = tl.reshape(tl.sum(tl.where(own, tl.reshape(N, [C, B, 16]), 0.0), axis=1), [B, 16, 16])
    i, j = tl.arange(0, 16)[None, :, None], tl.arange(0, 16)[None, None, :]
    inverses = tl.where(i == j, 1.0, 0.0) + tl.zeros([B, 16, 16], tl.float32)
    for step in range(1, 16):
        row = 15 - step
        factors = tl.sum(tl.where(i == row, blocks, 0.0), axis=1)
        inverses -= tl.where(i == row, tl.sum(factors[:, :, None] * inverses, axis=1)[:, None, :], 0.0)
    X = tl.reshape(tl.where(own, tl.reshape(inverses, [C, 1, 16]), 0.0), [C, C])
    r, c = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    for step in tl.static_range(1, B):
        row = B - 1 - step
        right = tl.where(c >= 16 * (row + 1), _row_block(N, row, C), 0.0)
        right = dot(right, X, tl.zeros([16, C], tl.float32), "tf32x3")
        inverse = tl.sum(tl.where(tl.arange(0, B)[:, None, None] == row, inverses, 0.0), axis=0)
        right = dot(inverse, right, tl.zeros([16, C], tl.float32), "tf32x3")
        tiled = tl.reshape(tl.broadcast_to(right[None, :, :], [B, 16, C]), [C, C])
        X -= tl.where(r // 16 == row, tiled, 0.0)
    return X
