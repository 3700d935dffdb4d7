"""The dense gain pass, forward: a chain over the chunks that carries the covariance.

A head's covariance is split by columns over D/64 programs, which hold it in registers. Once a chunk they
leave their shares of S to the first of them, which factorises, and wait for what it makes of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from regraft.ops.triton.blocks import (
    arrive,
    columns_of,
    exact_dot,
    fresh_t,
    key_dot,
    keys,
    put,
    put_columns,
    square,
    sum_of_shares,
    wait,
)
from regraft.ops.triton.chunks import Chunks
from regraft.ops.triton.linalg import accumulate, chunk_decay, ldl


@triton.jit
def _decays(
    g, process, start, stop, squared, noise,
    H: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """`b²` and n of every token: what is left of the covariance before its chunk, and the noise since."""
    chunk, h = tl.program_id(0), tl.program_id(1)
    i = tl.arange(0, C)
    begin = tl.load(start + chunk).to(tl.int64)
    at, there = begin * H + h + i * H, i < tl.load(stop + chunk) - begin
    b, between, _, _ = chunk_decay(tl.load(g + at, mask=there, other=0.0), C)
    tl.store(squared + at, b * b, mask=there)
    tl.store(noise + at, accumulate(between, tl.load(process + at, mask=there, other=0.0)), mask=there)


@triton.jit(noinline=True)  # in line it would take registers that hold the covariance
def _factorise(
    shares, g, obs, obs_cov, evidence, n, factors, X, delta, work, counters, met,
    H: tl.constexpr, HG: tl.constexpr, NB: tl.constexpr, C: tl.constexpr, SAVE: tl.constexpr,
):  # fmt: skip
    """From the shares of K R' of a chunk of n tokens, what its programs need of `A = L Δ L'`.

    `factors` gets `N = X ∘ dec`, so that U = N R; N' diag(left² mu / d), so that its product with U updates
    the covariance; and 1 / (r2 + k·u), the gain's denominator.
    """
    mu = tl.load(evidence)
    i = tl.arange(0, C)
    gt = tl.load(g + i * H, mask=i < n, other=0.0)
    r = tl.load(obs + i * HG, mask=i < n, other=1.0)
    r_cov = tl.load(obs_cov + i * HG, mask=i < n, other=1.0)
    _, between, left, _ = chunk_decay(gt, C)
    if NB > 1:
        wait(counters, NB * met)
    else:
        tl.debug_barrier()
    S = sum_of_shares(shares, NB, C) * between
    A = mu * (S + tl.trans(tl.where(i[:, None] > i[None, :], S, 0.0)))
    Xc, d = ldl(A + tl.where(i[:, None] == i[None, :], r_cov[:, None], 0.0), work, C)
    N = Xc * between
    tl.store(factors + i[:, None] * C + i[None, :], N)
    tl.store(factors + C * C + i[:, None] + i[None, :] * C, N * (left * left * mu / d)[:, None])
    # k·u of every token is the diagonal of U K' = N R K'
    tl.store(factors + 2 * C * C + i, 1.0 / (r + tl.sum(Xc * S, 1)))
    if NB > 1:
        arrive(counters + 1)
    else:
        tl.debug_barrier()
    if SAVE:
        tl.store(square(X, 0, 0, C, C, C), Xc)
        tl.store(delta + i, d)


@triton.jit
def _chain(
    k, g, obs, obs_cov, squared, noise, evidence, cov, start, stop, first,
    kappa, final, entry, R, U, X, delta, partial, factors, work, counters,
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
    i = tl.arange(0, C)
    begin_doc, end_doc = tl.load(first + doc), tl.load(first + doc + 1)
    g += h
    obs += hg
    obs_cov += hg
    evidence += h
    partial += (group * NB).to(tl.int64) * C * C
    factors += group.to(tl.int64) * (2 * C + 1) * C
    work += group.to(tl.int64) * (C * C + C + 512)
    counters += 1 + 2 * group
    own = part * BD
    rows, cols = tl.arange(0, BR)[:, None], own + tl.arange(0, BD)[None, :]
    k += h // (H // HK) * D
    kappa += hg * D
    R += hg * D
    U += hg * D
    squared += h
    noise += h
    P = columns_of(cov + group.to(tl.int64) * D * D, own, D, BR, BD)
    for chunk in range(begin_doc, end_doc):
        begin = tl.load(start + chunk).to(tl.int64)
        count = tl.load(stop + chunk) - begin.to(tl.int32)
        there = i < count
        b2 = tl.load(squared + begin * H + i * H, mask=there, other=0.0)
        n = tl.load(noise + begin * H + i * H, mask=there, other=0.0)
        block, met = chunk * (H * G) + hg.to(tl.int64), chunk - begin_doc + 1
        R_at = R + begin * (H * G * D)
        W = tl.zeros([C, BD], tl.float32)
        for m in tl.static_range(D // BR):
            Km = keys(k + begin * (HK * D) + m * BR, i, there, HK * D, BR)
            W = key_dot(Km, P[m], W, PRECISION)
        K_own = keys(k + begin * (HK * D) + own, i, there, HK * D, BD)
        R_own = b2[:, None] * W + n[:, None] * K_own.to(tl.float32)
        S = key_dot(K_own, tl.trans(R_own), tl.zeros([C, C], tl.float32), PRECISION)
        put(R_at + own, i, there, H * G * D, R_own, BD)
        # none writes its share again before it has the factors, so all shares have been read
        tl.store(square(partial + part * (C * C), 0, 0, C, C, C), S)
        if NB > 1:
            arrive(counters)
        if part == 0:
            _factorise(
                partial, g + begin * H, obs + begin * (H * G), obs_cov + begin * (H * G), evidence, count,
                factors, X + block * (C * C), delta + block * C, work, counters, met,
                H=H, HG=H * G, NB=NB, C=C, SAVE=SAVE,
            )  # fmt: skip
        if SAVE:
            put_columns(entry + block * D * D, P, own, D, BR, BD)
        if NB > 1:
            wait(counters + 1, met)
        N = tl.load(square(factors, 0, 0, C, C, C), cache_modifier=".cg")
        U_own = exact_dot(N, R_own, tl.zeros([C, BD], tl.float32), PRECISION)
        over = tl.load(factors + 2 * C * C + i, cache_modifier=".cg")
        put(kappa + begin * (H * G * D) + own, i, there, H * G * D, U_own * over[:, None], BD)
        if SAVE:
            put(U + begin * (H * G * D) + own, i, there, H * G * D, U_own, BD)
        # P0 changes by U' diag(left² mu / d) U = R' Y, the right factor this program's own
        N_t = tl.load(square(factors + C * C, 0, 0, C, C, C), cache_modifier=".cg")
        Y = exact_dot(N_t, U_own, tl.zeros([C, BD], tl.float32), PRECISION)
        keep = tl.load(squared + begin * H + (count - 1) * H)
        n_end = tl.load(noise + begin * H + (count - 1) * H)
        updated = []
        for m in tl.static_range(D // BR):
            Rm = fresh_t(R_at + m * BR, i, there, H * G * D, BR)
            Pm = keep * P[m] + tl.where(m * BR + rows == cols, n_end, 0.0)
            updated = updated + [exact_dot(Rm, -Y, Pm, PRECISION)]  # noqa: RUF005
        P = updated
    put_columns(final + group.to(tl.int64) * D * D, P, own, D, BR, BD)


def launch_of(D: int) -> dict[str, int]:
    """How a head's covariance is cut: BD columns a program, in blocks of BR rows."""
    return {"BR": min(D, 64), "BD": min(D, 64), "num_warps": 4, "num_stages": 1}


def forward(
    k: Tensor, g: Tensor, obs: Tensor, obs_cov: Tensor, process: Tensor, evidence: Tensor, cov: Tensor,
    chunks: Chunks, precision: str, dtype: torch.dtype, save: bool,
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:  # fmt: skip
    """Write vectors, final covariance, and what `backward` takes if `save`; arguments of `dense_gains`."""
    (N, HK, D), (H, G), C = k.shape, obs.shape[1:], chunks.size
    launch = launch_of(D)
    parts, groups = D // launch["BD"], chunks.documents * H * G

    def new(*shape: int) -> Tensor:
        return k.new_empty(shape, dtype=torch.float32)

    kappa, final, R = k.new_empty(N, H, G, D, dtype=dtype), torch.empty_like(cov), new(N, H, G, D)
    squared, noise = torch.empty_like(g), torch.empty_like(g)
    _decays[(chunks.count, H)](
        g, process, chunks.start, chunks.stop, squared, noise, H=H, C=C, num_warps=4, num_stages=1
    )
    saved = (chunks.count, H, G) if save else (0, H, G)
    entry, X, delta = new(*saved, D, D), new(*saved, C, C), new(*saved, C)
    U = new(*((N, H, G, D) if save else (0,)))
    partial, factors = new(groups, parts, C, C), new(groups, 2 * C + 1, C)
    work = new(groups, C * C + C + 512)
    counters = torch.zeros(2 * groups + 1, dtype=torch.int32, device=k.device)
    _chain[(groups * parts,)](
        k, g, obs, obs_cov, squared, noise, evidence, cov, chunks.start, chunks.stop, chunks.first,
        kappa, final, entry, R, U, X, delta, partial, factors, work, counters,
        H=H, HK=HK, G=G, D=D, C=C, PRECISION=precision, SAVE=save, **launch,
    )  # fmt: skip
    return kappa, final, (entry, R, U, X, delta)
