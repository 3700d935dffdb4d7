"""The gain pass of a dense covariance: `docs/filter.md` derives both directions, `gains.py` is it in torch.

What is sequential is kept small. Forward, a chain over the chunks carries the covariance. Backward, one
kernel prepares what each chunk needs, a second chain carries the covariance's gradient, and two kernels
finish the chunks. Along a chain a head's covariance is split by columns over D/64 programs, which hold it in
registers and meet twice a chunk; forward, one more program factorises. Names follow `docs/filter.md`: K keys,
`R = b² K P0 + n K`, `A = L Δ Lᵀ`, `X = L⁻¹`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from regraft.ops.triton.chunks import Chunks
from regraft.ops.triton.linalg import accumulate, arrive, chunk_decay, ldl, wait


@triton.jit
def _tile(at, i, there, width, BD: tl.constexpr):
    """`[C,BD]` in float32 from rows of `width` numbers; `at` is the first of them."""
    # 32-bit offsets from one address: 64-bit addresses of a whole tile take as many registers as two tiles
    return tl.load(at + (i[:, None] * width + tl.arange(0, BD)[None, :]), mask=there[:, None], other=0.0).to(
        tl.float32
    )


@triton.jit
def _fresh(at, i, there, width, BD: tl.constexpr):
    """`_tile` of what another program has just written: past the cache of this multiprocessor."""
    at += i[:, None] * width + tl.arange(0, BD)[None, :]
    return tl.load(at, mask=there[:, None], other=0.0, cache_modifier=".cg")


@triton.jit
def _put(at, i, there, width, x, BD: tl.constexpr):
    """The counterpart of `_tile`."""
    tl.store(
        at + (i[:, None] * width + tl.arange(0, BD)[None, :]), x.to(at.dtype.element_ty), mask=there[:, None]
    )


@triton.jit
def _square(base, row, col, width, BR: tl.constexpr, BC: tl.constexpr):
    """Addresses of the block `[BR,BC]` at (row, col) of a matrix of `width` columns."""
    return base + (row + tl.arange(0, BR)[:, None]) * width + col + tl.arange(0, BC)[None, :]


@triton.jit
def _innovations(S, between, r_cov, mu, C: tl.constexpr):
    """`mu S + diag(r2)`, S given by its lower triangle before decay."""
    i = tl.arange(0, C)
    S *= between
    S += tl.trans(tl.where(i[:, None] > i[None, :], S, 0.0))
    return mu * S + tl.where(i[:, None] == i[None, :], r_cov[:, None], 0.0)


@triton.jit
def _factorise(
    g, obs_cov, evidence, start, stop, first, X, delta, partial, counters, group,
    H: tl.constexpr, G: tl.constexpr, C: tl.constexpr, NB: tl.constexpr,
    PRECISION: tl.constexpr, SAVE: tl.constexpr,
):  # fmt: skip
    """The factorisations of the forward chain, in a program that holds no covariance."""
    doc, hg = group // (H * G), group % (H * G)
    h = hg // G
    mu = tl.load(evidence + h)
    i = tl.arange(0, C)
    at = partial + (group * NB).to(tl.int64) * C * C
    n_met = 0
    for chunk in range(tl.load(first + doc), tl.load(first + doc + 1)):
        begin = tl.load(start + chunk).to(tl.int64)
        there = i < tl.load(stop + chunk) - begin
        gt = tl.load(g + begin * H + h + i * H, mask=there, other=0.0)
        r_cov = tl.load(obs_cov + begin * (H * G) + hg + i * (H * G), mask=there, other=1.0)
        _, between, _, _ = chunk_decay(gt, C)
        n_met += 1  # noqa: SIM113
        wait(counters + 1 + 3 * group, NB * n_met)
        S = tl.load(_square(at, 0, 0, C, C, C), cache_modifier=".cg")
        for other in tl.static_range(1, NB):
            S += tl.load(_square(at + other * C * C, 0, 0, C, C, C), cache_modifier=".cg")
        Xc, d = ldl(_innovations(S, between, r_cov, mu, C), C, PRECISION)
        factor = chunk * (H * G) + hg.to(tl.int64) if SAVE else group.to(tl.int64)
        tl.store(_square(X + factor * C * C, 0, 0, C, C, C), Xc)
        tl.store(delta + factor * C + i, d)
        arrive(counters + 2 + 3 * group)


@triton.jit
def _forward_chain(
    k, g, obs, obs_cov, process, evidence, cov, start, stop, first,
    kappa, final, entry, R, U, X, delta, partial, counters,
    H: tl.constexpr, HK: tl.constexpr, G: tl.constexpr, D: tl.constexpr, C: tl.constexpr,
    BD: tl.constexpr, PRECISION: tl.constexpr, SAVE: tl.constexpr,
):  # fmt: skip
    NB: tl.constexpr = D // BD
    if NB == 1:
        group, part = tl.program_id(0), 0
    else:  # in the order of the tickets, so that a program never waits for one that has not begun
        number = tl.atomic_add(counters, 1)
        group, part = number // (NB + 1), number % (NB + 1)
    if part == NB:
        _factorise(
            g, obs_cov, evidence, start, stop, first, X, delta, partial, counters, group,
            H=H, G=G, C=C, NB=NB, PRECISION=PRECISION, SAVE=SAVE,
        )  # fmt: skip
        return
    doc, hg = group // (H * G), group % (H * G)
    h = hg // G
    mu = tl.load(evidence + h)
    own = part * BD
    i = tl.arange(0, C)
    panel_rows, panel_cols = tl.arange(0, BD)[:, None], own + tl.arange(0, BD)[None, :]
    k += h // (H // HK) * D
    kappa += hg * D
    cov += group.to(tl.int64) * D * D
    P0 = tl.load(_square(cov, 0, own, D, BD, BD))
    if NB > 1:
        P1 = tl.load(_square(cov, BD, own, D, BD, BD))
    if NB > 2:
        P2 = tl.load(_square(cov, 2 * BD, own, D, BD, BD))
        P3 = tl.load(_square(cov, 3 * BD, own, D, BD, BD))
    n_met = 0
    for chunk in range(tl.load(first + doc), tl.load(first + doc + 1)):
        begin = tl.load(start + chunk).to(tl.int64)
        there = i < tl.load(stop + chunk) - begin
        gt = tl.load(g + begin * H + h + i * H, mask=there, other=0.0)
        w = tl.load(process + begin * H + h + i * H, mask=there, other=0.0)
        r = tl.load(obs + begin * (H * G) + hg + i * (H * G), mask=there, other=1.0)
        r_cov = tl.load(obs_cov + begin * (H * G) + hg + i * (H * G), mask=there, other=1.0)
        b, between, left, b_end = chunk_decay(gt, C)
        n = accumulate(between, w)
        n_end = tl.sum(tl.where(i == C - 1, n, 0.0), 0)
        block = chunk * (H * G) + hg.to(tl.int64)
        W = tl.dot(_tile(k + begin * (HK * D), i, there, HK * D, BD), P0, input_precision=PRECISION)
        if NB > 1:
            W += tl.dot(_tile(k + begin * (HK * D) + BD, i, there, HK * D, BD), P1, input_precision=PRECISION)
        if NB > 2:
            W += tl.dot(
                _tile(k + begin * (HK * D) + 2 * BD, i, there, HK * D, BD), P2, input_precision=PRECISION
            )
            W += tl.dot(
                _tile(k + begin * (HK * D) + 3 * BD, i, there, HK * D, BD), P3, input_precision=PRECISION
            )
        K_own = _tile(k + begin * (HK * D) + own, i, there, HK * D, BD)
        R_own = (b * b)[:, None] * W + n[:, None] * K_own
        S = tl.dot(K_own, tl.trans(R_own), input_precision=PRECISION)
        if NB > 1:
            tl.store(_square(partial + (group * NB + part).to(tl.int64) * C * C, 0, 0, C, C, C), S)
            arrive(counters + 1 + 3 * group)
        if SAVE:  # while another program factorises
            at = entry + block * D * D
            tl.store(_square(at, 0, own, D, BD, BD), P0)
            if NB > 1:
                tl.store(_square(at, BD, own, D, BD, BD), P1)
            if NB > 2:
                tl.store(_square(at, 2 * BD, own, D, BD, BD), P2)
                tl.store(_square(at, 3 * BD, own, D, BD, BD), P3)
            _put(R + hg * D + begin * (H * G * D) + own, i, there, H * G * D, R_own, BD)
        n_met += 1  # noqa: SIM113
        if NB > 1:
            wait(counters + 2 + 3 * group, n_met)
            factor = block if SAVE else group.to(tl.int64)
            Xc = tl.load(_square(X + factor * C * C, 0, 0, C, C, C), cache_modifier=".cg")
            d = tl.load(delta + factor * C + i, cache_modifier=".cg")
        else:
            Xc, d = ldl(_innovations(S, between, r_cov, mu, C), C, PRECISION)
            if SAVE:
                tl.store(_square(X + block * C * C, 0, 0, C, C, C), Xc)
                tl.store(delta + block * C + i, d)
        U_own = tl.dot(Xc * between, R_own, input_precision=PRECISION)
        _put(U + hg * D + begin * (H * G * D) + own, i, there, H * G * D, U_own, BD)
        keep = b_end * b_end
        E_own = (left * mu / d)[:, None] * U_own
        if NB == 1:
            s = tl.sum(U_own * K_own, 1)
            P0 = keep * P0 - tl.dot(tl.trans(left[:, None] * U_own), E_own, input_precision=PRECISION)
        else:
            arrive(counters + 3 + 3 * group)
            wait(counters + 3 + 3 * group, NB * n_met)
            u = _fresh(U + hg * D + begin * (H * G * D), i, there, H * G * D, BD)
            s = tl.sum(u * _tile(k + begin * (HK * D), i, there, HK * D, BD), 1)
            P0 = keep * P0 - tl.dot(tl.trans(left[:, None] * u), E_own, input_precision=PRECISION)
            u = _fresh(U + hg * D + begin * (H * G * D) + BD, i, there, H * G * D, BD)
            s += tl.sum(u * _tile(k + begin * (HK * D) + BD, i, there, HK * D, BD), 1)
            P1 = keep * P1 - tl.dot(tl.trans(left[:, None] * u), E_own, input_precision=PRECISION)
            if NB > 2:
                u = _fresh(U + hg * D + begin * (H * G * D) + 2 * BD, i, there, H * G * D, BD)
                s += tl.sum(u * _tile(k + begin * (HK * D) + 2 * BD, i, there, HK * D, BD), 1)
                P2 = keep * P2 - tl.dot(tl.trans(left[:, None] * u), E_own, input_precision=PRECISION)
                u = _fresh(U + hg * D + begin * (H * G * D) + 3 * BD, i, there, H * G * D, BD)
                s += tl.sum(u * _tile(k + begin * (HK * D) + 3 * BD, i, there, HK * D, BD), 1)
                P3 = keep * P3 - tl.dot(tl.trans(left[:, None] * u), E_own, input_precision=PRECISION)
        _put(kappa + begin * (H * G * D) + own, i, there, H * G * D, U_own / (r + s)[:, None], BD)
        P0 += tl.where(panel_rows == panel_cols, n_end, 0.0)
        if NB > 1:
            P1 += tl.where(BD + panel_rows == panel_cols, n_end, 0.0)
        if NB > 2:
            P2 += tl.where(2 * BD + panel_rows == panel_cols, n_end, 0.0)
            P3 += tl.where(3 * BD + panel_rows == panel_cols, n_end, 0.0)
    final += group.to(tl.int64) * D * D
    tl.store(_square(final, 0, own, D, BD, BD), P0)
    if NB > 1:
        tl.store(_square(final, BD, own, D, BD, BD), P1)
    if NB > 2:
        tl.store(_square(final, 2 * BD, own, D, BD, BD), P2)
        tl.store(_square(final, 3 * BD, own, D, BD, BD), P3)


@triton.jit
def _low(A, i):
    """Gradient of a symmetric matrix's lower triangle, from that of all of it."""
    both = A + tl.trans(A)
    return tl.where(i[:, None] > i[None, :], both, tl.where(i[:, None] == i[None, :], A, 0.0))


@triton.jit
def _backward_prepare(
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
    Xc = tl.load(_square(X + block * C * C, 0, 0, C, C, C))
    d = tl.load(delta + block * C + i)
    k += h // (H // HK) * D
    row: tl.constexpr = H * G * D
    off = hg * D

    s = tl.zeros([C], tl.float32)
    du = tl.zeros([C], tl.float32)
    dN = tl.zeros([C, C], tl.float32)
    KR = tl.zeros([C, C], tl.float32)
    for c in range(0, D, BD):
        u = _tile(U + off + begin * row + c, i, there, row, BD)
        Kc = _tile(k + begin * (HK * D) + c, i, there, HK * D, BD)
        Rc_T = tl.trans(_tile(R + off + begin * row + c, i, there, row, BD))
        dkap = _tile(dkappa + off + begin * row + c, i, there, row, BD)
        s += tl.sum(u * Kc, 1)
        du += tl.sum(u * dkap, 1)
        dN += tl.dot(dkap, Rc_T, input_precision=PRECISION)
        KR += tl.dot(Kc, Rc_T, input_precision=PRECISION)
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
    tl.store(_square(dA + block * C * C, 0, 0, C, C, C), dAc)
    N_T = tl.trans(Xc * between)
    B_T = tl.trans(mu * _low(dAc, i) * between)
    X_T = tl.trans(Xc)
    for c in range(0, D, BD):
        u = _tile(U + off + begin * row + c, i, there, row, BD)
        Kc = _tile(k + begin * (HK * D) + c, i, there, HK * D, BD)
        dU = over[:, None] * _tile(dkappa + off + begin * row + c, i, there, row, BD) + dsum[:, None] * Kc
        dRc = tl.dot(N_T, dU, input_precision=PRECISION) + tl.dot(B_T, Kc, input_precision=PRECISION)
        _put(dR + off + begin * row + c, i, there, row, dRc, BD)
        _put(
            Z + off + begin * row + c,
            i,
            there,
            row,
            tl.dot(X_T, (left / d)[:, None] * u, input_precision=PRECISION),
            BD,
        )
        _put(dk + off + begin * row + c, i, there, row, dsum[:, None] * u, BD)


@triton.jit
def _backward_chain(
    k, g, evidence, Z, dR, entry, dfinal, start, stop, first,
    HG_, dcov, trace, kept, F, partial, counters,
    H: tl.constexpr, HK: tl.constexpr, G: tl.constexpr, D: tl.constexpr, C: tl.constexpr,
    BD: tl.constexpr, PRECISION: tl.constexpr,
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
    rows, cols = tl.arange(0, BD)[:, None], own + tl.arange(0, BD)[None, :]
    k += h // (H // HK) * D
    row: tl.constexpr = H * G * D
    off = hg * D
    dfinal += group.to(tl.int64) * D * D
    G0 = tl.load(_square(dfinal, 0, own, D, BD, BD))
    if NB > 1:
        G1 = tl.load(_square(dfinal, BD, own, D, BD, BD))
    if NB > 2:
        G2 = tl.load(_square(dfinal, 2 * BD, own, D, BD, BD))
        G3 = tl.load(_square(dfinal, 3 * BD, own, D, BD, BD))
    F += group.to(tl.int64) * C * D
    i = tl.arange(0, C)
    n_met = 0
    last = tl.load(first + doc + 1) - 1
    for number in range(0, last + 1 - tl.load(first + doc)):
        chunk = last - number
        begin = tl.load(start + chunk).to(tl.int64)
        there = i < tl.load(stop + chunk) - begin
        gt = tl.load(g + begin * H + h + i * H, mask=there, other=0.0)
        c = tl.cumsum(gt, 0)
        b = tl.exp(c)
        b_end = tl.exp(tl.sum(gt, 0))
        block = chunk * (H * G) + hg.to(tl.int64)
        P_at = entry + block * D * D
        tr = tl.sum(tl.sum(tl.where(rows == cols, G0, 0.0), 1), 0)
        GP = tl.sum(tl.sum(G0 * tl.load(_square(P_at, 0, own, D, BD, BD)), 1), 0)
        HG = tl.dot(_tile(Z + off + begin * row, i, there, row, BD), G0, input_precision=PRECISION)
        if NB > 1:
            tr += tl.sum(tl.sum(tl.where(BD + rows == cols, G1, 0.0), 1), 0)
            GP += tl.sum(tl.sum(G1 * tl.load(_square(P_at, BD, own, D, BD, BD)), 1), 0)
            HG += tl.dot(_tile(Z + off + begin * row + BD, i, there, row, BD), G1, input_precision=PRECISION)
        if NB > 2:
            tr += tl.sum(tl.sum(tl.where(2 * BD + rows == cols, G2, 0.0), 1), 0)
            GP += tl.sum(tl.sum(G2 * tl.load(_square(P_at, 2 * BD, own, D, BD, BD)), 1), 0)
            HG += tl.dot(
                _tile(Z + off + begin * row + 2 * BD, i, there, row, BD), G2, input_precision=PRECISION
            )
            tr += tl.sum(tl.sum(tl.where(3 * BD + rows == cols, G3, 0.0), 1), 0)
            GP += tl.sum(tl.sum(G3 * tl.load(_square(P_at, 3 * BD, own, D, BD, BD)), 1), 0)
            HG += tl.dot(
                _tile(Z + off + begin * row + 3 * BD, i, there, row, BD), G3, input_precision=PRECISION
            )
        tl.store(trace + block * NB + part, tr)
        tl.store(kept + block * NB + part, GP)
        _put(HG_ + off + begin * row + own, i, there, row, HG, BD)
        Z_own = _tile(Z + off + begin * row + own, i, there, row, BD)
        M = tl.dot(HG, tl.trans(Z_own), input_precision=PRECISION)
        if NB > 1:
            at = partial + group.to(tl.int64) * NB * C * C
            tl.store(_square(at + part * C * C, 0, 0, C, C, C), M)
            arrive(counters + 1 + 2 * group)
            n_met += NB
            wait(counters + 1 + 2 * group, n_met)
            M = tl.load(_square(at, 0, 0, C, C, C), cache_modifier=".cg")
            for other in tl.static_range(1, NB):
                M += tl.load(_square(at + other * C * C, 0, 0, C, C, C), cache_modifier=".cg")
        K_own = b[:, None] * _tile(k + begin * (HK * D) + own, i, there, HK * D, BD)
        F_own = 0.5 * b[:, None] * _tile(dR + off + begin * row + own, i, there, row, BD) - (mu * b_end) * HG
        F_own += tl.dot((0.5 * mu * mu) * M, K_own, input_precision=PRECISION)
        keep = b_end * b_end
        if NB == 1:
            step = tl.dot(tl.trans(K_own), F_own, input_precision=PRECISION)
            G0 = keep * G0 + step + tl.trans(step)
        else:
            _put(F + own, i, i < C, D, F_own, BD)
            arrive(counters + 2 + 2 * group)
            wait(counters + 2 + 2 * group, n_met)
            f = tl.load(_square(F, 0, 0, D, C, BD), cache_modifier=".cg")
            Kb = b[:, None] * _tile(k + begin * (HK * D), i, there, HK * D, BD)
            G0 = keep * G0 + tl.dot(tl.trans(Kb), F_own, input_precision=PRECISION)
            G0 += tl.dot(tl.trans(f), K_own, input_precision=PRECISION)
            f = tl.load(_square(F, 0, BD, D, C, BD), cache_modifier=".cg")
            Kb = b[:, None] * _tile(k + begin * (HK * D) + BD, i, there, HK * D, BD)
            G1 = keep * G1 + tl.dot(tl.trans(Kb), F_own, input_precision=PRECISION)
            G1 += tl.dot(tl.trans(f), K_own, input_precision=PRECISION)
            if NB > 2:
                f = tl.load(_square(F, 0, 2 * BD, D, C, BD), cache_modifier=".cg")
                Kb = b[:, None] * _tile(k + begin * (HK * D) + 2 * BD, i, there, HK * D, BD)
                G2 = keep * G2 + tl.dot(tl.trans(Kb), F_own, input_precision=PRECISION)
                G2 += tl.dot(tl.trans(f), K_own, input_precision=PRECISION)
                f = tl.load(_square(F, 0, 3 * BD, D, C, BD), cache_modifier=".cg")
                Kb = b[:, None] * _tile(k + begin * (HK * D) + 3 * BD, i, there, HK * D, BD)
                G3 = keep * G3 + tl.dot(tl.trans(Kb), F_own, input_precision=PRECISION)
                G3 += tl.dot(tl.trans(f), K_own, input_precision=PRECISION)
    dcov += group.to(tl.int64) * D * D
    tl.store(_square(dcov, 0, own, D, BD, BD), G0)
    if NB > 1:
        tl.store(_square(dcov, BD, own, D, BD, BD), G1)
    if NB > 2:
        tl.store(_square(dcov, 2 * BD, own, D, BD, BD), G2)
        tl.store(_square(dcov, 3 * BD, own, D, BD, BD), G3)


@triton.jit
def _backward_finish(
    k, g, process, evidence, R, HG, Z, dA, trace, kept, start, stop,
    dR, dk, dc, dg, dprocess, dobs_cov, dmu,
    H: tl.constexpr, HK: tl.constexpr, G: tl.constexpr, D: tl.constexpr, C: tl.constexpr,
    BD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients inside a chunk, all but the keys' through K P0, for which dR is left complete."""
    NB: tl.constexpr = D // BD
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
        Hc = _tile(HG + off + begin * row + c, i, there, row, BD)
        Rc = _tile(R + off + begin * row + c, i, there, row, BD)
        Kc = _tile(k + begin * (HK * D) + c, i, there, HK * D, BD)
        M += tl.dot(
            Hc, tl.trans(_tile(Z + off + begin * row + c, i, there, row, BD)), input_precision=PRECISION
        )
        KR += tl.dot(Kc, tl.trans(Rc), input_precision=PRECISION)
        HR += tl.sum(Hc * Rc, 1)
    dAc = tl.load(_square(dA + block * C * C, 0, 0, C, C, C)) + mu * M
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
        Rc = _tile(R + off + begin * row + c, i, there, row, BD)
        Kc = _tile(k + begin * (HK * D) + c, i, there, HK * D, BD)
        dRc = _tile(dR + off + begin * row + c, i, there, row, BD)
        dRc += tl.dot(extra_T, Kc, input_precision=PRECISION)
        dRc -= (2.0 * mu * left)[:, None] * _tile(HG + off + begin * row + c, i, there, row, BD)
        dn += tl.sum(dRc * Kc, 1)
        dbb += tl.sum(dRc * (Rc - n[:, None] * Kc), 1)
        dKc = _tile(dk + off + begin * row + c, i, there, row, BD) + n[:, None] * dRc
        dKc += tl.dot(B, Rc, input_precision=PRECISION)
        _put(dk + off + begin * row + c, i, there, row, dKc, BD)
        _put(dR + off + begin * row + c, i, there, row, (b * b)[:, None] * dRc, BD)
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
def _backward_keys(
    dW, entry, dk, start, stop,
    HG: tl.constexpr, D: tl.constexpr, C: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`dk += dW P0`, a block of columns a program."""
    own, chunk, hg = tl.program_id(0) * BD, tl.program_id(1), tl.program_id(2)
    i = tl.arange(0, C)
    begin = tl.load(start + chunk).to(tl.int64)
    there = i < tl.load(stop + chunk) - begin
    P_at = entry + (chunk * HG + hg.to(tl.int64)) * D * D
    off = hg * D
    acc = _tile(dk + off + begin * (HG * D) + own, i, there, HG * D, BD)
    for c in range(0, D, BD):
        P = tl.load(_square(P_at, c, own, D, BD, BD))
        acc += tl.dot(
            _tile(dW + off + begin * (HG * D) + c, i, there, HG * D, BD), P, input_precision=PRECISION
        )
    _put(dk + off + begin * (HG * D) + own, i, there, HG * D, acc, BD)


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
        precision: of matrix products, as Triton names it: `tf32x3`, `tf32` or `ieee`.
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
        kappa, final, saved = _forward(
            k, g, obs, obs_cov, process, evidence, cov, chunks, precision, dtype, save
        )
        ctx.chunks, ctx.precision = chunks, precision
        if save:
            ctx.save_for_backward(*inputs[:6], *saved)
        return kappa, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dkappa: Tensor, dfinal: Tensor) -> tuple[Tensor | None, ...]:
        grads = _backward(ctx.saved_tensors, dkappa, dfinal, ctx.chunks, ctx.precision)
        return (*grads, None, None, None)


def _launch(D: int) -> dict[str, int]:
    return {"BD": min(D, 64), "num_warps": 4 if D <= 64 else 8, "num_stages": 1}


def _forward(
    k: Tensor, g: Tensor, obs: Tensor, obs_cov: Tensor, process: Tensor, evidence: Tensor, cov: Tensor,
    chunks: Chunks, precision: str, dtype: torch.dtype, save: bool,
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:  # fmt: skip
    (N, HK, D), (H, G), C = k.shape, obs.shape[1:], chunks.size
    launch = _launch(D)
    parts, groups = D // launch["BD"], chunks.documents * H * G

    def new(*shape: int) -> Tensor:
        return k.new_empty(shape, dtype=torch.float32)

    kappa, final, U = k.new_empty(N, H, G, D, dtype=dtype), torch.empty_like(cov), new(N, H, G, D)
    entry = new(*((chunks.count, H, G, D, D) if save else (0,)))
    R = new(*((N, H, G, D) if save else (0,)))
    factors = (chunks.count, H, G) if save else (groups,)
    X, delta = new(*factors, C, C), new(*factors, C)
    partial = new(groups, parts, C, C)
    counters = torch.zeros(3 * groups + 1, dtype=torch.int32, device=k.device)
    # beside those that hold the covariance, one program factorises
    _forward_chain[(groups * (parts + 1 if parts > 1 else 1),)](
        k, g, obs, obs_cov, process, evidence, cov, chunks.start, chunks.stop, chunks.first,
        kappa, final, entry, R, U, X, delta, partial, counters,
        H=H, HK=HK, G=G, D=D, C=C, PRECISION=precision, SAVE=save, **launch,
    )  # fmt: skip
    return kappa, final, (entry, R, U, X, delta)


def _backward(
    saved: tuple[Tensor, ...], dkappa: Tensor, dfinal: Tensor, chunks: Chunks, precision: str
) -> tuple[Tensor, ...]:
    k, g, obs, _, process, evidence, entry, R, U, X, delta = saved
    (N, HK, D), (H, G), C = k.shape, obs.shape[1:], chunks.size
    shape = {"H": H, "HK": HK, "G": G, "D": D, "C": C, "PRECISION": precision}
    launch = _launch(D)
    BD = launch["BD"]
    parts, groups = D // BD, chunks.documents * H * G
    dkappa = dkappa.contiguous()
    dfinal = (0.5 * (dfinal + dfinal.mT)).contiguous()
    Z, dR, dk, HG = (torch.empty_like(U) for _ in range(4))
    dA = torch.empty_like(X)
    dobs, dobs_cov, dc, dg, dprocess = (torch.empty_like(obs) for _ in range(5))
    grid = (chunks.count, H * G)
    _backward_prepare[grid](
        k, g, obs, evidence, R, U, X, delta, dkappa, chunks.start, chunks.stop,
        Z, dR, dk, dA, dobs, dc, **shape, BD=BD, num_warps=4, num_stages=1,
    )  # fmt: skip
    dcov = torch.empty_like(dfinal)
    trace, kept = (k.new_empty(chunks.count, H, G, parts, dtype=torch.float32) for _ in range(2))
    F = k.new_empty(groups, C, D, dtype=torch.float32)
    partial = k.new_empty(groups, parts, C, C, dtype=torch.float32)
    counters = torch.zeros(2 * groups + 1, dtype=torch.int32, device=k.device)
    _backward_chain[(groups * parts,)](
        k, g, evidence, Z, dR, entry, dfinal, chunks.start, chunks.stop, chunks.first,
        HG, dcov, trace, kept, F, partial, counters, **shape, **launch,
    )  # fmt: skip
    dmu = k.new_empty(chunks.count, H, G, dtype=torch.float32)
    _backward_finish[grid](
        k, g, process, evidence, R, HG, Z, dA, trace, kept, chunks.start, chunks.stop,
        dR, dk, dc, dg, dprocess, dobs_cov, dmu, **shape, BD=BD, num_warps=4, num_stages=1,
    )  # fmt: skip
    _backward_keys[(parts, chunks.count, H * G)](
        dR, entry, dk, chunks.start, chunks.stop,
        HG=H * G, D=D, C=C, BD=BD, PRECISION=precision, num_warps=4, num_stages=2,
    )  # fmt: skip
    dk = dk.view(N, HK, -1, D).sum(2).to(k.dtype)
    return dk, dg.sum(-1), dobs, dobs_cov, dprocess.sum(-1), dmu.sum((0, 2)), dcov
