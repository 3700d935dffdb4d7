"""Scalar filtering of paper 004, Case 1: noisy observations of a hidden number, and its Bayes estimate.

uniform: a constant, theta ~ N(0,1), seen with unit noise; the estimate weighs all observations alike.
exponential: `x_t = a x_{t-1} + w_t` in its steady state, seen with unit noise, whose estimate is
`m_t = 0.9 m_{t-1} + g o_t` with `g = 1 - 0.9 / a`. The paper gives the ratio of this kernel, not the process;
the random walk, a = 1 and g = 0.1, is our choice.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Regime = Literal["uniform", "exponential"]
TRAIN, FIT, HELD_OUT = range(3)  # splits
KEPT = 0.9  # ratio of the exponential kernel


def steady(persistence: float) -> tuple[float, float, float]:
    """Gain, variance of a value before it is seen, and variance of w, of the process with this a."""
    gain = 1 - KEPT / persistence
    before = gain / (1 - gain)
    return gain, before, before - persistence**2 * gain


def draw(
    regime: Regime, count: int, length: int, split: int, seed: int, index: int, persistence: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Observations and Bayes estimates, `[count,length]` both; the same for the same arguments."""
    rng = torch.Generator().manual_seed((split * 1_000_003 + seed) * 1_000_003 + index)
    start = torch.randn(count, 1, generator=rng)
    noise = torch.randn(count, length, generator=rng)
    if regime == "uniform":
        seen = start + noise
        return seen, seen.cumsum(1) / torch.arange(2, length + 2)
    gain, before, drift = steady(persistence)
    steps = torch.cat(
        [start * before**0.5, torch.randn(count, length - 1, generator=rng) * drift**0.5], dim=1
    )
    value, estimate = torch.zeros(count), torch.zeros(count)
    values, estimates = [], []
    for t in range(length):
        value = persistence * value + steps[:, t]
        estimate = KEPT * estimate + gain * (value + noise[:, t])
        values.append(value)
        estimates.append(estimate)
    return torch.stack(values, 1) + noise, torch.stack(estimates, 1)


def bayes_kernel(regime: Regime, length: int, persistence: float = 1.0) -> Tensor:
    """Weight of each observation in the last estimate, `[length]`, the newest last."""
    if regime == "uniform":
        return torch.full((length,), 1 / (length + 1), dtype=torch.float64)
    lag = torch.arange(length - 1, -1, -1, dtype=torch.float64)
    return steady(persistence)[0] * KEPT**lag
