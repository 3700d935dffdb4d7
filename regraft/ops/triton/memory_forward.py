"""The memory pass, forward: what each chunk needs, the chain that carries the memory, the outputs.

With `Y = V - b K M0`, what the memory at the chunk's entry does not predict, the innovations of
`docs/filter.md` are `E = (I + T)⁻¹ Y`, `T = strict_lower(dec ∘ K Kappaᵀ)`. The inverse is taken to the keys:

    Z = (I + T)⁻ᵀ (dec_C ∘ Kappa)          M_end = b_C M0 + Zᵀ Y
    R = scale (dec ∘ Q Kappaᵀ) (I + T)⁻¹    O = scale b Q M0 + R Y

The chain makes two products a chunk, and all that only depends on keys is made beside it. Matrices of a chunk
with itself are kept transposed, `[s,t]` for a write s that a token t meets, `[N,HG,C]` by rows s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from regraft.ops.triton.chunks import Chunks
from regraft.ops.triton.tiles import (
    columns,
    decay_between,
    dot,
    put_rows,
    put_scalars,
    rows,
    scalars,
    upper_inverse,
)


def configurations(blocks: tuple[int, ...], stages: tuple[int, ...]) -> list[triton.Config]:
    """What the autotuner tries, few because each is compiled; one choice under the interpreter."""
    if triton.knobs.runtime.interpret:
        return [triton.Config({"BV": blocks[0]}, num_warps=4, num_stages=1)]
    return [
        triton.Config({"BV": BV}, num_warps=w, num_stages=s) for BV in blocks for w in (4, 8) for s in stages
    ]


def fitting(configs: list[triton.Config], arguments: dict[str, Any], **kwargs: Any) -> list[triton.Config]:
    """Without blocks that are wider than there are columns."""
    widest = max(configs[0].kwargs["BV"], triton.next_power_of_2({**arguments, **kwargs}["V"]))
    return [config for config in configs if config.kwargs["BV"] <= widest]


AUTOTUNE: dict[str, Any] = {
    "key": ["D", "V", "C", "ELEMENT"],
    "prune_configs_by": {"early_config_prune": fitting},
    "cache_results": True,
}


@triton.jit
def _prepare(
    q, k, kappa, g, start, stop, entry, z, readout, inverse, reads, overlap, scale,
    H: tl.constexpr, HK: tl.constexpr, G: tl.constexpr, D: tl.constexpr, C: tl.constexpr, BD: tl.constexpr,
    INNOVATION: tl.constexpr, TRAIN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """All that does not depend on the memory or the values."""
    chunk, j = tl.program_id(0), tl.program_id(1)
    begin = tl.load(start + chunk).to(tl.int64)
    n = (tl.load(stop + chunk) - begin).to(tl.int32)
    h = j // G
    HG: tl.constexpr = H * G
    token = begin * HG + j
    q += (begin * HK + h // (H // HK)) * D
    k += (begin * HK + h // (H // HK)) * D
    kappa += token * D
    z += token * D
    operand = kappa.dtype.element_ty

    gt = scalars(g + begin * H + h, H, n, C)
    between = decay_between(gt, C)
    s, t = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    exit_ = tl.exp(tl.sum(tl.where(s > t, gt[:, None], 0.0), axis=0))
    if j % G == 0:
        before = tl.sum(tl.where(s <= t, gt[:, None], 0.0), axis=0)
        put_scalars(entry + begin * H + h, tl.exp(before), H, n, C)

    met = tl.zeros([C, C], tl.float32)  # kappa_s · q_t
    crossed = tl.zeros([C, C], tl.float32)  # kappa_s · k_t
    for d in range(0, D, BD):
        write = rows(kappa, HG * D, n, d, D, C, BD)
        met = dot(write, columns(q, HK * D, n, d, D, C, BD), met, PRECISION)
        if INNOVATION:
            crossed = dot(write, columns(k, HK * D, n, d, D, C, BD), crossed, PRECISION)
    met = scale * between * met
    if INNOVATION:
        crossed = tl.where(s < t, between * crossed, 0.0)
        inverted = upper_inverse(crossed, C)
        if TRAIN:
            put_rows(reads + token * C, met, HG * C, n, 0, C, C, C)
            put_rows(overlap + token * C, crossed, HG * C, n, 0, C, C, C)
            put_rows(inverse + token * C, inverted, HG * C, n, 0, C, C, C)
        zero = tl.zeros([C, C], tl.float32)
        # rounded to the operands' dtype in a moment
        met = dot(inverted, met, zero, PRECISION if operand == tl.float32 else "tf32")
        leaving = (inverted * exit_[None, :]).to(operand)
        for d in range(0, D, BD):
            write = rows(kappa, HG * D, n, d, D, C, BD)
            left = dot(leaving, write, tl.zeros([C, BD], tl.float32), PRECISION)
            put_rows(z, left, HG * D, n, d, D, C, BD)
    else:
        for d in range(0, D, BD):
            write = rows(kappa, HG * D, n, d, D, C, BD).to(tl.float32)
            put_rows(z, exit_[:, None] * write, HG * D, n, d, D, C, BD)
    put_rows(readout + token * C, met, HG * C, n, 0, C, C, C)


@triton.autotune(configurations((32, 64), stages=(1, 2)), **AUTOTUNE)
@triton.jit
def _carry(
    k, v, z, entry, mean, start, stop, first, unpredicted, states, final,
    H: tl.constexpr, HK: tl.constexpr, G: tl.constexpr, D: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BV: tl.constexpr, INNOVATION: tl.constexpr, PRECISION: tl.constexpr, ELEMENT: tl.constexpr,
):  # fmt: skip
    """Along the chunks of a document, with a block of columns of the memory in registers."""
    HG: tl.constexpr = H * G
    NV: tl.constexpr = (V + BV - 1) // BV
    column, group = tl.program_id(0) % NV * BV, tl.program_id(0) // NV
    doc, j = group // HG, group % HG
    h = j // G
    operand = k.dtype.element_ty
    M = rows(mean + group.to(tl.int64) * D * V, V, D, column, V, D, BV).to(tl.float32)
    for chunk in range(tl.load(first + doc), tl.load(first + doc + 1)):
        begin = tl.load(start + chunk).to(tl.int64)
        n = (tl.load(stop + chunk) - begin).to(tl.int32)
        token = begin * HG + j
        before = entry + begin * H + h
        M_operand = M.to(operand)
        put_rows(states + (tl.cast(chunk, tl.int64) * HG + j) * D * V, M_operand, V, D, column, V, D, BV)
        Y = rows(v + token * V, HG * V, n, column, V, C, BV)
        if INNOVATION:
            keys = rows(k + (begin * HK + h // (H // HK)) * D, HK * D, n, 0, D, C, D)
            predicted = dot(keys, M_operand, tl.zeros([C, BV], tl.float32), PRECISION)
            Y = (Y.to(tl.float32) - scalars(before, H, n, C)[:, None] * predicted).to(operand)
            put_rows(unpredicted + token * V, Y, HG * V, n, column, V, C, BV)
        M *= tl.load(before + (n - 1) * H)
        M = dot(columns(z + token * D, HG * D, n, 0, D, C, D), Y, M, PRECISION)
    put_rows(final + group.to(tl.int64) * D * V, M, V, D, column, V, D, BV)


@triton.jit
def _read(
    q, unpredicted, entry, readout, inverse, states, start, stop, o, innovations, scale,
    H: tl.constexpr, HK: tl.constexpr, G: tl.constexpr, D: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BD: tl.constexpr, BV: tl.constexpr, INNOVATIONS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Outputs, and the innovations where the backward pass will want them."""
    HG: tl.constexpr = H * G
    NV: tl.constexpr = (V + BV - 1) // BV
    column, chunk, j = tl.program_id(0) % NV * BV, tl.program_id(0) // NV, tl.program_id(1)
    begin = tl.load(start + chunk).to(tl.int64)
    n = (tl.load(stop + chunk) - begin).to(tl.int32)
    h = j // G
    token = begin * HG + j
    q += (begin * HK + h // (H // HK)) * D
    states += (tl.cast(chunk, tl.int64) * HG + j) * D * V
    out = tl.zeros([C, BV], tl.float32)
    for d in range(0, D, BD):
        M = rows(states + d * V, V, BD, column, V, BD, BV)
        out = dot(rows(q, HK * D, n, d, D, C, BD), M, out, PRECISION)
    out *= (scale * scalars(entry + begin * H + h, H, n, C))[:, None]
    Y = rows(unpredicted + token * V, HG * V, n, column, V, C, BV)
    out = dot(columns(readout + token * C, HG * C, n, 0, C, C, C), Y, out, PRECISION)
    put_rows(o + token * V, out, HG * V, n, column, V, C, BV)
    if INNOVATIONS:
        inverted = columns(inverse + token * C, HG * C, n, 0, C, C, C)
        E = dot(inverted, Y, tl.zeros([C, BV], tl.float32), PRECISION)
        put_rows(innovations + token * V, E, HG * V, n, column, V, C, BV)


@dataclass(frozen=True)
class Pass:
    """What one run of the pass is about, apart from its tensors."""

    chunks: Chunks
    scale: float
    innovation: bool
    precision: str


@dataclass(frozen=True)
class Saved:
    """What the forward pass leaves for the backward pass."""

    entry: Tensor  # [N,H] float32, decay from the chunk's entry
    z: Tensor  # [N,HG,D]
    readout: Tensor  # [N,HG,C] R
    reads: Tensor  # [N,HG,C] scale (dec ∘ Q Kappaᵀ)
    overlap: Tensor  # [N,HG,C] T
    innovations: Tensor  # [N,HG,V] E
    states: Tensor  # [chunks,HG,D,V], the memory at each chunk's entry


NARROW = 64  # ptxas 12.8 compiles narrower heads wrongly here and there, docs/benchmarks.md


def forward(
    q: Tensor, k: Tensor, kappa: Tensor, v: Tensor, g: Tensor, mean: Tensor, run: Pass, train: bool
) -> tuple[Tensor, Tensor, Saved]:
    """Outputs, the final memory, and for `train` what the backward pass needs."""
    chunks, C = run.chunks, run.chunks.size
    (N, HK, D), (H, G, V) = k.shape, v.shape[1:]
    shape = {"H": H, "HK": HK, "G": G, "D": D, "C": C, "PRECISION": run.precision}
    entry, z = torch.empty_like(g), torch.empty_like(kappa)
    readout = v.new_empty(N, H, G, C)
    solved = run.innovation and train
    reads = (torch.empty_like(readout) if run.innovation else readout) if train else readout[:0]
    overlap, inverse = (torch.empty_like(readout if solved else readout[:0]) for _ in range(2))
    warps = 8 if D >= NARROW else 4
    _prepare[(chunks.count, H * G)](
        q, k, kappa, g, chunks.start, chunks.stop, entry, z, readout, inverse, reads, overlap, run.scale,
        **shape, BD=min(D, 64), INNOVATION=run.innovation, TRAIN=train, num_warps=warps, num_stages=2,
    )  # fmt: skip
    unpredicted = torch.empty_like(v) if run.innovation else v
    states, final = v.new_empty(chunks.count, H, G, D, V), torch.empty_like(mean)
    _carry[lambda meta: (triton.cdiv(V, meta["BV"]) * chunks.documents * H * G,)](
        k, v, z, entry, mean, chunks.start, chunks.stop, chunks.first, unpredicted, states, final,
        **shape, V=V, INNOVATION=run.innovation, ELEMENT=v.element_size(),
    )  # fmt: skip
    o = torch.empty_like(v)
    innovations = torch.empty_like(v) if solved else unpredicted
    BV = min(64, triton.next_power_of_2(V))
    _read[(triton.cdiv(V, BV) * chunks.count, H * G)](
        q, unpredicted, entry, readout, inverse, states, chunks.start, chunks.stop, o, innovations, run.scale,
        **shape, V=V, BD=min(D, 64), BV=BV, INNOVATIONS=solved, num_warps=4, num_stages=2,
    )  # fmt: skip
    return o, final, Saved(entry, z, readout, reads, overlap, innovations, states)
