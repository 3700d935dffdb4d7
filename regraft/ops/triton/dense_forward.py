"""The dense gain pass, forward: a chain over the chunks that carries the covariance.

A head's covariance is split by columns over D/64 programs, which hold it in registers and meet once a chunk,
to sum their shares of S; the small factorisation every one of them does for itself.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from regraft.ops.triton.blocks import (
    arrive,
    columns_of,
    fresh_t,
    put,
    put_columns,
    square,
    sum_of_shares,
    tile,
    wait,
)
from regraft.ops.triton.chunks import Chunks
from regraft.ops.triton.linalg import accumulate, chunk_decay, ldl


@triton.jit(noinline=True)
def _factorise(
    shares, g, obs_cov, evidence, n, X, delta,
    H: tl.constexpr, HG: tl.constexpr, NB: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """X, delta and the k·u of a chunk of n tokens, from the shares of K R'.

    A function of its own, and results through memory: in line it would take the registers that hold the
    covariance.
    """
    mu = tl.load(evidence)
    i = tl.arange(0, C)
    gt = tl.load(g + i * H, mask=i < n, other=0.0)
    r = tl.load(obs_cov + i * HG, mask=i < n, other=1.0)
    _, between, _, _ = chunk_decay(gt, C)
    S = sum_of_shares(shares, NB, C) * between
    A = mu * (S + tl.trans(tl.where(i[:, None] > i[None, :], S, 0.0)))
    Xc, d = ldl(A + tl.where(i[:, None] == i[None, :], r[:, None], 0.0), C, PRECISION)
    tl.store(square(X, 0, 0, C, C, C), Xc)
    tl.store(delta + i, d)
    tl.store(delta + C + i, tl.sum(Xc * S, 1))  # of U K' = (X ∘ dec) R K', the diagonal


@triton.jit
def _chain(
    k, g, obs, obs_cov, process, evidence, cov, start, stop, first,
    kappa, final, entry, R, U, X, delta, partial, counters,
    H: tl.constexpr, HK: tl.constexpr, G: tl.constexpr, D: tl.constexpr, C: tl.constexpr,
    BR: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr, SAVE: tl.constexpr,
):  # fmt: skip
    NB: tl.constexpr = D // BD
    if NB == 1:
        group, part = tl.program_id(0), 0
    else:  # in the order of the tickets, so that a program never waits for one that has not begun
        number = tl.atomic_add(counters, 1)
        group, part = number // NB, number % NB
    doc, hg = group // (H * G), group % (H * G)
    h = hg // G
    mu = tl.load(evidence + h)
    own = part * BD
    i = tl.arange(0, C)
    rows, cols = tl.arange(0, BR)[:, None], own + tl.arange(0, BD)[None, :]
    k += h // (H // HK) * D
    kappa += hg * D
    R += hg * D
    U += hg * D
    partial += (group * NB).to(tl.int64) * C * C
    counters += 1 + 2 * group
    P = columns_of(cov + group.to(tl.int64) * D * D, own, D, BR, BD)
    n_met = 0
    for chunk in range(tl.load(first + doc), tl.load(first + doc + 1)):
        begin = tl.load(start + chunk).to(tl.int64)
        there = i < tl.load(stop + chunk) - begin
        gt = tl.load(g + begin * H + h + i * H, mask=there, other=0.0)
        w = tl.load(process + begin * H + h + i * H, mask=there, other=0.0)
        r = tl.load(obs + begin * (H * G) + hg + i * (H * G), mask=there, other=1.0)
        b, between, left, b_end = chunk_decay(gt, C)
        n = accumulate(between, w)
        n_end = tl.sum(tl.where(i == C - 1, n, 0.0), 0)
        block = chunk * (H * G) + hg.to(tl.int64)
        R_at = R + begin * (H * G * D)
        W = tl.zeros([C, BD], tl.float32)
        for m in tl.static_range(D // BR):
            Km = tile(k + begin * (HK * D) + m * BR, i, there, HK * D, BR)
            W = tl.dot(Km, P[m], W, input_precision=PRECISION)
        K_own = tile(k + begin * (HK * D) + own, i, there, HK * D, BD)
        R_own = (b * b)[:, None] * W + n[:, None] * K_own
        S = tl.dot(K_own, tl.trans(R_own), input_precision=PRECISION)
        if SAVE:
            put_columns(entry + block * D * D, P, own, D, BR, BD)
        put(R_at + own, i, there, H * G * D, R_own, BD)
        # one program of a head factorises for all; none writes its share again before it has X
        n_met += 1  # noqa: SIM113
        tl.store(square(partial + part * (C * C), 0, 0, C, C, C), S)
        arrive(counters)
        factor = block if SAVE else group.to(tl.int64)
        X_at, delta_at = X + factor * (C * C), delta + factor * (2 * C)
        if part == 0:
            wait(counters, NB * n_met)
            _factorise(
                partial, g + begin * H + h, obs_cov + begin * (H * G) + hg, evidence + h,
                tl.load(stop + chunk) - begin.to(tl.int32), X_at, delta_at,
                H=H, HG=H * G, NB=NB, C=C, PRECISION=PRECISION,
            )  # fmt: skip
            arrive(counters + 1)
        wait(counters + 1, n_met)
        Xc = tl.load(square(X_at, 0, 0, C, C, C), cache_modifier=".cg")
        d = tl.load(delta_at + i, cache_modifier=".cg")
        s = tl.load(delta_at + C + i, cache_modifier=".cg")
        U_own = tl.dot(Xc * between, R_own, input_precision=PRECISION)
        put(kappa + begin * (H * G * D) + own, i, there, H * G * D, U_own / (r + s)[:, None], BD)
        if SAVE:
            put(U + begin * (H * G * D) + own, i, there, H * G * D, U_own, BD)
        # P0 changes by U' diag(left² mu / d) U = R' Y, the right factor this program's own
        N_t = tl.load(X_at + i[None, :] * C + i[:, None], cache_modifier=".cg") * tl.trans(between)
        Y = tl.dot(N_t, (left * left * mu / d)[:, None] * U_own, input_precision=PRECISION)
        keep = b_end * b_end
        updated = []
        for m in tl.static_range(D // BR):
            Rm = fresh_t(R_at + m * BR, i, there, H * G * D, BR)
            Pm = keep * P[m] - tl.dot(Rm, Y, input_precision=PRECISION)
            updated = updated + [Pm + tl.where(m * BR + rows == cols, n_end, 0.0)]  # noqa: RUF005
        P = updated
    put_columns(final + group.to(tl.int64) * D * D, P, own, D, BR, BD)


def launch_of(D: int, heads: int, device: torch.device) -> dict[str, int]:
    """How a head's covariance is cut: BD columns a program, in blocks of BR rows.

    A program of four warps takes half a multiprocessor. While all of them find a place, narrower ones are
    faster; with more heads than that, those that do less twice.
    """
    places = (
        2 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    )
    narrow = D >= 128 and heads * D // 32 <= places
    return {"BR": min(D, 64), "BD": 32 if narrow else min(D, 64), "num_warps": 4, "num_stages": 1}


def forward(
    k: Tensor, g: Tensor, obs: Tensor, obs_cov: Tensor, process: Tensor, evidence: Tensor, cov: Tensor,
    chunks: Chunks, precision: str, dtype: torch.dtype, save: bool,
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:  # fmt: skip
    """Write vectors, final covariance, and what `backward` takes if `save`; arguments of `dense_gains`."""
    (N, HK, D), (H, G), C = k.shape, obs.shape[1:], chunks.size
    groups = chunks.documents * H * G
    launch = launch_of(D, groups, k.device)
    parts = D // launch["BD"]

    def new(*shape: int) -> Tensor:
        return k.new_empty(shape, dtype=torch.float32)

    kappa, final, R = k.new_empty(N, H, G, D, dtype=dtype), torch.empty_like(cov), new(N, H, G, D)
    entry = new(*((chunks.count, H, G, D, D) if save else (0,)))
    factors = (chunks.count, H, G) if save else (groups,)
    X, delta = new(*factors, C, C), new(*factors, 2, C)  # with k·u
    U = new(*((N, H, G, D) if save else (0,)))
    partial = new(groups, parts, C, C)
    counters = torch.zeros(2 * groups + 1, dtype=torch.int32, device=k.device)
    _chain[(groups * parts,)](
        k, g, obs, obs_cov, process, evidence, cov, chunks.start, chunks.stop, chunks.first,
        kappa, final, entry, R, U, X, delta, partial, counters,
        H=H, HK=HK, G=G, D=D, C=C, PRECISION=precision, SAVE=save, **launch,
    )  # fmt: skip
    return kappa, final, (entry, R, U, X, delta)
