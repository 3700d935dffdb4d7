"""The gain pass of a diagonal or isotropic covariance (paper 002), forward and backward.

Every step maps a channel's variance p to `(A p + B) / (C p + 1)`, and its gradient, backwards, to `α P + β`.
Both compose, so each direction has three kernels: what a chunk does, by a walk over its tokens; a chain over
the chunks; and the walk again, now from the right start. All chunks walk at once, one warp each.

An isotropic covariance is walked as D equal channels whose information is the mean over the channels.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from regraft.ops.triton.chunks import Chunks

# Steps are short and one after the other: what they read is fetched so many steps early.
AHEAD = tl.constexpr(4)


@triton.jit
def _step(
    k, g, obs_cov, process, evidence, token, j, d,
    H: tl.constexpr, HK: tl.constexpr, G: tl.constexpr, D: tl.constexpr, ISOTROPIC: tl.constexpr,
):  # fmt: skip
    """Of a token: key, squared decay, process noise, `k²` (its mean) and `evidence k² / obs_var_cov`."""
    h = j // G
    key = tl.load(k + (token * HK + h // (H // HK)) * D + d, mask=d < D, other=0.0).to(tl.float32)
    a2 = tl.exp(2 * tl.load(g + token * H + h))
    w = tl.load(process + token * H + h)
    k2 = key * key
    if ISOTROPIC:
        k2 = tl.sum(k2, axis=0) / D + tl.zeros_like(k2)
    return key, a2, w, k2, evidence / tl.load(obs_cov + token * (H * G) + j) * k2


@triton.jit
def _compose(
    k, g, obs_cov, process, evidence, start, stop, maps,
    H: tl.constexpr, HK: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    ISOTROPIC: tl.constexpr,
):  # fmt: skip
    """A, B and C of each chunk."""
    chunk, j = tl.program_id(0), tl.program_id(1)
    HG: tl.constexpr = H * G
    d = tl.arange(0, BD)
    mu = tl.load(evidence + j // G)
    A = tl.full([BD], 1.0, tl.float32)
    B = tl.zeros([BD], tl.float32)
    C = tl.zeros([BD], tl.float32)
    for t in tl.range(tl.load(start + chunk), tl.load(stop + chunk), num_stages=AHEAD):
        _, a2, w, _, info = _step(
            k, g, obs_cov, process, mu, tl.cast(t, tl.int64), j, d, H, HK, G, D, ISOTROPIC
        )
        # p -> a² p + w, then p -> p / (1 + info p); all terms are at least 0
        A, B = a2 * A + w * C, a2 * B + w
        C += info * A
        over = 1.0 / (1.0 + info * B)
        A, B, C = A * over, B * over, C * over
    at = maps + (tl.cast(chunk, tl.int64) * HG + j) * (3 * D) + d
    tl.store(at, A, mask=d < D)
    tl.store(at + D, B, mask=d < D)
    tl.store(at + 2 * D, C, mask=d < D)


@triton.jit
def _carry(maps, cov, first, entry, final, HG: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """Variances at each chunk's entry and at the end."""
    doc, j = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, BD)
    p = tl.load(cov + (doc * HG + j) * D + d, mask=d < D, other=0.0)
    for chunk in tl.range(tl.load(first + doc), tl.load(first + doc + 1), num_stages=AHEAD):
        block = tl.cast(chunk, tl.int64) * HG + j
        tl.store(entry + block * D + d, p, mask=d < D)
        at = maps + block * (3 * D) + d
        A, B = tl.load(at, mask=d < D, other=0.0), tl.load(at + D, mask=d < D, other=0.0)
        p = (A * p + B) / (tl.load(at + 2 * D, mask=d < D, other=0.0) * p + 1.0)
    tl.store(final + (doc * HG + j) * D + d, p, mask=d < D)


@triton.jit
def _apply(
    k, g, obs, obs_cov, process, evidence, entry, start, stop, kappa,
    H: tl.constexpr, HK: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    ISOTROPIC: tl.constexpr,
):  # fmt: skip
    chunk, j = tl.program_id(0), tl.program_id(1)
    HG: tl.constexpr = H * G
    d = tl.arange(0, BD)
    mu = tl.load(evidence + j // G)
    p = tl.load(entry + (tl.cast(chunk, tl.int64) * HG + j) * D + d, mask=d < D, other=0.0)
    for t in tl.range(tl.load(start + chunk), tl.load(stop + chunk), num_stages=AHEAD):
        token = tl.cast(t, tl.int64)
        key, a2, w, _, info = _step(k, g, obs_cov, process, mu, token, j, d, H, HK, G, D, ISOTROPIC)
        p = a2 * p + w
        write = p * key
        write /= tl.load(obs + token * HG + j) + tl.sum(write * key, axis=0)
        tl.store(kappa + (token * HG + j) * D + d, write.to(kappa.dtype.element_ty), mask=d < D)
        p /= 1.0 + info * p


@triton.jit
def _gain_gradient(dkappa, obs, key, predicted, token, j, d, HG: tl.constexpr, D: tl.constexpr):
    """Of `kappa = y / m`, `y = predicted k`, `m = obs_var + y·k`: gradients of y and m."""
    dwrite = tl.load(dkappa + (token * HG + j) * D + d, mask=d < D, other=0.0).to(tl.float32)
    write = predicted * key
    m = tl.load(obs + token * HG + j) + tl.sum(write * key, axis=0)
    dm = -tl.sum(dwrite * write, axis=0) / (m * m)
    return dwrite / m, dm


@triton.jit
def _compose_back(
    k, g, obs, obs_cov, process, evidence, entry, dkappa, start, stop, before, maps,
    H: tl.constexpr, HK: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    ISOTROPIC: tl.constexpr,
):  # fmt: skip
    """α and β of each chunk, and the variances before each step."""
    chunk, j = tl.program_id(0), tl.program_id(1)
    HG: tl.constexpr = H * G
    W: tl.constexpr = 1 if ISOTROPIC else D
    d = tl.arange(0, BD)
    mu = tl.load(evidence + j // G)
    block = tl.cast(chunk, tl.int64) * HG + j
    p = tl.load(entry + block * D + d, mask=d < D, other=0.0)
    alpha = tl.full([BD], 1.0, tl.float32)
    beta = tl.zeros([BD], tl.float32)
    for t in tl.range(tl.load(start + chunk), tl.load(stop + chunk), num_stages=AHEAD):
        token = tl.cast(t, tl.int64)
        tl.store(before + (token * HG + j) * W + d, p, mask=d < W)
        key, a2, w, _, info = _step(k, g, obs_cov, process, mu, token, j, d, H, HK, G, D, ISOTROPIC)
        p = a2 * p + w
        dy, dm = _gain_gradient(dkappa, obs, key, p, token, j, d, HG, D)
        shrink = 1.0 / (1.0 + info * p)
        beta += alpha * a2 * (dy + dm * key) * key
        alpha *= a2 * shrink * shrink
        p *= shrink
    at = maps + block * (2 * D) + d
    tl.store(at, alpha, mask=d < D)
    tl.store(at + D, beta, mask=d < D)


@triton.jit
def _carry_back(maps, dfinal, first, dexit, dcov, HG: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """Gradients of the variances after each chunk and at the start."""
    doc, j = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, BD)
    P = tl.load(dfinal + (doc * HG + j) * D + d, mask=d < D, other=0.0)
    begin, end = tl.load(first + doc), tl.load(first + doc + 1)
    for back in tl.range(0, end - begin, num_stages=AHEAD):
        block = tl.cast(end - 1 - back, tl.int64) * HG + j
        tl.store(dexit + block * D + d, P, mask=d < D)
        at = maps + block * (2 * D) + d
        P = tl.load(at, mask=d < D, other=0.0) * P + tl.load(at + D, mask=d < D, other=0.0)
    tl.store(dcov + (doc * HG + j) * D + d, P, mask=d < D)


@triton.jit
def _apply_back(
    k, g, obs, obs_cov, process, evidence, before, dexit, dkappa, start, stop,
    dk, dg, dobs, dobs_cov, dprocess, devidence,
    H: tl.constexpr, HK: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    ISOTROPIC: tl.constexpr,
):  # fmt: skip
    chunk, j = tl.program_id(0), tl.program_id(1)
    HG: tl.constexpr = H * G
    W: tl.constexpr = 1 if ISOTROPIC else D
    d = tl.arange(0, BD)
    mu = tl.load(evidence + j // G)
    block = tl.cast(chunk, tl.int64) * HG + j
    P = tl.load(dexit + block * D + d, mask=d < D, other=0.0)
    dmu = 0.0
    begin, end = tl.load(start + chunk), tl.load(stop + chunk)
    for back in tl.range(0, end - begin, num_stages=AHEAD):
        token = tl.cast(end - 1 - back, tl.int64)
        key, a2, w, k2, info = _step(k, g, obs_cov, process, mu, token, j, d, H, HK, G, D, ISOTROPIC)
        p = tl.load(before + (token * HG + j) * W + (d if W > 1 else 0 * d), mask=d < D, other=0.0)
        predicted = a2 * p + w
        dy, dm = _gain_gradient(dkappa, obs, key, predicted, token, j, d, HG, D)
        shrink = 1.0 / (1.0 + info * predicted)
        kept = P * shrink * shrink
        dinfo = -kept * predicted * predicted
        kept += (dy + dm * key) * key
        r_cov = tl.load(obs_cov + token * HG + j)
        dk2 = dinfo * mu / r_cov
        if ISOTROPIC:
            dk2 = tl.sum(dk2, axis=0) / D + tl.zeros_like(dk2)
        dkey = (dy + 2.0 * dm * key) * predicted + 2.0 * dk2 * key
        dratio = tl.sum(dinfo * k2, axis=0)  # of evidence / obs_var_cov
        tl.store(dk + (token * HG + j) * D + d, dkey.to(dk.dtype.element_ty), mask=d < D)
        tl.store(dobs + token * HG + j, dm)
        tl.store(dobs_cov + token * HG + j, -dratio * mu / (r_cov * r_cov))
        tl.store(dprocess + token * HG + j, tl.sum(kept, axis=0))
        tl.store(dg + token * HG + j, 2.0 * a2 * tl.sum(p * kept, axis=0))
        dmu += dratio / r_cov
        P = a2 * kept
    tl.store(devidence + block, dmu)


def moebius_gains(
    k: Tensor,
    g: Tensor,
    obs_var: Tensor,
    obs_var_cov: Tensor,
    process_var: Tensor,
    evidence: Tensor,
    cov: Tensor,
    chunks: Chunks,
    isotropic: bool,
) -> tuple[Tensor, Tensor]:
    """Write vectors and final covariance of the diagonal or the isotropic family.

    Differentiable in every tensor, once. Forward and backward are deterministic.

    Args:
        k: keys `[N,Hk,D]` of all tokens in one line, D at most 1024.
        g, process_var: log-decay and process noise `[N,H]`, float32.
        obs_var, obs_var_cov: observation noise `[N,H,G]`, float32; the second in the covariance.
        evidence: `[H]`, float32.
        cov: before the first token of each document, `[documents,H,G,D]`, or 1 for D if isotropic; float32.
        chunks: which tokens a chunk has.
        isotropic: one variance for all channels.

    Returns:
        kappa `[N,H,G,D]` in the dtype of k, and the covariance after the last token, shaped as `cov`.
    """
    D = k.shape[-1]
    if isotropic:
        cov = cov.expand(*cov.shape[:-1], D)
    kappa, final = _MoebiusGains.apply(
        k, g, obs_var, obs_var_cov, process_var, evidence, cov, chunks, isotropic
    )
    return kappa, final[..., :1] if isotropic else final


class _MoebiusGains(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        *tensors, chunks, isotropic = arguments
        k, g, obs, obs_cov, process, evidence, cov = (x.contiguous() for x in tensors)
        shape = _shape(k, obs, isotropic)
        HG, D = shape["H"] * shape["G"], shape["D"]
        maps = cov.new_empty(chunks.count, HG, 3, D)
        entry, final = cov.new_empty(chunks.count, HG, D), torch.empty_like(cov)
        kappa = k.new_empty(*obs.shape, D)
        tables, grid = (chunks.start, chunks.stop), (chunks.count, HG)
        _compose[grid](k, g, obs_cov, process, evidence, *tables, maps, **shape, num_warps=1)
        _carry[chunks.documents, HG](
            maps, cov, chunks.first, entry, final, HG=HG, D=D, BD=shape["BD"], num_warps=1
        )
        _apply[grid](k, g, obs, obs_cov, process, evidence, entry, *tables, kappa, **shape, num_warps=1)
        ctx.save_for_backward(k, g, obs, obs_cov, process, evidence, entry)
        ctx.chunks, ctx.isotropic = chunks, isotropic
        return kappa, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dkappa: Tensor, dfinal: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, entry = ctx.saved_tensors
        chunks, (k, _, obs, *_) = ctx.chunks, inputs
        shape = _shape(k, obs, ctx.isotropic)
        (N, H, G), D, HG = obs.shape, shape["D"], shape["H"] * shape["G"]
        dkappa, dfinal = dkappa.contiguous(), dfinal.contiguous()
        before = entry.new_empty(N, HG, 1 if ctx.isotropic else D)
        maps, dexit = entry.new_empty(chunks.count, HG, 2, D), torch.empty_like(entry)
        dk, dcov = torch.empty_like(dkappa), torch.empty_like(dfinal)
        dg, dobs, dobs_cov, dprocess = (torch.empty_like(obs) for _ in range(4))
        devidence = obs.new_empty(chunks.count, H, G)
        tables, grid = (chunks.start, chunks.stop), (chunks.count, HG)
        _compose_back[grid](*inputs, entry, dkappa, *tables, before, maps, **shape, num_warps=1)
        _carry_back[chunks.documents, HG](
            maps, dfinal, chunks.first, dexit, dcov, HG=HG, D=D, BD=shape["BD"], num_warps=1
        )
        _apply_back[grid](
            *inputs, before, dexit, dkappa, *tables, dk, dg, dobs, dobs_cov, dprocess, devidence,
            **shape, num_warps=1,
        )  # fmt: skip
        dk = dk.view(N, k.shape[1], -1, D).sum(2)
        return dk, dg.sum(2), dobs, dobs_cov, dprocess.sum(2), devidence.sum((0, 2)), dcov, None, None


def _shape(k: Tensor, obs: Tensor, isotropic: bool) -> dict[str, Any]:
    (_, HK, D), (_, H, G) = k.shape, obs.shape
    return {"H": H, "HK": HK, "G": G, "D": D, "BD": triton.next_power_of_2(D), "ISOTROPIC": isotropic}
