"""Scalar filtering of paper 004, Case 1: noisy observations of a hidden number, and its Bayes estimate.

uniform: a constant, theta ~ N(0,1), seen with unit noise; the estimate weighs all observations alike.
exponential: a random walk that starts in its steady state, seen with unit noise, whose estimate is
`m_t = 0.9 m_{t-1} + 0.1 o_t`. The paper gives this kernel and not the process; the walk is our choice.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Regime = Literal["uniform", "exponential"]
TRAIN, FIT, HELD_OUT = range(3)  # splits
GAIN = 0.1
DRIFT = GAIN**2 / (1 - GAIN)  # variance of the walk's steps that has this steady gain at unit noise
START = GAIN / (1 - GAIN)  # prior variance of the first value in steady state


def draw(regime: Regime, count: int, length: int, split: int, seed: int, index: int) -> tuple[Tensor, Tensor]:
    """Observations and Bayes estimates, `[count,length]` both; the same for the same arguments."""
    rng = torch.Generator().manual_seed((split * 1_000_003 + seed) * 1_000_003 + index)
    start = torch.randn(count, 1, generator=rng)
    noise = torch.randn(count, length, generator=rng)
    if regime == "uniform":
        seen = start + noise
        return seen, seen.cumsum(1) / torch.arange(2, length + 2)
    steps = torch.randn(count, length - 1, generator=rng) * DRIFT**0.5
    seen = torch.cat([start * START**0.5, steps], 1).cumsum(1) + noise
    estimate, estimates = torch.zeros(count), []
    for t in range(length):
        estimate = (1 - GAIN) * estimate + GAIN * seen[:, t]
        estimates.append(estimate)
    return seen, torch.stack(estimates, 1)


def bayes_kernel(regime: Regime, length: int) -> Tensor:
    """Weight of each observation in the last estimate, `[length]`, the newest last."""
    if regime == "uniform":
        return torch.full((length,), 1 / (length + 1), dtype=torch.float64)
    lag = torch.arange(length - 1, -1, -1, dtype=torch.float64)
    return GAIN * (1 - GAIN) ** lag
