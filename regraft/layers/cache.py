"""What decoding carries from token to token: convolution inputs, mean and covariance of every layer.

Attention layers of hybrids carry keys and values instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

NO_TOKEN = 2**40  # position of a place that holds no token: no query comes after it


class MixerState(NamedTuple):
    """State of one mixer after some tokens.

    conv: the last `conv_size - 1` inputs of the q, k and v convolutions, each `[B, channels, conv_size-1]`.
    mean: `[B,H,D,V]`, float32. cov: `[B,H,G,D,D]`, float32, None where the family keeps none.
    """

    conv: tuple[Tensor, ...]
    mean: Tensor
    cov: Tensor | None

    def select(self, rows: Tensor) -> MixerState:
        """The state of these batch rows, in this order (beam search, repetition)."""
        cov = None if self.cov is None else self.cov.index_select(0, rows)
        conv = tuple(c.index_select(0, rows) for c in self.conv)
        return MixerState(conv, self.mean.index_select(0, rows), cov)

    @staticmethod
    def joined(states: Sequence[MixerState]) -> MixerState:
        """One state with the rows of all of these."""
        conv = tuple(torch.cat(parts) for parts in zip(*(s.conv for s in states), strict=True))
        covs = [s.cov for s in states if s.cov is not None]
        return MixerState(conv, torch.cat([s.mean for s in states]), torch.cat(covs) if covs else None)

    @property
    def seen(self) -> Tensor:
        """A tensor with one entry a row."""
        return self.mean[:, 0, 0, 0]


class KeyValues(NamedTuple):
    """State of an attention layer after some tokens.

    k, v: keys, rotated, and values, `[B,S,H,D]`. position: `[B,S]`, how many tokens of its row stand before
    the one at this place, `NO_TOKEN` for padding. seen: `[B]`, tokens of each row so far.
    """

    k: Tensor
    v: Tensor
    position: Tensor
    seen: Tensor

    def followed_by(self, new: KeyValues) -> KeyValues:
        """Older and newer places of the same rows."""
        k, v, position = (torch.cat(parts, dim=1) for parts in zip(self[:3], new[:3], strict=True))
        return KeyValues(k, v, position, new.seen)

    def within(self, window: int | None) -> KeyValues:
        """Without the places that no later token of any row can see."""
        if window is None:
            return self
        needed = (self.position != NO_TOKEN) & (self.position > self.seen[:, None] - window)
        kept = needed.any(0)
        return KeyValues(self.k[:, kept], self.v[:, kept], self.position[:, kept], self.seen)

    def select(self, rows: Tensor) -> KeyValues:
        """The state of these batch rows, in this order."""
        return KeyValues(*(x.index_select(0, rows) for x in self))

    @staticmethod
    def joined(states: Sequence[KeyValues]) -> KeyValues:
        """One state with the rows of all of these, shorter ones padded."""
        places = max(s.k.shape[1] for s in states)

        def padded(x: Tensor, value: float = 0) -> Tensor:
            return F.pad(x, (0, 0) * (x.dim() - 2) + (0, places - x.shape[1]), value=value)

        return KeyValues(
            torch.cat([padded(s.k) for s in states]),
            torch.cat([padded(s.v) for s in states]),
            torch.cat([padded(s.position, NO_TOKEN) for s in states]),
            torch.cat([s.seen for s in states]),
        )


class RegraftCache:
    """States of all layers, with the methods that transformers' generation calls on a cache."""

    is_compileable = False
    is_sliding = (False,)

    def __init__(self, num_layers: int) -> None:
        self.states: list[MixerState | KeyValues | None] = [None] * num_layers
        self.seen = 0  # columns of input consumed, padding included

    @property
    def is_linear(self) -> list[bool]:
        """Whether states can be cut back to fewer tokens, which none can; transformers >= 5.24 asks."""
        return [True] * len(self.states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Input columns consumed so far."""
        return self.seen

    def __len__(self) -> int:
        return len(self.states)

    def select(self, rows: Tensor) -> None:
        """Keep these batch rows, in this order."""
        self.states = [None if s is None else s.select(rows.to(s.seen.device)) for s in self.states]

    reorder_cache = select
    batch_select_indices = select

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times, as `num_return_sequences` asks."""
        first = next((s for s in self.states if s is not None), None)
        if first is not None:
            rows = torch.arange(len(first.seen), device=first.seen.device)
            self.select(rows.repeat_interleave(repeats))

    @classmethod
    def joined(cls, caches: Sequence[RegraftCache]) -> RegraftCache:
        """One cache with the rows of all of these."""
        cache = cls(len(caches[0]))
        cache.seen = max(c.seen for c in caches)
        for layer, states in enumerate(zip(*(c.states for c in caches), strict=True)):
            own = [s for s in states if s is not None]
            cache.states[layer] = type(own[0]).joined(own) if own else None
        return cache

    def reset(self) -> None:
        """Forget everything."""
        self.states, self.seen = [None] * len(self.states), 0
