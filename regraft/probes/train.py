"""The training loop of all probes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from regraft.probes.backbone import decayed
from regraft.probes.pool import Tick
from regraft.probes.schema import Training

B = TypeVar("B")
LAST = 50  # updates whose mean loss is reported


def train(
    model: nn.Module,
    batch: Callable[[int], B],
    loss: Callable[[nn.Module, B], Tensor],
    settings: Training,
    tick: Tick,
) -> dict[str, Any]:
    """Train on `batch(step)`, step from 0; AdamW, clipped, with warm-up and schedule.

    Returns:
        `loss`, the mean of the last updates, `losses`, means of twentieths of the run, and `diverged`. A run
        whose loss is no longer finite ends there, its losses None.
    """
    matrices, rest = decayed(model)
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": rest, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _factor(step, settings))
    seen: list[Tensor] = []
    model.train()
    for step in range(settings.steps):
        value = loss(model, batch(step))
        optimizer.zero_grad(set_to_none=True)
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        optimizer.step()
        rate.step()
        seen.append(value.detach())
        tick(1 / settings.steps)
        if step % LAST == 0 and not math.isfinite(float(seen[-1])):
            break
    model.eval()
    return _told(torch.stack(seen).cpu(), settings.steps)


def _told(seen: Tensor, steps: int) -> dict[str, Any]:
    diverged = len(seen) < steps or not bool(seen.isfinite().all())
    if diverged:
        return {"loss": None, "losses": None, "diverged": True}
    parts = [float(part.mean()) for part in seen.tensor_split(min(20, len(seen)))]
    return {"loss": float(seen[-LAST:].mean()), "losses": parts, "diverged": False}


def _factor(step: int, s: Training) -> float:
    """The learning rate at a step, as a share of the peak."""
    warm = max(1, round(s.warmup * s.steps)) if s.warmup else 0
    if step < warm:
        return (step + 1) / warm
    if s.schedule == "constant":
        return 1.0
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, s.steps - warm)))
