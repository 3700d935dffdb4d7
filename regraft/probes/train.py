"""The training loop of all probes."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from regraft.probes.backbone import decayed
from regraft.probes.pool import Tick
from regraft.probes.schema import Training

B = TypeVar("B", bound=tuple[Tensor, ...])
LAST = 50  # updates whose mean loss is reported
PLAIN = 3  # updates of each shape of batch before one is recorded


def train(
    model: nn.Module,
    batch: Callable[[int], B],
    loss: Callable[[nn.Module, B], Tensor],
    settings: Training,
    tick: Tick,
    done: Callable[[], bool] | None = None,
    *,
    graphs: bool = True,
) -> dict[str, Any]:
    """Train on `batch(step)`, step from 0; AdamW, clipped, with warm-up and schedule.

    Args:
        model: what is trained.
        batch: the data of a step, tensors on the model's device.
        loss: of the model on a batch.
        settings: the recipe's.
        tick: told the share of the run that each step is.
        done: asked twenty times whether to stop early.
        graphs: on a GPU, record the update of every shape of batch once and replay it. Not for models that
            wait for the GPU inside.

    Returns:
        `steps` done, `loss`, the mean of the last updates, `losses`, means of twentieths of the run, and
        `diverged`. A run whose loss is no longer finite ends there, its losses None.
    """
    device = next(model.parameters()).device
    update = _Update(model, loss, settings, device, recorded=graphs and device.type == "cuda")
    seen: list[Tensor] = []
    model.train()
    with _own_stream(device):
        for step in range(settings.steps):
            seen.append(update(batch(step), settings.lr * _factor(step, settings)))
            tick(1 / settings.steps)
            if step % LAST == 0 and not math.isfinite(float(seen[-1])):
                break
            if done is not None and (step + 1) % max(1, settings.steps // 20) == 0 and done():
                tick(1 - (step + 1) / settings.steps)
                break
    model.eval()
    return _told(torch.stack(seen).cpu())


class _Update(Generic[B]):
    """Updates of a model; where they are recorded, the fourth of each shape of batch as a CUDA graph.

    An update of a small model is hundreds of short kernels, and launching them takes longer than they do.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[nn.Module, B], Tensor],
        settings: Training,
        device: torch.device,
        recorded: bool,
    ) -> None:
        matrices, rest = decayed(model)
        groups = [
            {"params": matrices, "weight_decay": settings.weight_decay},
            {"params": rest, "weight_decay": 0.0},
        ]
        # A tensor, so that a recorded update reads the rate of its step.
        rate = torch.tensor(settings.lr, device=device) if recorded else settings.lr
        self.optimizer = torch.optim.AdamW(
            groups, lr=rate, betas=settings.betas, fused=recorded or None, capturable=recorded
        )
        self.model, self.loss, self.clip, self.recorded = model, loss, settings.clip, recorded
        self.calls: dict[tuple[torch.Size, ...], int] = {}
        self.graphs: dict[tuple[torch.Size, ...], tuple[torch.cuda.CUDAGraph, B, Tensor]] = {}

    def __call__(self, batch: B, rate: float) -> Tensor:
        """Update once; the loss before it."""
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        if not self.recorded:
            return self._run(batch)
        shape = tuple(x.shape for x in batch)
        self.calls[shape] = self.calls.get(shape, 0) + 1
        if self.calls[shape] <= PLAIN or not (shape in self.graphs or self._record(shape, batch)):
            return self._run(batch)
        graph, held, value = self.graphs[shape]
        for to, x in zip(held, batch, strict=True):
            to.copy_(x)
        graph.replay()
        return value.clone()  # the graph writes to the same place every time

    def _run(self, batch: B) -> Tensor:
        value = self.loss(self.model, batch)
        self.optimizer.zero_grad(set_to_none=True)
        value.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        return value.detach()

    def _record(self, shape: tuple[torch.Size, ...], batch: B) -> bool:
        """Record the update of a shape; a model that cannot be recorded is told once and runs as it is."""
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self.graphs.values()))[0].pool() if self.graphs else None
        self.optimizer.zero_grad(set_to_none=True)
        try:
            with torch.cuda.graph(
                graph, pool, torch.cuda.current_stream(), capture_error_mode="thread_local"
            ):
                value = self._run(batch)
        except RuntimeError as error:
            self.recorded = False
            self.optimizer.zero_grad(set_to_none=True)
            warnings.warn(f"updates are not recorded as CUDA graphs: {error}", RuntimeWarning, stacklevel=4)
            return False
        self.graphs[shape] = (graph, batch, value)
        return True


@contextmanager
def _own_stream(device: torch.device) -> Iterator[None]:
    """On a GPU a stream of its own, as recording demands."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream(device).wait_stream(stream)


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
