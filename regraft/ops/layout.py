"""Cutting rows or packed documents into chunks, and carrying a state from chunk to chunk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class ChunkLayout:
    """All first chunks, then all second chunks, and so on; the longest document first in each.

    Chunk i of the r-th document stands at `live[0] + … + live[i-1] + r`: a step from chunk to chunk reads one
    slice, and nothing is computed for documents that have ended.
    """

    T: int
    C: int
    live: list[int]  # documents that have a chunk i
    order: Tensor | None = None  # [N], the longest document first; None where all are equally long
    tokens: Tensor | None = None  # [n,C], the packed token at each place of each chunk, T for none

    @classmethod
    def of(cls, B: int, T: int, C: int, boundaries: list[int] | None, device: torch.device) -> ChunkLayout:
        """Layout of `B` rows of `T` tokens, or of the documents of one packed row."""
        if boundaries is None:
            return cls(T, C, [B] * -(-T // C))
        ends = torch.tensor(boundaries, device=device)
        chunks = (ends.diff() + C - 1) // C
        order = chunks.argsort(descending=True, stable=True)
        live = [int((chunks > i).sum()) for i in range(int(chunks.max()))]
        document = torch.cat([order[:n] for n in live])
        number = torch.arange(len(live), device=device).repeat_interleave(torch.tensor(live, device=device))
        token = (ends[document] + C * number)[:, None] + torch.arange(C, device=device)
        return cls(T, C, live, order, token.where(token < ends[document + 1][:, None], T))

    def split(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """`[B,T,H,G,X] -> [n,H,G,C,X]`; places without a token hold `fill`."""
        if self.tokens is None:
            x = F.pad(x, (0, 0, 0, 0, 0, 0, 0, -self.T % self.C), value=fill)
            return x.unflatten(1, (-1, self.C)).permute(1, 0, 3, 4, 2, 5).flatten(0, 1)
        x = F.pad(x[0], (0, 0, 0, 0, 0, 0, 0, 1), value=fill)
        return x.index_select(0, self.tokens.flatten()).unflatten(0, (-1, self.C)).permute(0, 2, 3, 1, 4)

    def join(self, x: Tensor) -> Tensor:
        """The inverse of `split`."""
        if self.tokens is None:
            x = x.unflatten(0, (len(self.live), -1)).permute(1, 0, 4, 2, 3, 5)
            return x.flatten(1, 2)[:, : self.T]
        place = self.tokens.new_empty(self.T + 1)
        place[self.tokens.flatten()] = torch.arange(self.tokens.numel(), device=place.device)
        return x.permute(0, 3, 1, 2, 4).flatten(0, 1).index_select(0, place[: self.T])[None]

    def carry(self, state: Tensor, step: Callable[..., Tensor], *chunks: Tensor) -> Tensor:
        """Hand `state [N,...]` through the chunks: `step` gets that of the live documents, and their part of
        each of `chunks [n,...]`.

        Returns:
            The state of each document after its last chunk, in the order of `state`.
        """
        if self.order is not None:
            state = state.index_select(0, self.order)
        ended = []
        # Split once: the gradient of a slice would be as large as the whole, for every chunk.
        for n, *parts in zip(self.live, *(x.split(self.live) for x in chunks), strict=True):
            if n < len(state):
                ended.append(state[n:])
                state = state[:n]
            state = step(state, *parts)
        final = torch.cat([state, *reversed(ended)])
        return final if self.order is None else final.index_select(0, self.order.argsort())
