"""What decoding carries from token to token: convolution inputs, mean and covariance of every layer."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


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


class RegraftCache:
    """States of all layers, with the methods that transformers' generation calls on a cache."""

    is_compileable = False
    is_sliding = (False,)

    def __init__(self, num_layers: int) -> None:
        self.states: list[MixerState | None] = [None] * num_layers
        self.seen = 0  # columns of input consumed, padding included

    @property
    def is_linear(self) -> list[bool]:
        """Every layer is recurrent; transformers >= 5.24 asks."""
        return [True] * len(self.states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Input columns consumed so far."""
        return self.seen

    def __len__(self) -> int:
        return len(self.states)

    def select(self, rows: Tensor) -> None:
        """Keep these batch rows, in this order."""
        self.states = [None if s is None else s.select(rows.to(s.mean.device)) for s in self.states]

    reorder_cache = select
    batch_select_indices = select

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times, as `num_return_sequences` asks."""
        first = next((s for s in self.states if s is not None), None)
        if first is not None:
            n = first.mean.shape[0]
            self.select(first.mean.new_tensor(range(n)).long().repeat_interleave(repeats))

    def reset(self) -> None:
        """Forget everything."""
        self.states, self.seen = [None] * len(self.states), 0
