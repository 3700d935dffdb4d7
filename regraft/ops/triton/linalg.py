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
def ldl16(A, X, pivots, width: tl.constexpr):
    """`A [16,16]` symmetric positive definite = `L diag(d) Lᵀ` by elimination; all three are addresses.

    `L⁻¹` goes to X and d to `pivots`. Columns are vectors of 16, which live in every warp, so that no step
    waits for another warp. Of row j only what is right of the diagonal changes in A, only what is left of it
    in `L⁻¹`.
    """
    i = tl.arange(0, 16)
    a, x = [], []
    for column in tl.static_range(16):
        a = a + [tl.load(A + i * width + column)]  # noqa: RUF005  (a kernel has no starred lists)
    d = tl.zeros([16], tl.float32)
    for j in tl.static_range(16):
        here = tl.full([16], j, tl.int32)
        row = a[j]  # of what is left, which is symmetric: also row j
        factor = tl.where(i > j, row / tl.gather(row, here, 0), 0.0)
        d = tl.where(i == j, row, d)
        next_a, next_x = [], []
        for column in tl.static_range(16):
            if column > j:
                next_a = next_a + [a[column] - factor * tl.gather(a[column], here, 0)]  # noqa: RUF005
            else:
                next_a = next_a + [a[column]]  # noqa: RUF005
            if column < j:
                next_x = next_x + [x[column] - factor * tl.gather(x[column], here, 0)]  # noqa: RUF005
        a, x = next_a, next_x + [tl.where(i == j, 1.0, 0.0) - factor]  # noqa: RUF005
    for column in tl.static_range(16):
        tl.store(X + i * 16 + column, x[column])
    tl.store(pivots + i, d)


@triton.jit
def ldl(A, work, C: tl.constexpr, PRECISION: tl.constexpr):
    """`A [C,C]` symmetric positive definite = `L diag(d) Lᵀ`, L unit lower triangular: `L⁻¹` and d.

    By blocks of 16 rows: what eliminates a block from the rows below is applied to A and to the identity
    beside it, which becomes `L⁻¹`. `work` is memory of `C (2 C + 1) + 256` numbers, this program's
    own: to take a block out of a matrix by way of it is cheaper than by masks and sums across warps. C
    divides by 16.
    """
    N: tl.constexpr = C // 16
    i, j, wide = tl.arange(0, C), tl.arange(0, 16), tl.arange(0, 2 * C)
    eye = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    AX = tl.reshape(tl.permute(tl.join(A, eye), (0, 2, 1)), [C, 2 * C])
    pivots, small = work + 2 * C * C, work + 2 * C * C + C
    at = work + i[:, None] * (2 * C) + wide[None, :]
    for n in range(N):
        tl.store(at, AX, mask=(i // 16 == n)[:, None])
        tl.debug_barrier()
        block = work + n * (32 * C)
        ldl16(block + 16 * n, small, pivots + 16 * n, 2 * C)
        tl.debug_barrier()
        X = tl.load(small + j[:, None] * 16 + j[None, :])
        rows = tl.dot(X, tl.load(block + j[:, None] * (2 * C) + wide[None, :]), input_precision=PRECISION)
        tl.debug_barrier()
        tl.store(block + j[:, None] * (2 * C) + wide[None, :], rows)
        tl.debug_barrier()
        # of a symmetric matrix the columns are the rows
        d = tl.load(pivots + 16 * n + j)
        below = tl.load(block + j[None, :] * (2 * C) + i[:, None]) * (1.0 / d)[None, :]
        below = tl.where((i >= 16 * n + 16)[:, None], below, 0.0)
        AX -= tl.dot(below, tl.load(block + j[:, None] * (2 * C) + wide[None, :]), input_precision=PRECISION)
    return tl.load(work + i[:, None] * (2 * C) + C + i[None, :]), tl.load(pivots + i)
