"""Pieces that several kernels share: a chunk's decays, a triangular factorisation."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def chunk_decay(g, C: tl.constexpr):
    """Of the log-decays `[C]` of a chunk: `exp(c)` `[C]`, `exp(c_t - c_s)` for s <= t, else 0 `[C,C]`, and
    `exp(c_C - c_t)` `[C]`, c the running sum. No exponent is above 0."""
    # exp(-104) is 0 already; beside a larger number differences of sums would lose the digits of the others
    g = tl.maximum(g, -104.0)
    c = tl.cumsum(g, 0)
    i = tl.arange(0, C)
    between = tl.where(i[:, None] >= i[None, :], tl.exp(tl.minimum(c[:, None] - c[None, :], 0.0)), 0.0)
    total = tl.sum(g, 0)
    return tl.exp(c), between, tl.exp(tl.minimum(total - c, 0.0)), tl.exp(total)


@triton.jit
def accumulate(between, w):
    """Process noise since the chunk's entry: `n_t = Σ_s between[t,s]² w_s`."""
    return tl.sum(between * between * w[None, :], 1)


@triton.jit
def ldl16(A, X, pivots):
    """`A [16,16]` symmetric positive definite = `L diag(d) Lᵀ` by elimination; all three are addresses.

    `L⁻¹` goes to X and d to `pivots`. What elimination leaves of a column takes the place of the column of
    `L⁻¹` that comes to be. A vector of 32 holds two columns, and all vectors live in every warp, so that no
    step waits for another warp.
    """
    lane = tl.arange(0, 32)
    i, odd = lane % 16, lane // 16
    v = []
    for pair in tl.static_range(8):
        v = v + [tl.load(A + i * 16 + 2 * pair + odd)]  # noqa: RUF005  (a kernel has no starred lists)
    d = tl.zeros([32], tl.float32)
    for j in tl.static_range(16):
        # what is left is symmetric: of column j, in both halves, and its pivot
        column = tl.gather(v[j // 2], i + 16 * (j % 2), 0)
        pivot = tl.gather(v[j // 2], tl.full([32], 16 * (j % 2) + j, tl.int32), 0)
        factor = tl.where(i > j, column / pivot, 0.0)
        d = tl.where(i == j, pivot, d)
        after = []
        for pair in tl.static_range(8):
            own = v[pair] - factor * tl.gather(v[pair], 16 * odd + j, 0)
            if pair == j // 2:
                own = tl.where(odd == j % 2, tl.where(i == j, 1.0, 0.0) - factor, own)
            after = after + [own]  # noqa: RUF005
        v = after
    for pair in tl.static_range(8):
        tl.store(X + i * 16 + 2 * pair + odd, v[pair])
    tl.store(pivots + i, d, mask=odd == 0)


@triton.jit
def ldl(A, work, C: tl.constexpr):
    """`A [C,C]` symmetric positive definite = `L diag(d) Lᵀ`, L unit lower triangular: `L⁻¹` and d.

    By blocks of 16 rows, each of which gets what the ones before leave of it, and is multiplied by the
    inverse of its own part of L. As in place: left of the diagonal block `L⁻¹` comes to be, right of it
    `diag(d) Lᵀ`, of which the columns are what later blocks take off. `work` is memory of `C (C + 1) + 512`
    numbers, this program's own: to take a block out of a matrix by way of it is cheaper than by masks and
    sums across warps. C divides by 16. Products in float32: they are too small for the tensor cores to pay.
    """
    i, j = tl.arange(0, C), tl.arange(0, 16)
    pivots, small = work + C * C, work + C * C + C
    tl.store(work + i[:, None] * C + i[None, :], A)
    for n in range(C // 16):
        here = work + n * (16 * C) + j[:, None] * C + i[None, :]
        tl.debug_barrier()
        rows = tl.where((i >= 16 * n)[None, :], tl.load(here), 0.0)
        for m in range(n):
            above = work + m * (16 * C)
            L = tl.load(above + j[None, :] * C + 16 * n + j[:, None]) / tl.load(pivots + 16 * m + j)[None, :]
            # of the columns between, what block m has left is part of Lᵀ, and not of L⁻¹
            of_both = ((i < 16 * m + 16) | (i >= 16 * n))[None, :]
            there = tl.load(above + j[:, None] * C + i[None, :], mask=of_both, other=0.0)
            rows -= tl.dot(L, there, input_precision="ieee")
        own = i - 16 * n
        inside = ((own >= 0) & (own < 16))[None, :]
        tl.store(small + j[:, None] * 16 + own[None, :], rows, mask=inside)
        tl.debug_barrier()
        ldl16(small, small + 256, pivots + 16 * n)
        tl.debug_barrier()
        X = tl.load(small + 256 + j[:, None] * 16 + j[None, :])
        rows = tl.where(inside, tl.where(own[None, :] == j[:, None], 1.0, 0.0), rows)
        tl.store(here, tl.dot(X, rows, input_precision="ieee"))
    tl.debug_barrier()
    X = tl.load(work + i[:, None] * C + i[None, :])
    return tl.where(i[:, None] // 16 >= i[None, :] // 16, X, 0.0), tl.load(pivots + i)
