"""The dense gain pass, backward: `docs/filter.md` derives it.

One kernel prepares what each chunk needs, a chain carries the covariance's gradient from the last chunk to
the first, split over programs as forward, and two kernels finish the chunks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from regraft.ops.triton.blocks import (
    arrive,
    columns_of,
    dot_key,
    fresh_t,
    key_dot,
    keys,
    keys_t,
    put,
    put_columns,
    square,
    sum_of_shares,
    tile,
    tile_t,
    wait,
)
from regraft.ops.triton.chunks import Chunks
from regraft.ops.triton.linalg import accumulate, chunk_decay


@triton.jit
def _low(A, i):
    """Gradient of a symmetric matrix's lower triangle, from that of all of it."""
    both = A + tl.trans(A)
    return tl.where(i[:, None] > i[None, :], both, tl.where(i[:, None] == i[None, :], A, 0.0))


@triton.jit
def _prepare(
    k, g, obs, evidence, R, U, X, delta, dkappa, start, stop,
    Z, dR, dk, dA, dobs, dc,
    H: tl.constexpr, HK: tl.constexpr, G: tl.constexpr, D: tl.constexpr, C: tl.constexpr,
    BD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What a chunk's own write vectors ask for, before the gradient of the covariance after it is known."""
    chunk, hg = tl.program_id(0), tl.program_id(1)
    h = hg // G
    mu = tl.load(evidence + h)
    i = tl.arange(0, C)
    begin = tl.load(start + chunk).to(tl.int64)
    there = i < tl.load(stop + chunk) - begin
    gt = tl.load(g + begin * H + h + i * H, mask=there, other=0.0)
    r = tl.load(obs + begin * (H * G) + hg + i * (H * G), mask=there, other=1.0)
    _, between, left, _ = chunk_decay(gt, C)
    block = chunk * (H * G) + hg.to(tl.int64)
    Xc = tl.load(square(X + block * C * C, 0, 0, C, C, C))
    d = tl.load(delta + block * C + i)
    k += h // (H // HK) * D
    row: tl.constexpr = H * G * D
    off = hg * D

    s = tl.zeros([C], tl.float32)
    du = tl.zeros([C], tl.float32)
    dN = tl.zeros([C, C], tl.float32)
    KR = tl.zeros([C, C], tl.float32)
    for c in range(0, D, BD):
        u = tile(U + off + begin * row + c, i, there, row, BD)
        Kc = keys(k + begin * (HK * D) + c, i, there, HK * D, BD)
        Rc_t = tile_t(R + off + begin * row + c, i, there, row, BD)
        dkap = keys(dkappa + off + begin * row + c, i, there, row, BD)
        s += tl.sum(u * Kc.to(tl.float32), 1)
        du += tl.sum(u * dkap.to(tl.float32), 1)
        dN = key_dot(dkap, Rc_t, dN, PRECISION)
        KR = key_dot(Kc, Rc_t, KR, PRECISION)
    over = 1.0 / (r + s)
    dsum = -du * over * over  # gradient of r + s, the denominator of the gain
    dN = over[:, None] * dN + dsum[:, None] * KR
    dX = tl.where(i[:, None] > i[None, :], dN * between, 0.0)
    Q = tl.dot(dX, tl.trans(Xc), input_precision=PRECISION)
    Q = tl.where(i[:, None] > i[None, :], -Q / d[None, :], 0.0)
    dAc = tl.dot(tl.trans(Xc), tl.dot(Q, Xc, input_precision=PRECISION), input_precision=PRECISION)
    F = dX * Xc
    tl.store(dc + begin * (H * G) + hg + i * (H * G), tl.sum(F, 1) - tl.sum(F, 0), mask=there)
    tl.store(dobs + begin * (H * G) + hg + i * (H * G), dsum, mask=there)
    tl.store(square(dA + block * C * C, 0, 0, C, C, C), dAc)
    N_T = tl.trans(Xc * between)
    B_T = tl.trans(mu * _low(dAc, i) * between)
    X_T = tl.trans(Xc)
    for c in range(0, D, BD):
        u = tile(U + off + begin * row + c, i, there, row, BD)
        Kc = keys(k + begin * (HK * D) + c, i, there, HK * D, BD)
        dU = over[:, None] * tile(dkappa + off + begin * row + c, i, there, row, BD)
        dU += dsum[:, None] * Kc.to(tl.float32)
        dRc = dot_key(B_T, Kc, tl.dot(N_T, dU, input_precision=PRECISION), PRECISION)
        put(dR + off + begin * row + c, i, there, row, dRc, BD)
        Zc = tl.dot(X_T, (left / d)[:, None] * u, input_precision=PRECISION)
        put(Z + off + begin * row + c, i, there, row, Zc, BD)
        put(dk + off + begin * row + c, i, there, row, dsum[:, None] * u, BD)


@triton.jit
def _chain(
    k, g, evidence, Z, dR, entry, dfinal, start, stop, first,
    HG_, dcov, trace, kept, partial, counters,
    H: tl.constexpr, HK: tl.constexpr, G: tl.constexpr, D: tl.constexpr, C: tl.constexpr,
    BR: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Carry the covariance's gradient to the first chunk, leaving Z·gradient in every one."""
    NB: tl.constexpr = D // BD
    if NB == 1:
        group, part = tl.program_id(0), 0
    else:
        number = tl.atomic_add(counters, 1)
        group, part = number // NB, number % NB
    doc, hg = group // (H * G), group % (H * G)
    h = hg // G
    mu = tl.load(evidence + h)
    own = part * BD
    rows, cols = tl.arange(0, BR)[:, None], own + tl.arange(0, BD)[None, :]
    k += h // (H // HK) * D
    row: tl.constexpr = H * G * D
    Z += hg * D
    dR += hg * D
    HG_ += hg * D
    partial += (group * 2 * NB).to(tl.int64) * C * C
    dP = columns_of(dfinal + group.to(tl.int64) * D * D, own, D, BR, BD)
    i = tl.arange(0, C)
    last = tl.load(first + doc + 1) - 1
    for number in range(0, last + 1 - tl.load(first + doc)):
        chunk = last - number
        begin = tl.load(start + chunk).to(tl.int64)
        there = i < tl.load(stop + chunk) - begin
        gt = tl.load(g + begin * H + h + i * H, mask=there, other=0.0)
        b = tl.exp(tl.cumsum(gt, 0))
        b_end = tl.exp(tl.sum(gt, 0))
        block = chunk * (H * G) + hg.to(tl.int64)
        tr, GP = 0.0, 0.0
        ZG = tl.zeros([C, BD], tl.float32)
        for m in tl.static_range(D // BR):
            tr += tl.sum(tl.sum(tl.where(m * BR + rows == cols, dP[m], 0.0), 1), 0)
            P = tl.load(square(entry + block * D * D, m * BR, own, D, BR, BD))
            GP += tl.sum(tl.sum(dP[m] * P, 1), 0)
            Zm = tile(Z + begin * row + m * BR, i, there, row, BR)
            ZG = tl.dot(Zm, dP[m], ZG, input_precision=PRECISION)
        tl.store(trace + block * NB + part, tr)
        tl.store(kept + block * NB + part, GP)
        put(HG_ + begin * row + own, i, there, row, ZG, BD)
        # M = Z dP Z', symmetric as dP is
        M = tl.dot(ZG, tile_t(Z + begin * row + own, i, there, row, BD), input_precision=PRECISION)
        if NB > 1:
            # two buffers take turns: who writes the one again has met all others since they read it
            shares = partial + number % 2 * (NB * C * C)
            tl.store(square(shares + part * (C * C), 0, 0, C, C, C), M)
            arrive(counters + 1 + group)
            wait(counters + 1 + group, NB * (number + 1))
            M = sum_of_shares(shares, NB, C)
        K_own = keys(k + begin * (HK * D) + own, i, there, HK * D, BD)
        F = 0.5 * b[:, None] * tile(dR + begin * row + own, i, there, row, BD) - (mu * b_end) * ZG
        F = b[:, None] * dot_key(mu * mu * M * b[None, :], K_own, F, PRECISION)
        updated = []
        for m in tl.static_range(D // BR):
            Km = keys_t(k + begin * (HK * D) + m * BR, i, there, HK * D, BR)
            Gm = key_dot(Km, F, (b_end * b_end) * dP[m], PRECISION)
            Fm = 0.5 * b[None, :] * tile_t(dR + begin * row + m * BR, i, there, row, BR)
            Fm -= (mu * b_end) * fresh_t(HG_ + begin * row + m * BR, i, there, row, BR)
            Gm = dot_key(b[None, :] * Fm, K_own, Gm, PRECISION)
            updated = updated + [Gm]  # noqa: RUF005
        dP = updated
    put_columns(dcov + group.to(tl.int64) * D * D, dP, own, D, BR, BD)


@triton.jit
def _finish(
    k, g, process, evidence, R, HG, Z, dA, trace, kept, start, stop,
    dR, dk, dc, dg, dprocess, dobs_cov, dmu,
    H: tl.constexpr, HK: tl.constexpr, G: tl.constexpr, D: tl.constexpr, C: tl.constexpr,
    BD: tl.constexpr, NB: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients inside a chunk, all but the keys' through K P0, for which dR is left complete."""
    chunk, hg = tl.program_id(0), tl.program_id(1)
    h = hg // G
    mu = tl.load(evidence + h)
    i = tl.arange(0, C)
    begin = tl.load(start + chunk).to(tl.int64)
    there = i < tl.load(stop + chunk) - begin
    gt = tl.load(g + begin * H + h + i * H, mask=there, other=0.0)
    w = tl.load(process + begin * H + h + i * H, mask=there, other=0.0)
    b, between, left, b_end = chunk_decay(gt, C)
    n = accumulate(between, w)
    block = chunk * (H * G) + hg.to(tl.int64)
    k += h // (H // HK) * D
    row: tl.constexpr = H * G * D
    off = hg * D

    M = tl.zeros([C, C], tl.float32)
    KR = tl.zeros([C, C], tl.float32)
    HR = tl.zeros([C], tl.float32)
    for c in range(0, D, BD):
        Hc = tile(HG + off + begin * row + c, i, there, row, BD)
        Rc = tile(R + off + begin * row + c, i, there, row, BD)
        Kc = keys(k + begin * (HK * D) + c, i, there, HK * D, BD)
        Zc_t = tile_t(Z + off + begin * row + c, i, there, row, BD)
        M = tl.dot(Hc, Zc_t, M, input_precision=PRECISION)
        KR = key_dot(Kc, tile_t(R + off + begin * row + c, i, there, row, BD), KR, PRECISION)
        HR += tl.sum(Hc * Rc, 1)
    dAc = tl.load(square(dA + block * C * C, 0, 0, C, C, C)) + mu * M
    full = _low(dAc, i)
    diagonal = tl.sum(tl.where(i[:, None] == i[None, :], dAc, 0.0), 1)
    tl.store(dobs_cov + begin * (H * G) + hg + i * (H * G), diagonal, mask=there)
    F = full * between * KR
    tl.store(dmu + block, tl.sum(tl.sum(F, 1), 0) - tl.sum(HR * left, 0))
    F *= mu
    B = mu * full * between
    extra_T = tl.trans((mu * mu) * _low(M, i) * between)
    dn = tl.zeros([C], tl.float32)
    dbb = tl.zeros([C], tl.float32)
    for c in range(0, D, BD):
        Rc = tile(R + off + begin * row + c, i, there, row, BD)
        Kc = keys(k + begin * (HK * D) + c, i, there, HK * D, BD)
        dRc = dot_key(extra_T, Kc, tile(dR + off + begin * row + c, i, there, row, BD), PRECISION)
        dRc -= (2.0 * mu * left)[:, None] * tile(HG + off + begin * row + c, i, there, row, BD)
        Kf = Kc.to(tl.float32)
        dn += tl.sum(dRc * Kf, 1)
        dbb += tl.sum(dRc * (Rc - n[:, None] * Kf), 1)
        dKc = tile(dk + off + begin * row + c, i, there, row, BD) + n[:, None] * dRc
        dKc = tl.dot(B, Rc, dKc, input_precision=PRECISION)
        put(dk + off + begin * row + c, i, there, row, dKc, BD)
        put(dR + off + begin * row + c, i, there, row, (b * b)[:, None] * dRc, BD)
    tr = 0.0
    GP = 0.0
    for part in tl.static_range(NB):
        tr += tl.load(trace + block * NB + part)
        GP += tl.load(kept + block * NB + part)
    last = i == C - 1
    dn += tl.where(last, tr, 0.0)
    dw = tl.sum(between * between * dn[:, None], 0)
    dleft = -2.0 * mu * HR * left
    d = tl.load(dc + begin * (H * G) + hg + i * (H * G), mask=there, other=0.0)
    d += 2.0 * dbb + tl.sum(F, 1) - tl.sum(F, 0) - dleft + 2.0 * (dn * n - w * dw)
    d += tl.where(last, tl.sum(dleft, 0) + 2.0 * b_end * b_end * GP, 0.0)
    # the gradient of g_s is that of all sums c_t from s on
    suffix = tl.sum(tl.where(i[:, None] >= i[None, :], d[:, None], 0.0), 0)
    tl.store(dg + begin * (H * G) + hg + i * (H * G), suffix, mask=there)
    tl.store(dprocess + begin * (H * G) + hg + i * (H * G), dw, mask=there)


@triton.jit
def _keys(
    dW, entry, dk, start, stop, out,
    HG: tl.constexpr, D: tl.constexpr, C: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`dk + dW P0` in the dtype of `out`, a block of columns a program."""
    own, chunk, hg = tl.program_id(0) * BD, tl.program_id(1), tl.program_id(2)
    i = tl.arange(0, C)
    begin = tl.load(start + chunk).to(tl.int64)
    there = i < tl.load(stop + chunk) - begin
    P_at = entry + (chunk * HG + hg.to(tl.int64)) * D * D
    off = hg * D
    acc = tile(dk + off + begin * (HG * D) + own, i, there, HG * D, BD)
    for c in range(0, D, BD):
        # of a symmetric matrix, so that what is summed over lies together, as products in TF32 want it
        P = tl.trans(tl.load(square(P_at, own, c, D, BD, BD)))
        dWc = tile(dW + off + begin * (HG * D) + c, i, there, HG * D, BD)
        acc = tl.dot(dWc, P, acc, input_precision=PRECISION)
    put(out + off + begin * (HG * D) + own, i, there, HG * D, acc, BD)


def launch_of(D: int, heads: int, device: torch.device) -> dict[str, int]:
    """How a head's gradient is cut: BD columns a program, in blocks of BR rows.

    A program of four warps takes half a multiprocessor. While all of them find a place, narrower ones are
    faster; with more heads than that, those that do less twice.
    """
    gpu = device.type == "cuda"
    places = 2 * torch.cuda.get_device_properties(device).multi_processor_count if gpu else 1
    narrow = D >= 128 and heads * D // 32 <= places
    return {"BR": min(D, 64), "BD": 32 if narrow else min(D, 64), "num_warps": 4, "num_stages": 1}


def backward(
    saved: tuple[Tensor, ...], dkappa: Tensor, dfinal: Tensor, chunks: Chunks, precision: str
) -> tuple[Tensor, ...]:
    """Gradients of the tensors that `dense_gains` takes, in its order."""
    k, g, obs, _, process, evidence, entry, R, U, X, delta = saved
    (N, HK, D), (H, G), C = k.shape, obs.shape[1:], chunks.size
    shape = {"H": H, "HK": HK, "G": G, "D": D, "C": C, "PRECISION": precision}
    groups = chunks.documents * H * G
    launch = launch_of(D, groups, k.device)
    BD, parts = launch["BR"], D // launch["BD"]
    dkappa = dkappa.contiguous()
    dfinal = (0.5 * (dfinal + dfinal.mT)).contiguous()
    Z, dR, dk, HG = (torch.empty_like(U) for _ in range(4))
    dA = torch.empty_like(X)
    dobs, dobs_cov, dc, dg, dprocess = (torch.empty_like(obs) for _ in range(5))
    grid = (chunks.count, H * G)
    _prepare[grid](
        k, g, obs, evidence, R, U, X, delta, dkappa, chunks.start, chunks.stop,
        Z, dR, dk, dA, dobs, dc, **shape, BD=BD, num_warps=4, num_stages=2,
    )  # fmt: skip
    dcov = torch.empty_like(dfinal)
    trace, kept = (k.new_empty(chunks.count, H, G, parts, dtype=torch.float32) for _ in range(2))
    partial = k.new_empty(groups, 2, parts, C, C, dtype=torch.float32)
    counters = torch.zeros(groups + 1, dtype=torch.int32, device=k.device)
    _chain[(groups * parts,)](
        k, g, evidence, Z, dR, entry, dfinal, chunks.start, chunks.stop, chunks.first,
        HG, dcov, trace, kept, partial, counters, **shape, **launch,
    )  # fmt: skip
    dmu = k.new_empty(chunks.count, H, G, dtype=torch.float32)
    _finish[grid](
        k, g, process, evidence, R, HG, Z, dA, trace, kept, chunks.start, chunks.stop,
        dR, dk, dc, dg, dprocess, dobs_cov, dmu, **shape, BD=BD, NB=parts, num_warps=4, num_stages=1,
    )  # fmt: skip
    alone = H * G == HK  # heads and groups with the same keys add their gradients up in float32
    out = torch.empty_like(k) if alone else dk
    _keys[(D // BD, chunks.count, H * G)](
        dR, entry, dk, chunks.start, chunks.stop, out,
        HG=H * G, D=D, C=C, BD=BD, PRECISION=precision, num_warps=4, num_stages=1,
    )  # fmt: skip
    out = out.view(N, HK, -1, D)
    dk = out.squeeze(2) if alone else out.sum(2).to(k.dtype)
    return dk, dg.sum(-1), dobs, dobs_cov, dprocess.sum(-1), dmu.sum((0, 2)), dcov
