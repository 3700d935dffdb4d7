"""The training loop of the probes: schedules, early stops, and recorded updates against plain ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from regraft.probes.runner import no_tick
from regraft.probes.schema import Training
from regraft.probes.train import _Update, train

torch.set_num_threads(1)
SETTINGS = Training(steps=40, batch=8, lr=3e-2, warmup=0.1, schedule="cosine", clip=0.5, weight_decay=0.1)
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def model_on(device: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)).to(device)


def batch_on(device: str, step: int) -> tuple[Tensor, Tensor]:
    """Two sizes in turn."""
    x = torch.randn(8 + 8 * (step % 2), 4, generator=torch.Generator().manual_seed(step))
    return x.to(device), x.prod(1, keepdim=True).to(device)


def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    x, y = batch
    return (model(x) - y).square().mean()


def trained(device: str, **more: bool) -> tuple[dict, list[Tensor]]:
    model = model_on(device)
    found = train(model, lambda step: batch_on(device, step), loss, SETTINGS, no_tick, **more)
    return found, [p.detach().cpu() for p in model.parameters()]


def test_training_is_adamw_by_hand() -> None:
    found, parameters = trained("cpu")
    model = model_on("cpu")
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=SETTINGS.betas, foreach=False)
    rates = [(step + 1) / 4 for step in range(4)]
    rates += [0.5 * (1 + torch.cos(torch.tensor(torch.pi * step / 36))).item() for step in range(36)]
    losses = []
    for step, rate in enumerate(rates):
        for group in optimizer.param_groups:
            group["lr"] = 3e-2 * rate
        optimizer.zero_grad()
        value = loss(model, batch_on("cpu", step))
        value.backward()
        norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
        for p in model.parameters():
            p.grad *= min(1.0, 0.5 / (float(norm) + 1e-6))
        optimizer.step()
        losses.append(float(value.detach()))
    assert found["steps"] == 40 and not found["diverged"]
    assert found["losses"] == pytest.approx([sum(losses[i : i + 2]) / 2 for i in range(0, 40, 2)], rel=1e-4)
    for mine, by_hand in zip(parameters, model.parameters(), strict=True):
        torch.testing.assert_close(mine, by_hand.detach(), rtol=1e-4, atol=1e-5)


@on_gpu
def test_recorded_updates_are_the_plain_ones() -> None:
    recorded, one = trained("cuda")
    plain, other = trained("cuda", graphs=False)
    assert recorded["losses"] == pytest.approx(plain["losses"], rel=1e-4)
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@on_gpu
def test_each_shape_is_recorded_once() -> None:
    device = torch.device("cuda")
    update = _Update(model_on("cuda"), loss, SETTINGS, device, recorded=True)
    with torch.cuda.stream(torch.cuda.Stream()):
        for step in range(12):
            update(batch_on("cuda", step), 1e-3)
    assert update.recorded and len(update.graphs) == 2


@on_gpu
def test_a_model_that_waits_for_the_gpu_runs_as_it_is() -> None:
    def waiting(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        value = loss(model, batch)
        return value * float(value.detach() > -1)

    model = model_on("cuda")
    with pytest.warns(RuntimeWarning, match="not recorded"):
        found = train(model, lambda step: batch_on("cuda", step), waiting, SETTINGS, no_tick)
    assert found["losses"] == pytest.approx(trained("cuda", graphs=False)[0]["losses"], rel=1e-4)
