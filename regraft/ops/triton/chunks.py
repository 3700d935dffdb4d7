"""Chunks of rows or packed documents, as tables that a kernel reads."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor


@dataclass(frozen=True)
class Chunks:
    """Rows `[B,T]` are taken as `N = B·T` tokens in one line, and a row is a document like any other.

    Chunk c holds the tokens `start[c]` to `stop[c] - 1`, at most `size`; document d has the chunks `first[d]`
    to `first[d+1] - 1`.
    """

    size: int
    count: int
    documents: int
    start: Tensor  # [count] int32
    stop: Tensor  # [count] int32
    first: Tensor  # [documents + 1] int32

    @classmethod
    def of(cls, B: int, T: int, size: int, boundaries: list[int] | None, device: torch.device) -> Chunks:
        """Chunks of `B` rows of `T` tokens, or of the documents of one packed row."""
        ends = tuple(boundaries) if boundaries is not None else tuple(range(0, B * T + 1, T))
        return _chunks(ends, size, device)


@lru_cache(maxsize=64)
def _chunks(ends: tuple[int, ...], size: int, device: torch.device) -> Chunks:
    """The tables are made once for all layers of a step: a copy to the device would wait."""
    start: list[int] = []
    stop: list[int] = []
    first = [0]
    for begin, end in pairwise(ends):
        start += range(begin, end, size)
        stop += [min(s + size, end) for s in range(begin, end, size)]
        first.append(len(start))
    tables = (torch.tensor(x, dtype=torch.int32, device=device) for x in (start, stop, first))
    return Chunks(size, len(start), len(ends) - 1, *tables)
