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
def ldl16(A):
    """`A [16,16]` symmetric positive definite = `L diag(d) Lᵀ`: `L⁻¹` and d, by elimination.

    Columns are taken apart: as vectors of 16 they live in every warp, so that no step waits for another warp.
    """
    i = tl.arange(0, 16)
    halves = [A]
    for level in tl.static_range(4):
        finer = []
        for x in tl.static_range(1 << level):
            even, odd = tl.split(tl.reshape(halves[x], [16, 8 >> level, 2]))
            finer = finer + [even, odd]  # noqa: RUF005  (a kernel has no starred lists)
        halves = finer
    a, x = [], []
    for column in tl.static_range(16):
        # halving by even and odd columns, four times over, leaves them in the order of their reversed bits
        a = a + [  # noqa: RUF005
            tl.reshape(halves[(column & 1) * 8 + (column & 2) * 2 + (column & 4) // 2 + column // 8], [16])
        ]
        x = x + [tl.where(i == column, 1.0, 0.0)]  # noqa: RUF005
    d = tl.zeros([16], tl.float32)
    for j in range(16):
        here = tl.full([16], j, tl.int32)
        row = tl.zeros([16], tl.float32)  # of what is left, which is symmetric: also column j
        new_a, new_x = [], []
        for column in tl.static_range(16):
            new_a = new_a + [tl.gather(a[column], here, 0)]  # noqa: RUF005
            new_x = new_x + [tl.gather(x[column], here, 0)]  # noqa: RUF005
            row = tl.where(i == column, new_a[column], row)
        factor = tl.where(i > j, row / tl.gather(row, here, 0), 0.0)
        d = tl.where(i == j, row, d)
        next_a, next_x = [], []
        for column in tl.static_range(16):
            next_a = next_a + [a[column] - factor * new_a[column]]  # noqa: RUF005
            next_x = next_x + [x[column] - factor * new_x[column]]  # noqa: RUF005
        a, x = next_a, next_x
    halves = []
    for place in tl.static_range(16):
        halves = halves + [  # noqa: RUF005
            tl.reshape(x[(place & 1) * 8 + (place & 2) * 2 + (place & 4) // 2 + place // 8], [16, 1])
        ]
    for level in tl.static_range(4):
        coarser = []
        for pair in tl.static_range(8 >> level):
            joined = tl.join(halves[2 * pair], halves[2 * pair + 1])
            coarser = coarser + [tl.reshape(joined, [16, 2 << level])]  # noqa: RUF005
        halves = coarser
    return halves[0], d


@triton.jit
def ldl(A, C: tl.constexpr, PRECISION: tl.constexpr):
    """`A [C,C]` symmetric positive definite = `L diag(d) Lᵀ`, L unit lower triangular: `L⁻¹` and d.

    By blocks of 16 rows: what eliminates a block from the rows below is applied to A and to the identity
    beside it, which becomes `L⁻¹`. A loop, so that its code stays in the instruction cache. C divides by
    16.
    """
    if C == 16:
        return ldl16(A)
    N: tl.constexpr = C // 16
    i = tl.arange(0, C)
    eye = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    AX = tl.reshape(tl.permute(tl.join(A, eye), (0, 2, 1)), [C, 2 * C])
    place = tl.arange(0, N)[:, None, None]
    d = tl.zeros([C], tl.float32)
    for n in range(N):
        rows = tl.sum(tl.where(place == n, tl.reshape(AX, [N, 16, 2 * C]), 0.0), 0)
        here = tl.arange(0, 2 * N)[None, :, None] == n
        X, pivots = ldl16(tl.sum(tl.where(here, tl.reshape(rows, [16, 2 * N, 16]), 0.0), 1))
        columns = tl.sum(tl.where(here, tl.reshape(AX, [C, 2 * N, 16]), 0.0), 1)
        below = tl.dot(columns, tl.trans(X), input_precision=PRECISION) / pivots[None, :]
        below = tl.where((i >= 16 * n + 16)[:, None], below, 0.0)
        rows = tl.dot(X, rows, input_precision=PRECISION)
        spread = tl.reshape(tl.broadcast_to(rows[None, :, :], [N, 16, 2 * C]), [C, 2 * C])
        AX = tl.where((i // 16 == n)[:, None], spread, AX)
        AX -= tl.dot(below, rows, input_precision=PRECISION)
        d = tl.where(i // 16 == n, tl.reshape(tl.broadcast_to(pivots[None, :], [N, 16]), [C]), d)
    _, X = tl.split(tl.permute(tl.reshape(AX, [C, 2, C]), (0, 2, 1)))
    return X, d
