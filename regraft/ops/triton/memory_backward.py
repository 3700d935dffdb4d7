"""The memory pass, backward: a chain that carries the memory's gradient, and what is parallel beside it.

With `dM` the gradient of the memory after a chunk and `dY` that of what its entry did not predict:

    dY  = Rᵀ dO + Z dM            dV = dY
    dM0 = b_C dM + scale (b Q)ᵀ dO - (b K)ᵀ dY
    dA  = scale dec ∘ (dO Eᵀ)      of Q Kappaᵀ, lower triangular
    dT  = -dec ∘ (dY Eᵀ)           of K Kappaᵀ, strictly lower
    dQ  = scale b dO M0ᵀ + dA Kappa
    dK  = -b dY M0ᵀ + dT Kappa
    dKappa = dec_C E dMᵀ + dAᵀ Q + dTᵀ K

A log-decay `g_r` gets the sum of every product that decays across it, each times its own gradient: the
entries s < r <= t of the chunk's matrices, the reads of M0 from r on, the writes before r that reach the end,
and b_C. Nothing is subtracted, so a strong decay has a gradient as small as it should be.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from regraft.ops.triton.memory_forward import AUTOTUNE, Pass, Saved, configurations
from regraft.ops.triton.tiles import columns, decay_between, dot, put_rows, put_scalars, rows, scalars


@triton.autotune(configurations((32, 64), stages=(1, 2)), **AUTOTUNE)
@triton.jit
def _carry_back(
    q, k, z, readout, entry, do, dfinal, start, stop, first, dv, dstates, dmean, scale,
    H: tl.constexpr, HK: tl.constexpr, G: tl.constexpr, D: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BV: tl.constexpr, INNOVATION: tl.constexpr, PRECISION: tl.constexpr, ELEMENT: tl.constexpr,
):  # fmt: skip
    HG: tl.constexpr = H * G
    NV: tl.constexpr = (V + BV - 1) // BV
    column, group = tl.program_id(0) % NV * BV, tl.program_id(0) // NV
    doc, j = group // HG, group % HG
    h = j // G
    operand = k.dtype.element_ty
    dM = rows(dfinal + group.to(tl.int64) * D * V, V, D, column, V, D, BV)
    last = tl.load(first + doc + 1) - 1
    for back in range(0, last + 1 - tl.load(first + doc)):
        chunk = last - back
        begin = tl.load(start + chunk).to(tl.int64)
        n = (tl.load(stop + chunk) - begin).to(tl.int32)
        token, key = begin * HG + j, begin * HK + h // (H // HK)
        dM_operand = dM.to(operand)
        put_rows(dstates + (tl.cast(chunk, tl.int64) * HG + j) * D * V, dM_operand, V, D, column, V, D, BV)
        dO = rows(do + token * V, HG * V, n, column, V, C, BV)
        dY = tl.zeros([C, BV], tl.float32)
        dY = dot(rows(readout + token * C, HG * C, n, 0, C, C, C), dO, dY, PRECISION)
        dY = dot(rows(z + token * D, HG * D, n, 0, D, C, D), dM_operand, dY, PRECISION)
        put_rows(dv + token * V, dY, HG * V, n, column, V, C, BV)
        b = scalars(entry + begin * H + h, H, n, C)[:, None]
        dM *= tl.load(entry + begin * H + h + (n - 1) * H)
        dO = (scale * b * dO.to(tl.float32)).to(operand)
        dM = dot(columns(q + key * D, HK * D, n, 0, D, C, D), dO, dM, PRECISION)
        if INNOVATION:
            dY = (-b * dY).to(operand)
            dM = dot(columns(k + key * D, HK * D, n, 0, D, C, D), dY, dM, PRECISION)
    put_rows(dmean + group.to(tl.int64) * D * V, dM, V, D, column, V, D, BV)


@triton.jit
def _pairs(
    g, do, dv, innovations, reads, overlap, start, stop, dreads, doverlap, dg, scale,
    H: tl.constexpr, G: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr,
    INNOVATION: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of a chunk's matrices with itself, and what the log-decays get from those."""
    chunk, j = tl.program_id(0), tl.program_id(1)
    begin = tl.load(start + chunk).to(tl.int64)
    n = (tl.load(stop + chunk) - begin).to(tl.int32)
    h = j // G
    HG: tl.constexpr = H * G
    token = begin * HG + j
    s, t = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    dA = tl.zeros([C, C], tl.float32)
    dT = tl.zeros([C, C], tl.float32)
    for c in range(0, V, BV):
        E = rows(innovations + token * V, HG * V, n, c, V, C, BV)
        dA = dot(E, columns(do + token * V, HG * V, n, c, V, C, BV), dA, PRECISION)
        if INNOVATION:
            dT = dot(E, columns(dv + token * V, HG * V, n, c, V, C, BV), dT, PRECISION)
    between = decay_between(scalars(g + begin * H + h, H, n, C), C)
    across = dA * rows(reads + token * C, HG * C, n, 0, C, C, C).to(tl.float32)
    put_rows(dreads + token * C, scale * between * dA, HG * C, n, 0, C, C, C)
    if INNOVATION:
        across -= dT * rows(overlap + token * C, HG * C, n, 0, C, C, C).to(tl.float32)
        put_rows(doverlap + token * C, tl.where(s < t, -between * dT, 0.0), HG * C, n, 0, C, C, C)
    # g_r gets the sum over s < r <= t: row r - 1 of the running sums over s, from column r on
    across = tl.sum(tl.where(s < t, tl.cumsum(across, axis=0), 0.0), axis=1)
    put_scalars(dg + token + HG, across, HG, n - 1, C)
    tl.store(dg + token, 0.0)


@triton.autotune(configurations((64,), stages=(2, 3)), **AUTOTUNE)
@triton.jit
def _vectors(
    q, k, kappa, g, entry, do, dv, innovations, states, dstates, dreads, doverlap, start, stop,
    dq, dk, dkappa, read, written, kept, scale,
    H: tl.constexpr, HK: tl.constexpr, G: tl.constexpr, D: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BD: tl.constexpr, BV: tl.constexpr, INNOVATION: tl.constexpr, PRECISION: tl.constexpr,
    ELEMENT: tl.constexpr,
):  # fmt: skip
    """Gradients of queries, keys and write vectors, by blocks of channels, with partial sums for g."""
    HG: tl.constexpr = H * G
    ND: tl.constexpr = D // BD
    part, chunk, j = tl.program_id(0) % ND, tl.program_id(0) // ND, tl.program_id(1)
    d = part * BD
    begin = tl.load(start + chunk).to(tl.int64)
    n = (tl.load(stop + chunk) - begin).to(tl.int32)
    h = j // G
    token, key = begin * HG + j, begin * HK + h // (H // HK)
    block = tl.cast(chunk, tl.int64) * HG + j
    states += block * D * V + d * V
    dstates += block * D * V + d * V
    Dq = tl.zeros([C, BD], tl.float32)
    Dk = tl.zeros([C, BD], tl.float32)
    Dkappa = tl.zeros([C, BD], tl.float32)
    MM = tl.zeros([BD], tl.float32)
    for c in range(0, V, BV):
        M = columns(states, V, BD, c, V, BD, BV)
        dM = columns(dstates, V, BD, c, V, BD, BV)
        MM += tl.sum(M.to(tl.float32) * dM.to(tl.float32), axis=0)
        Dq = dot(rows(do + token * V, HG * V, n, c, V, C, BV), M, Dq, PRECISION)
        if INNOVATION:
            Dk = dot(rows(dv + token * V, HG * V, n, c, V, C, BV), M, Dk, PRECISION)
        Dkappa = dot(rows(innovations + token * V, HG * V, n, c, V, C, BV), dM, Dkappa, PRECISION)
    b = scalars(entry + begin * H + h, H, n, C)
    gt = scalars(g + begin * H + h, H, n, C)
    later = tl.arange(0, C)[:, None] > tl.arange(0, C)[None, :]
    left = tl.exp(tl.sum(tl.where(later, gt[:, None], 0.0), axis=0))
    Dq *= (scale * b)[:, None]
    Dkappa *= left[:, None]
    Q = rows(q + key * D, HK * D, n, d, D, C, BD)
    writes = rows(kappa + token * D, HG * D, n, d, D, C, BD)
    by_read = tl.sum(Dq * Q.to(tl.float32), axis=1)
    by_write = tl.sum(Dkappa * writes.to(tl.float32), axis=1)
    Dq = dot(columns(dreads + token * C, HG * C, n, 0, C, C, C), writes, Dq, PRECISION)
    Dkappa = dot(rows(dreads + token * C, HG * C, n, 0, C, C, C), Q, Dkappa, PRECISION)
    if INNOVATION:
        Dk *= -b[:, None]
        K = rows(k + key * D, HK * D, n, d, D, C, BD)
        by_read += tl.sum(Dk * K.to(tl.float32), axis=1)
        Dk = dot(columns(doverlap + token * C, HG * C, n, 0, C, C, C), writes, Dk, PRECISION)
        Dkappa = dot(rows(doverlap + token * C, HG * C, n, 0, C, C, C), K, Dkappa, PRECISION)
        put_rows(dk + token * D, Dk, HG * D, n, d, D, C, BD)
    put_rows(dq + token * D, Dq, HG * D, n, d, D, C, BD)
    put_rows(dkappa + token * D, Dkappa, HG * D, n, d, D, C, BD)
    put_scalars(read + token * ND + part, by_read, HG * ND, n, C)
    put_scalars(written + token * ND + part, by_write, HG * ND, n, C)
    b_end = tl.load(entry + begin * H + h + (n - 1) * H)
    tl.store(kept + block * ND + part, b_end * tl.sum(MM, axis=0))


@triton.jit
def _decays(
    inside, read, written, kept, start, stop, dg,
    H: tl.constexpr, G: tl.constexpr, C: tl.constexpr, ND: tl.constexpr,
):  # fmt: skip
    """Gradient of the log-decays from the sums that `_pairs` and `_vectors` leave."""
    chunk, h = tl.program_id(0), tl.program_id(1)
    begin = tl.load(start + chunk).to(tl.int64)
    n = (tl.load(stop + chunk) - begin).to(tl.int32)
    HG: tl.constexpr = H * G
    total = tl.zeros([C], tl.float32)
    reading = tl.zeros([C], tl.float32)
    writing = tl.zeros([C], tl.float32)
    keeping = 0.0
    for i in range(0, G):
        total += scalars(inside + begin * HG + h * G + i, HG, n, C)
    for i in range(0, G * ND):
        partial = h * G * ND + i
        reading += scalars(read + begin * HG * ND + partial, HG * ND, n, C)
        writing += scalars(written + begin * HG * ND + partial, HG * ND, n, C)
        keeping += tl.load(kept + tl.cast(chunk, tl.int64) * HG * ND + partial)
    t, r = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    total += tl.sum(tl.where(t >= r, reading[:, None], writing[:, None]), axis=0) + keeping
    put_scalars(dg + begin * H + h, total, H, n, C)


def backward(
    q: Tensor, k: Tensor, kappa: Tensor, g: Tensor, saved: Saved, do: Tensor, dfinal: Tensor, run: Pass
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, kappa, v, g and mean."""
    chunks, C = run.chunks, run.chunks.size
    (N, HK, D), (H, G, V) = k.shape, do.shape[1:]
    grid, launch = (chunks.count, H * G), {"num_warps": 4, "num_stages": 2}
    precision = {"PRECISION": run.precision, "INNOVATION": run.innovation}
    heads, tables = {"H": H, "G": G, "C": C}, (chunks.start, chunks.stop)
    dv, dstates, dmean = torch.empty_like(do), torch.empty_like(saved.states), torch.empty_like(dfinal)
    _carry_back[lambda meta: (triton.cdiv(V, meta["BV"]) * chunks.documents * H * G,)](
        q, k, saved.z, saved.readout, saved.entry, do, dfinal, *tables, chunks.first,
        dv, dstates, dmean, run.scale, **heads, HK=HK, D=D, V=V, **precision, ELEMENT=do.element_size(),
    )  # fmt: skip
    dreads, doverlap = torch.empty_like(saved.reads), torch.empty_like(saved.overlap)
    inside = g.new_empty(N, H, G)
    _pairs[grid](
        g, do, dv, saved.innovations, saved.reads, saved.overlap, *tables, dreads, doverlap, inside,
        run.scale, **heads, V=V, BV=min(64, triton.next_power_of_2(V)), **precision, **launch,
    )  # fmt: skip
    BD = min(D, 128 if do.element_size() == 2 else 64)
    parts = D // BD
    dq, dkappa = (torch.empty_like(kappa) for _ in range(2))
    dk = torch.empty_like(kappa) if run.innovation else None
    read, written = (g.new_empty(N, H, G, parts) for _ in range(2))
    kept = g.new_empty(chunks.count, H, G, parts)
    _vectors[parts * chunks.count, H * G](
        q, k, kappa, g, saved.entry, do, dv, saved.innovations, saved.states, dstates, dreads, doverlap,
        *tables, dq, dk, dkappa, read, written, kept, run.scale,
        **heads, HK=HK, D=D, V=V, BD=BD, **precision, ELEMENT=do.element_size(),
    )  # fmt: skip
    dg = torch.empty_like(g)
    _decays[chunks.count, H](inside, read, written, kept, *tables, dg, **heads, ND=parts, num_warps=2)
    return _shared(dq, HK), _shared(dk, HK) if dk is not None else torch.zeros_like(k), dkappa, dv, dg, dmean


def _shared(gradient: Tensor, HK: int) -> Tensor:
    """`[N,H,G,D] -> [N,HK,D]`, summed over the heads and groups that share a key head."""
    N, H, G, D = gradient.shape
    if H * G == HK:
        return gradient.view(N, HK, D)
    return gradient.view(N, HK, H * G // HK, D).sum(2)
