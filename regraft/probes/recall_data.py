"""Sequences of the learned recall (paper 000, E.5): colliding pairs, and random keys.

Writes carry an address and a value, queries an address only. The paper's paragraphs on pairs and values are
missing from our copy. Chosen here: pair i lies in the plane of channels 2i and 2i+1, the 2K labels are a
permutation of the identities, drawn for every sequence, and a query writes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from regraft.probes.schema import CollisionRecall, RandomRecall

TRAIN, TEST, PROJECTION = range(3)  # first number of every seed, so that splits never share one


class Recalled(NamedTuple):
    """A batch; the queries are the last Q tokens.

    tokens: `[B,T,1 + key + labels]`, type flag (1 for writes), raw key, one-hot value. address: `[B,T,D]`, of
    norm 1. write: `[B,T]`. answer: `[B,Q]`. rival: `[B,Q]`, label of the flooded partner, or -1.
    """

    tokens: Tensor
    address: Tensor
    write: Tensor
    answer: Tensor
    rival: Tensor

    @property
    def at(self) -> Tensor:
        """Positions of the queries, `[B,Q]`."""
        (B, T), Q = self.write.shape, self.answer.shape[1]
        return torch.arange(T - Q, T, device=self.write.device).expand(B, Q)

    def to(self, device: str) -> Recalled:
        """On a device."""
        return Recalled(*(x.to(device) for x in self))


def collision_batch(
    task: CollisionRecall, batch: int, flood: int, overlap: tuple[float, float], seed: Sequence[int]
) -> Recalled:
    """Seed in random order, boost of every target B, flood of every distractor A, queries of the targets."""
    rng, K = np.random.default_rng(seed), task.pairs
    identities = np.tile(np.arange(2 * K), (batch, 1))  # A_i is 2i, B_i is 2i + 1
    label = rng.permuted(identities, axis=1)
    first = rng.permuted(identities, axis=1)
    asked = rng.permuted(identities[:, 1::2], axis=1)
    rest = np.concatenate(
        [
            np.repeat(np.arange(1, 2 * K, 2), task.boost),
            np.repeat(np.arange(0, 2 * K, 2), flood),
        ]
    )
    order = np.concatenate([first, np.tile(rest, (batch, 1)), asked], axis=1)
    keys = torch.from_numpy(_keys(rng, task, batch, overlap)).float()
    write = torch.ones(order.shape, dtype=torch.bool)
    write[:, -K:] = False
    order_, label_ = torch.from_numpy(order), torch.from_numpy(label)
    address = keys.gather(1, order_[..., None].expand(-1, -1, 2 * K))
    value = F.one_hot(label_.gather(1, order_), 2 * K)
    query = order_[:, -K:]
    return Recalled(
        _tokens(write, address, value), address, write, label_.gather(1, query), label_.gather(1, query - 1)
    )


def _keys(
    rng: np.random.Generator, task: CollisionRecall, batch: int, overlap: tuple[float, float]
) -> np.ndarray:
    """Unit keys `[B,2K,2K]` by identity, with an overlap of its own for every pair."""
    K = task.pairs
    rho = rng.uniform(*overlap, (batch, K)) if overlap[0] < overlap[1] else np.full((batch, K), overlap[0])
    keys = np.tile(np.eye(2 * K), (batch, 1, 1))
    pair = np.arange(K)
    keys[:, 2 * pair + 1, 2 * pair], keys[:, 2 * pair + 1, 2 * pair + 1] = rho, np.sqrt(1 - rho**2)
    if task.basis == "random":
        q, r = np.linalg.qr(rng.normal(size=(batch, 2 * K, 2 * K)))
        keys = keys @ (q * np.sign(np.diagonal(r, axis1=1, axis2=2))[:, None])
    return keys


def random_batch(task: RandomRecall, batch: int, writes: int, width: int, seed: Sequence[int]) -> Recalled:
    """Random addresses written once each, then `queries` of them asked for.

    Raw addresses go through one fixed projection to `width` channels, the same for every sequence and run.
    """
    rng = np.random.default_rng(seed)
    raw = rng.normal(size=(batch, writes, task.raw))
    raw /= np.linalg.norm(raw, axis=-1, keepdims=True)
    label = rng.integers(task.labels, size=(batch, writes))
    asked = rng.permuted(np.tile(np.arange(writes), (batch, 1)), axis=1)[:, : task.queries]
    order = np.concatenate([np.tile(np.arange(writes), (batch, 1)), asked], axis=1)
    raw = np.take_along_axis(raw, order[..., None], 1)
    projection = np.random.default_rng([PROJECTION, task.raw, width]).normal(size=(task.raw, width))
    address = raw @ projection
    address /= np.linalg.norm(address, axis=-1, keepdims=True)
    write = torch.ones(order.shape, dtype=torch.bool)
    write[:, writes:] = False
    answer = torch.from_numpy(np.take_along_axis(label, asked, 1))
    value = F.one_hot(torch.from_numpy(np.take_along_axis(label, order, 1)), task.labels)
    tokens = _tokens(write, torch.from_numpy(raw).float(), value)
    return Recalled(tokens, torch.from_numpy(address).float(), write, answer, torch.full_like(answer, -1))


def _tokens(write: Tensor, key: Tensor, value: Tensor) -> Tensor:
    flag = write[..., None].float()
    return torch.cat([flag, key, value * flag], dim=-1)
