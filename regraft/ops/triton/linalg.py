"""Small pieces that several kernels share: decays of a chunk, a triangular factorisation, a meeting of programs."""

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
    """`A [16,16]` symmetric positive definite = `L diag(d) Lᵀ`: `L⁻¹` and d, by elimination beside the identity."""
    i = tl.arange(0, 16)
    rows, cols = i[:, None], i[None, :]
    X = tl.where(rows == cols, 1.0, 0.0)
    d = tl.zeros([16], tl.float32)
    for j in range(16):
        row = tl.sum(tl.where(rows == j, A, 0.0), 0)
        col = tl.sum(tl.where(cols == j, A, 0.0), 1)
        pivot = tl.sum(tl.where(i == j, row, 0.0), 0)
        factor = tl.where(i > j, col / pivot, 0.0)
        X -= factor[:, None] * tl.sum(tl.where(rows == j, X, 0.0), 0)[None, :]
        A -= factor[:, None] * row[None, :]
        d = tl.where(i == j, pivot, d)
    return X, d


@triton.jit
def row_block(A, j: tl.constexpr, C: tl.constexpr):
    """Rows 16 j to 16 j + 15 of `A [C,C]`."""
    block = tl.arange(0, C // 16)[:, None, None]
    return tl.sum(tl.where(block == j, tl.reshape(A, [C // 16, 16, C]), 0.0), 0)


@triton.jit
def ldl(A, C: tl.constexpr, PRECISION: tl.constexpr):
    """`A [C,C]` symmetric positive definite = `L diag(d) Lᵀ`, L unit lower triangular: `L⁻¹` and d.

    Blocks of 16 are eliminated one after the other; between them everything is a matrix product.
    """
    if C == 16:
        X, d = ldl16(A)
    else:
        i = tl.arange(0, C)
        rows, cols = i[:, None], i[None, :]
        X = tl.where(rows == cols, 1.0, 0.0)
        d = tl.zeros([C], tl.float32)
        for j in tl.static_range(C // 16):
            A_row = row_block(A, j, C)
            block = tl.arange(0, C // 16)[None, :, None]
            A_jj = tl.sum(tl.where(block == j, tl.reshape(A_row, [16, C // 16, 16]), 0.0), 1)
            X_jj, d_j = ldl16(A_jj)
            X_row = tl.dot(X_jj, row_block(X, j, C), input_precision=PRECISION)
            if j + 1 < C // 16:
                U_row = tl.dot(X_jj, A_row, input_precision=PRECISION)
                L_T = tl.trans(tl.where(cols >= 16 * (j + 1), U_row / d_j[:, None], 0.0))
                A -= tl.dot(L_T, U_row, input_precision=PRECISION)
                X -= tl.dot(L_T, X_row, input_precision=PRECISION)
            tiled = tl.reshape(tl.broadcast_to(X_row[None, :, :], [C // 16, 16, C]), [C, C])
            X = tl.where(rows // 16 == j, tiled, X)
            d_tiled = tl.reshape(tl.broadcast_to(d_j[None, :], [C // 16, 16]), [C])
            d = tl.where(i // 16 == j, d_tiled, d)
        X = tl.where(rows >= cols, X, 0.0)
    return X, d


@triton.jit
def meet(counter, target):
    """Wait until all programs of a group have come here; what each wrote before, the others may read after.

    `target` is the number of arrivals that `counter`, zero at the launch, has then seen.
    """
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="release", scope="gpu")
    while tl.atomic_add(counter, 0, sem="acquire", scope="gpu") < target:
        pass
    tl.debug_barrier()
