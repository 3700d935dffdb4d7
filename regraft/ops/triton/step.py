"""Decoding: a token or a few, state in, state out, for every family without a rotation. No gradients.

Two launches. One reads the covariance and makes the write vectors; the other holds a block of columns of the
memory in registers, so that it is read and written once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from regraft.ops.inputs import FilterInputs

MAX_WIDTH = 256


@triton.jit
def _channels(x, d, width: tl.constexpr, D: tl.constexpr):
    """`[...]` at channels d of a row that has one number a channel, or one for all."""
    at = d if width > 1 else d * 0
    return tl.load(x + at, mask=d < D, other=0.0)


@triton.jit
def _gain(
    k, g, obs, obs_cov, process, evidence, prior, cov, kappa, final, warped, T,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr,
    GW: tl.constexpr, PW: tl.constexpr, FAMILY: tl.constexpr,
):  # fmt: skip
    """Write vectors of T tokens and the covariance after them, of one row, head and group."""
    row, j = tl.program_id(0).to(tl.int64), tl.program_id(1)
    HG: tl.constexpr = H * G
    h = j // G
    d = tl.arange(0, BD)
    mu, prior_var = tl.load(evidence + h), tl.load(prior + h)
    warped += (row * HG + j) * D
    if FAMILY == "dense":
        cov += (row * HG + j) * D * D
        final += (row * HG + j) * D * D
    if FAMILY == "diagonal":
        p = tl.load(cov + (row * HG + j) * D + d, mask=d < D, other=0.0)
    if FAMILY == "isotropic":
        p = tl.load(cov + row * HG + j) + tl.zeros([BD], tl.float32)
    for t in range(T):
        token = row * T + t
        key_at, g_at, process_at = (
            k + (token * H + h) * D,
            g + (token * H + h) * GW,
            process + (token * H + h) * PW,
        )
        key = tl.load(key_at + d, mask=d < D, other=0.0)
        r, r_cov = tl.load(obs + token * HG + j), tl.load(obs_cov + token * HG + j)
        a, w = tl.exp(_channels(g_at, d, GW, D)), _channels(process_at, d, PW, D)
        if FAMILY == "none":
            write = prior_var / (prior_var + r) * key
        elif FAMILY == "reset":
            write = prior_var * key / (r + prior_var * tl.sum(key * key, axis=0))
        elif FAMILY == "dense":
            u = tl.zeros([BD], tl.float32)
            for i in range(0, D, BR):
                c = i + tl.arange(0, BR)
                P = tl.load(
                    cov + c[:, None] * D + d[None, :], mask=(c < D)[:, None] & (d < D)[None, :], other=0.0
                )
                ak = tl.exp(_channels(g_at, c, GW, D)) * tl.load(key_at + c, mask=c < D, other=0.0)
                u += tl.sum(ak[:, None] * P, axis=0)
            u = a * u + w * key
            s = tl.sum(u * key, axis=0)
            write = u / (r + s)
            tl.store(warped + d, u, mask=d < D)
            tl.debug_barrier()
            for i in range(0, D, BR):
                c = i + tl.arange(0, BR)
                there = (c < D)[:, None] & (d < D)[None, :]
                P = tl.load(cov + c[:, None] * D + d[None, :], mask=there, other=0.0)
                P *= tl.exp(_channels(g_at, c, GW, D))[:, None] * a[None, :]
                P += tl.where(c[:, None] == d[None, :], w[None, :], 0.0)
                uc = tl.load(warped + c, mask=c < D, other=0.0)
                P -= mu / (r_cov + mu * s) * (uc[:, None] * u[None, :])
                tl.store(final + c[:, None] * D + d[None, :], P, mask=there)
            tl.debug_barrier()
            cov = final
        else:
            a2, k2 = a * a, key * key
            if FAMILY == "isotropic":
                a2, w, k2 = tl.sum(a2 * (d < D), axis=0) / D, tl.sum(w, axis=0) / D, tl.sum(k2, axis=0) / D
            p = a2 * p + w
            write = p * key
            write /= r + tl.sum(write * key, axis=0)
            p /= 1.0 + mu / r_cov * k2 * p
        tl.store(kappa + (token * HG + j) * D + d, write, mask=d < D)
    if FAMILY == "diagonal":
        tl.store(final + (row * HG + j) * D + d, p, mask=d < D)
    if FAMILY == "isotropic":
        tl.store(final + (row * HG + j) + d, p, mask=d < 1)


@triton.jit
def _memory(
    q, k, v, g, kappa, mean, o, final, T,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
    GW: tl.constexpr, INNOVATION: tl.constexpr,
):  # fmt: skip
    """Outputs and the memory after T tokens, of a block of columns of one row, head and group."""
    row, j, column = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2) * BV
    HG: tl.constexpr = H * G
    h = j // G
    d, c = tl.arange(0, BD), column + tl.arange(0, BV)
    there = (d < D)[:, None] & (c < V)[None, :]
    at = (row * HG + j) * D * V + d[:, None] * V + c[None, :]
    M = tl.load(mean + at, mask=there, other=0.0)
    for t in range(T):
        token = row * T + t
        of_head = (token * H + h) * D + d
        M *= tl.exp(_channels(g + (token * H + h) * GW, d, GW, D))[:, None]
        written = tl.load(v + (token * HG + j) * V + c, mask=c < V, other=0.0)
        if INNOVATION:
            key = tl.load(k + of_head, mask=d < D, other=0.0)
            written -= tl.sum(key[:, None] * M, axis=0)
        write = tl.load(kappa + (token * HG + j) * D + d, mask=d < D, other=0.0)
        M += write[:, None] * written[None, :]
        query = tl.load(q + of_head, mask=d < D, other=0.0)
        tl.store(o + (token * HG + j) * V + c, tl.sum(query[:, None] * M, axis=0), mask=c < V)
    tl.store(final + at, M, mask=there)


def unsupported(x: FilterInputs) -> str | None:
    """Why the kernels cannot take these arguments, starting with an argument's name, or None if they can."""
    if x.rotation is not None:
        return "rotation: the step kernels have none"
    if x.boundaries is not None:
        return "cu_seqlens: the step kernels take rows, not packed documents"
    if x.k.dtype != torch.float32:
        return f"k: the step kernels compute in float32, got {x.k.dtype}"
    if x.k.shape[-1] > MAX_WIDTH:
        return f"k: the step kernels have key widths up to {MAX_WIDTH}, got D={x.k.shape[-1]}"
    return None


def decode_step(x: FilterInputs) -> tuple[Tensor, Tensor, Tensor | None]:
    """The filter over a few tokens, without gradients.

    Args:
        x: float32 inputs of rows (no packed documents) without a rotation, D at most `MAX_WIDTH`.

    Returns:
        What `reference_filter` does: `o [B,T,H,G,Vg]`, the mean and the covariance after the last token.

    Raises:
        ValueError: the kernels do not have it; the message starts with the argument's name.
    """
    (B, T, H, _, D), (G, V) = x.k.shape, x.v.shape[3:]
    if (reason := unsupported(x)) is not None:
        raise ValueError(reason)
    q, k, v, g, obs, obs_cov, process, mean = (
        t.contiguous() for t in (x.q, x.k, x.v, x.g, x.obs_var, x.obs_var_cov, x.process_var, x.mean)
    )
    evidence, prior = x.evidence.contiguous(), x.prior_var.contiguous()
    kappa = k.new_empty(B, T, H, G, D)
    cov = None if x.cov is None else x.cov.contiguous()
    final_cov = None if cov is None else torch.empty_like(cov)
    BD = triton.next_power_of_2(D)
    shape = {"H": H, "G": G, "D": D, "BD": BD, "GW": g.shape[-1]}
    _gain[B, H * G](
        k, g, obs, obs_cov, process, evidence, prior, cov, kappa, final_cov, k.new_empty(B, H, G, D), T,
        **shape, BR=min(BD, 32), PW=process.shape[-1], FAMILY=x.covariance,
        num_warps=8 if x.covariance == "dense" else 1,
    )  # fmt: skip
    o, final = torch.empty_like(v), torch.empty_like(mean)
    BV = min(32, triton.next_power_of_2(V))
    _memory[B, H * G, triton.cdiv(V, BV)](
        q, k, v, g, kappa, mean, o, final, T,
        **shape, V=V, BV=BV, INNOVATION=x.covariance != "none", num_warps=4,
    )  # fmt: skip
    return o, final, final_cov
