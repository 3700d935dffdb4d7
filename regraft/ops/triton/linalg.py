"""Pieces that several kernels share: a chunk's decays, a triangular factorisation."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def chunk_decay(g, C: tl.constexpr):
    """Of the log-decays `[C]` of a chunk: `exp(c)` `[C]`, `exp(c_t - c_s)` for s <= t, else 0 `[C,C]`, and
    `exp(c_C - c_t)` `[C]`, c the running sum. No exponent is above 0."""
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
def _quarters(A, HALF: tl.constexpr):
    """The upper left, upper right and lower right quarter of a square matrix."""
    blocks = tl.permute(tl.reshape(A, [2, HALF, 2, HALF]), (1, 3, 2, 0))
    upper, lower = tl.split(blocks)
    upper_left, upper_right = tl.split(upper)
    _, lower_right = tl.split(lower)
    return upper_left, upper_right, lower_right


@triton.jit
def _schur(X, d, upper_right, lower_right, PRECISION: tl.constexpr):
    """The lower left block of L, and what is left of the lower right one to be factorised."""
    U = tl.dot(X, upper_right, input_precision=PRECISION)
    L = tl.trans(U / d[:, None])
    return L, lower_right - tl.dot(L, U, input_precision=PRECISION)


@triton.jit
def _assemble(X1, d1, X2, d2, L, HALF: tl.constexpr, PRECISION: tl.constexpr):
    """The inverse of `[[L1, 0], [L, L2]]` from those of its diagonal blocks, and all pivots."""
    left = -tl.dot(X2, tl.dot(L, X1, input_precision=PRECISION), input_precision=PRECISION)
    blocks = tl.join(tl.join(X1, tl.zeros([HALF, HALF], tl.float32)), tl.join(left, X2))  # [row, col, c, r]
    X = tl.reshape(tl.permute(blocks, (3, 0, 2, 1)), [2 * HALF, 2 * HALF])
    return X, tl.reshape(tl.permute(tl.join(d1, d2), (1, 0)), [2 * HALF])


@triton.jit
def _ldl32(A, PRECISION: tl.constexpr):
    first, beside, second = _quarters(A, 16)
    X1, d1 = ldl16(first)
    L, second = _schur(X1, d1, beside, second, PRECISION)
    X2, d2 = ldl16(second)
    return _assemble(X1, d1, X2, d2, L, 16, PRECISION)


@triton.jit
def ldl(A, C: tl.constexpr, PRECISION: tl.constexpr):
    """`A [C,C]` symmetric positive definite = `L diag(d) Lᵀ`, L unit lower triangular: `L⁻¹` and d.

    By halves, down to blocks of 16; between them everything is a matrix product. C is 16, 32 or 64.
    """
    if C == 16:
        return ldl16(A)
    elif C == 32:
        return _ldl32(A, PRECISION)
    else:
        first, beside, second = _quarters(A, 32)
        X1, d1 = _ldl32(first, PRECISION)
        L, second = _schur(X1, d1, beside, second, PRECISION)
        X2, d2 = _ldl32(second, PRECISION)
        return _assemble(X1, d1, X2, d2, L, 32, PRECISION)
