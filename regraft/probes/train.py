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
    done: Callable[[], bool] | None = None,
) -> dict[str, Any]:
    """Train on `batch(step)`, step from 0; AdamW, clipped, with warm-up and schedule.

    Args:
        model: what is trained.
        batch: the data of a step.
        loss: of the model on a batch.
        settings: the recipe's.
        tick: told the share of the run that each step is.
        done: asked twenty times whether to stop early.

    Returns:
        `steps` done, `loss`, the mean of the last updates, `losses`, means of twentieths of the run, and
        `diverged`. A run whose loss is no longer finite ends there, its losses None.
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
        if done is not None and (step + 1) % max(1, settings.steps // 20) == 0 and done():
            tick(1 - (step + 1) / settings.steps)
            break
    model.eval()
    return _told(torch.stack(seen).cpu())


def _told(seen: Tensor) -> dict[str, Any]:
    if not bool(seen.isfinite().all()):
        return {"steps": len(seen), "loss": None, "losses": None, "diverged": True}
    parts = [float(part.mean()) for part in seen.tensor_split(min(20, len(seen)))]
    return {"steps": len(seen), "loss": float(seen[-LAST:].mean()), "losses": parts, "diverged": False}


def _factor(step: int, s: Training) -> float:
    """The learning rate at a step, as a share of the peak."""
    warm = max(1, round(s.warmup * s.steps)) if s.warmup else 0
    if step < warm:
        return (step + 1) / warm
    if s.schedule == "constant":
        return 1.0
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, s.steps - warm)))
