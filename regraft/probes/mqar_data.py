"""Sequences of MQAR with one vocabulary, its updates and its blocks.

After Zoology's generator, with what is wrong there mended: batches of all sizes in turn, filler that is never
a key or value of its sequence, slots of the queries independent of the order of the keys, no random numbers
but from the seed of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from regraft.probes.schema import MqarTask

TRAIN, VALIDATION, TEST = range(3)  # first number of every seed, so that splits never share one
CLOSENESS = 0.01  # Zoology's `power_a`: slot i is asked with weight i^(a - 1), so mostly early


class Asked(NamedTuple):
    """A batch. ids: `[B,T]`. at: positions of the queries `[B,n]`, key by key. answer: the value last written
    for each, which never stands after its query. updated: whether it was written twice, `[B,n]`."""

    ids: Tensor
    at: Tensor
    answer: Tensor
    updated: Tensor

    def to(self, device: str) -> Asked:
        """On a device."""
        return Asked(*(x.to(device) for x in self))


def draw(
    task: MqarTask, size: tuple[int, int], vocabulary: int, filler: str, batch: int, seed: Sequence[int]
) -> Asked:
    """`batch` sequences of `size = (tokens, pairs)`.

    Context first: key and value pairs, or blocks of keys and then their values. The rest is slots of two
    tokens: each key stands once at the start of a slot, and its value is the answer there.
    """
    rng = np.random.default_rng([*seed, *size])
    (T, n), u = size, round(task.updated * size[1])
    ids, others = _distinct(rng, batch, 2 * n + u, vocabulary)
    ids = ids.astype(np.int64)
    keys, first, second = ids[:, :n], ids[:, n : 2 * n], ids[:, 2 * n :]
    again = rng.permuted(np.tile(np.arange(n), (batch, 1)), axis=1)[:, :u]  # keys that are written twice
    if filler == "zero":
        tokens = np.zeros((batch, T), dtype=np.int64)
    else:
        place = rng.integers(others.shape[1], size=(batch, T))
        tokens = np.take_along_axis(others, place, 1).astype(np.int64)
    written = _order(rng, n, again, task.interleaved)  # [batch, n + u], event n + j is the j-th second write
    event_key = np.concatenate([keys, np.take_along_axis(keys, again, 1)], 1)
    event_value = np.concatenate([first, second], 1)
    context = _pairs(
        np.take_along_axis(event_key, written, 1), np.take_along_axis(event_value, written, 1), task.block
    )
    start = context.shape[1]
    tokens[:, :start] = context
    at = start + 2 * _slots(rng, batch, n, (T - start) // 2)
    np.put_along_axis(tokens, at, keys, 1)
    answer, updated = first.copy(), np.zeros((batch, n), dtype=bool)
    np.put_along_axis(answer, again, second, 1)
    np.put_along_axis(updated, again, True, 1)
    return Asked(*(torch.from_numpy(np.ascontiguousarray(x)) for x in (tokens, at, answer, updated)))


def _distinct(
    rng: np.random.Generator, batch: int, count: int, vocabulary: int
) -> tuple[np.ndarray, np.ndarray]:
    """`count` distinct ids from 1 to V - 1 a row, and all the others: a shuffle's first `count` steps."""
    pool = np.tile(np.arange(1, vocabulary, dtype=np.int32), (batch, 1))
    row = np.arange(batch)
    for i in range(count):
        j = rng.integers(i, vocabulary - 1, size=batch)
        pool[row, i], pool[row, j] = pool[row, j], pool[row, i]
    return pool[:, :count], pool[:, count:]


def _order(rng: np.random.Generator, n: int, again: np.ndarray, interleaved: bool) -> np.ndarray:
    """Events in the order in which they are written: first writes, then second ones, or any order that has a
    key's second write after its first."""
    batch, u = again.shape
    if not interleaved:
        return np.tile(np.arange(n + u), (batch, 1))
    when = rng.random((batch, n + u))
    one, two = np.take_along_axis(when, again, 1), when[:, n:].copy()
    np.put_along_axis(when, again, np.minimum(one, two), 1)
    when[:, n:] = np.maximum(one, two)
    return when.argsort(axis=1)


def _pairs(keys: np.ndarray, values: np.ndarray, block: int) -> np.ndarray:
    """`k1..kb v1..vb` and so on; the last block may be shorter."""
    parts = []
    for start in range(0, keys.shape[1], block):
        parts += [keys[:, start : start + block], values[:, start : start + block]]
    return np.concatenate(parts, 1)


def _slots(rng: np.random.Generator, batch: int, n: int, slots: int) -> np.ndarray:
    """A slot for each key, `[batch,n]`: n of them by weight without replacement, then dealt out at random."""
    weight = (CLOSENESS - 1) * np.log(np.arange(1, slots + 1)) + rng.gumbel(size=(batch, slots))
    return rng.permuted((-weight).argsort(axis=1)[:, :n], axis=1)
