"""The filter in chunk-parallel form: matrix products and triangular solves; `docs/filter.md` derives it.

Two passes. The gain pass (`gains.py`) makes the write vectors kappa, each covariance family in its own way;
the memory pass is the delta rule with left vector kappa and right vector k, the same for every family.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from regraft.ops.decay import Decay
from regraft.ops.gains import gains
from regraft.ops.inputs import FilterInputs
from regraft.ops.layout import ChunkLayout
from regraft.ops.rotation import rotate, rotate_rows

# Per-channel decays differ in every product over channels, which then holds C numbers a token and channel.
PER_CHANNEL_CHUNK = 16


def chunk_filter(x: FilterInputs, chunk_size: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Filter in chunks of at most `chunk_size` tokens; returns what `reference_filter` does."""
    B, T = x.k.shape[:2]
    if x.g.shape[-1] > 1:
        chunk_size = min(chunk_size, PER_CHANNEL_CHUNK)
    layout = ChunkLayout.of(B, T, min(chunk_size, T), x.boundaries, x.k.device)
    # A place without a token leaves the state alone.
    x = x.map_tokens(lambda name, t: layout.split(t, fill=float(name.startswith("obs_var"))))
    if x.rotation is not None:
        # A rotation commutes with scalar decay and isotropic noise, so inside a chunk it may be taken out of
        # the state and put, backwards, into keys and queries; the state is turned at the chunk's end.
        angle = x.rotation.cumsum(-2)
        x = replace(x, rotation=angle, q=rotate(x.q, -angle), k=rotate(x.k, -angle))
    decay = Decay.of(x.g)
    kappa, cov = gains(x, layout)
    o, mean = _memory(x, kappa, decay, layout)
    return layout.join(o), mean, cov


def _memory(x: FilterInputs, kappa: Tensor, decay: Decay, layout: ChunkLayout) -> tuple[Tensor, Tensor]:
    """Outputs `[n,H,G,C,Vg]` and the final mean, from the write vectors `kappa [n,H,G,C,D]`."""
    C, h = x.k.shape[-2], decay.entry * x.k
    kept, writes = decay.entry[..., -1, :, None], (decay.exit * kappa).mT  # [n,H,1,D|1,1], [n,H,G,D,C]
    chunks = [x.v, decay.entry * x.q, kept, writes]
    if x.covariance != "none":
        # Turns `v - h M`, M at the chunk's entry, into the innovations. The unit diagonal is taken as read.
        A = decay.products(x.k, kappa).tril(-1)
        eye = torch.eye(C, dtype=A.dtype, device=A.device).expand_as(A)
        chunks += [h, torch.linalg.solve_triangular(A, eye, upper=False, unitriangular=True)]
    turn = [] if x.rotation is None else [x.rotation[..., -1, :]]
    recalled, innovations = [], []

    def step(M: Tensor, E: Tensor, hq: Tensor, kept: Tensor, writes: Tensor, *rest: Tensor) -> Tensor:
        if x.covariance != "none":
            (h, inverse), rest = rest[:2], rest[2:]
            E = inverse @ (E - h @ M)
        recalled.append(hq @ M)
        innovations.append(E)
        M = kept * M + writes @ E
        return rotate_rows(M, *rest) if rest else M

    final = layout.carry(x.mean, step, *chunks, *turn)
    o = torch.cat(recalled) + decay.products(x.q, kappa) @ torch.cat(innovations)
    return o, final
