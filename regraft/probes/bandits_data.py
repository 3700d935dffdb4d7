"""Delayed-feedback bandits of paper 004 (Case 2.a) with their Bayes predictors, and the score S.

An episode has T steps. At step t an arm and, in the logistic task, a context are drawn; the reward they give
is seen K steps later. A predictor says at each step how likely a reward is now, given the rewards that have
arrived. Only the last T - K steps count.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

Task = Literal["beta-bernoulli", "logistic"]
PRIOR_LOSS = float(np.log(2))  # nats a step of the prior predictor: 1/2 by symmetry in both tasks
_GRID = torch.linspace(-12, 12, 161, dtype=torch.float64)  # of one arm's coefficient; its deviation is 2


class Episodes(NamedTuple):
    """N episodes of T steps: arm `[N,T]` in 0..p-1, context and reward (0 or 1) `[N,T]`, float64."""

    arm: Tensor
    context: Tensor
    reward: Tensor


def draw(task: Task, count: int, arms: int, length: int, seed: int) -> Episodes:
    """`count` episodes, the same for the same arguments.

    beta-bernoulli: an arm rewards with a probability uniform in [0,1]; every context is 1.
    logistic: reward probability `sigmoid(context · theta_arm)`, theta ~ N(0,4), |context| uniform in
    [0.5,1.5] with a random sign.
    """
    rng = np.random.default_rng([seed, count, arms, length])
    arm = rng.integers(arms, size=(count, length))
    if task == "beta-bernoulli":
        context = np.ones((count, length))
        chance = np.take_along_axis(rng.random((count, arms)), arm, 1)
    else:
        context = rng.uniform(0.5, 1.5, (count, length)) * rng.choice([-1.0, 1.0], (count, length))
        theta = np.take_along_axis(rng.normal(0, 2, (count, arms)), arm, 1)
        chance = 1 / (1 + np.exp(-context * theta))
    reward = (rng.random((count, length)) < chance).astype(np.float64)
    return Episodes(torch.from_numpy(arm), torch.from_numpy(context), torch.from_numpy(reward))


def bayes(task: Task, x: Episodes, arms: int, delay: int) -> Tensor:
    """Reward probability `[N,T-K]` of the exact posterior at every step that counts."""
    return _beta_bernoulli(x, arms, delay) if task == "beta-bernoulli" else _logistic(x, arms, delay)


def _beta_bernoulli(x: Episodes, arms: int, delay: int) -> Tensor:
    """Laplace's rule, `(1 + successes) / (2 + trials)` of the arm."""
    played = torch.nn.functional.one_hot(x.arm, arms).double()
    trials, successes = played.cumsum(1), (played * x.reward[..., None]).cumsum(1)
    now = x.arm[:, delay:, None]
    n, s = (y[:, : y.shape[1] - delay].gather(2, now)[..., 0] for y in (trials, successes))
    return (1 + s) / (2 + n)


def _logistic(x: Episodes, arms: int, delay: int) -> Tensor:
    """The arms' coefficients are independent given the rewards: one grid an arm, updated in place."""
    N, T = x.arm.shape
    row = torch.arange(N)
    weight = torch.exp(-_GRID.square() / 8).expand(N, arms, -1).clone()
    predicted = []
    for t in range(delay, T):
        arm, context, reward = (y[:, t - delay, None] for y in x)
        likelihood = torch.sigmoid((2 * reward - 1) * context * _GRID)
        posterior = weight[row, arm[:, 0]] * likelihood
        weight[row, arm[:, 0]] = posterior / posterior.sum(-1, keepdim=True)
        now = weight[row, x.arm[:, t]]
        rewarded = torch.sigmoid(x.context[:, t, None] * _GRID)
        predicted.append((now * rewarded).sum(-1) / now.sum(-1))
    return torch.stack(predicted, 1)


def losses(predicted: Tensor, x: Episodes, delay: int) -> Tensor:
    """Log loss `[N]` of each episode, nats summed over its counted steps; probabilities kept off 0 and 1."""
    p = predicted.clamp(1e-6, 1 - 1e-6)
    y = x.reward[:, delay:]
    return -(y * p.log() + (1 - y) * (1 - p).log()).sum(1)


class Score(NamedTuple):
    """S, its bootstrap deviation and 95 % interval."""

    value: float
    deviation: float
    low: float
    high: float


def score(model: Tensor, optimal: Tensor, steps: int, resamples: int = 1000) -> Score:
    """Bayes-normalised score of losses `[N]`: 1 for the Bayes predictor, 0 for the prior.

    `S = 1 - sum(model - optimal) / sum(prior - optimal)` (paper 004); the interval resamples episodes.
    """
    excess, room = (model - optimal).numpy(), (steps * PRIOR_LOSS - optimal).numpy()
    drawn = np.random.default_rng(0).integers(len(excess), size=(resamples, len(excess)))
    spread = 1 - excess[drawn].sum(1) / room[drawn].sum(1)
    low, high = np.percentile(spread, [2.5, 97.5])
    return Score(float(1 - excess.sum() / room.sum()), float(spread.std()), float(low), float(high))
