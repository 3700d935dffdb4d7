"""Belief maintenance: a layer learns the posterior mean of a hidden number, and its kernel is read off.

Paper 004, Case 1: one pre-norm layer, a scalar in, a scalar out. The fitted kernel is the ridge regression of
the last prediction on all observations, compared with the Bayes kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regraft.probes.backbone import Backbone, parameters
from regraft.probes.kernel_data import FIT, HELD_OUT, TRAIN, Regime, bayes_kernel, draw
from regraft.probes.mixers import mixer_config
from regraft.probes.pool import Tick
from regraft.probes.runner import Cell, Results
from regraft.probes.schema import Kernel, MixerSpec, Training
from regraft.probes.tables import counted, spread, table, told
from regraft.probes.train import train

SHAPE = ("width", "heads", "mlp", "conv", "init", "chunk_size")
DATA = ("length", "persistence", "fit", "held_out", "penalty")
EACH = 512  # episodes predicted at once
Pair = tuple[Tensor, Tensor]


def cells(recipe: Kernel) -> list[Cell]:
    """A run a regime, mixer and seed."""
    found = []
    for regime in recipe.regimes:
        for spec in recipe.mixers:
            settings = {
                "regime": regime,
                "mixer": spec.model_dump(mode="json"),
                "train": recipe.train.model_dump(mode="json"),
                "model": {key: getattr(recipe, key) for key in SHAPE},
                "data": {key: getattr(recipe, key) for key in DATA},
            }
            model_of(settings)  # a mixer that cannot be built shows before anything runs
            found += [
                Cell(f"{regime}-{spec.label}-{seed}", {**settings, "seed": seed}) for seed in recipe.seeds
            ]
    return found


def model_of(settings: dict[str, Any]) -> Backbone:
    """The model of a cell, initialised from torch's generator.

    Raises:
        UserError: a mixer that cannot be built, or heads that do not divide the width.
    """
    m, spec = settings["model"], MixerSpec.model_validate(settings["mixer"])
    width = m["width"]
    std = m["init"] or (3 * width) ** -0.5
    config = mixer_config(
        spec, width, m["heads"], m["conv"], intermediate_size=max(1, m["mlp"]), initializer_range=std
    )
    embed = nn.Linear(1, width)
    model = Backbone(
        config,
        embed,
        nn.Linear(width, 1),
        ["mixer"],
        spec,
        mlp=m["mlp"] > 0,
        chunk_size=m["chunk_size"],
    )
    # With a bias: a key made of a lone number, normalised, would know nothing of it but the sign.
    embed.reset_parameters()
    return model


def run(settings: dict[str, Any], device: str, tick: Tick) -> dict[str, Any]:
    """Train one model; its regret and its fitted kernel."""
    regime, seed, data = settings["regime"], settings["seed"], settings["data"]
    training = Training.model_validate(settings["train"])
    torch.manual_seed(seed)
    model = model_of(settings).to(device)

    def batch(step: int) -> Pair:
        seen, target = draw(regime, training.batch, data["length"], TRAIN, seed, step, data["persistence"])
        return seen.to(device), target.to(device)

    # Not recorded: heads this narrow have no kernels, and torch's Cholesky factor waits for the GPU.
    found = train(model, batch, loss, training, tick, graphs=False)
    measured = {} if found["diverged"] else _measured(model, regime, seed, data, device)
    return {"training": found, "parameters": parameters(model), **measured}


def loss(model: nn.Module, batch: Pair) -> Tensor:
    """Mean squared distance to the Bayes estimate."""
    return (predict(model, batch[0]) - batch[1]).square().mean()


def predict(model: nn.Module, seen: Tensor) -> Tensor:
    """Predictions `[B,T]` after each of the observations `[B,T]`; a zero stands before them."""
    tokens = torch.cat([torch.zeros_like(seen[:, :1]), seen], 1)
    return model(tokens[..., None])[:, 1:, 0]


@torch.no_grad()
def _measured(
    model: nn.Module, regime: Regime, seed: int, data: dict[str, Any], device: str
) -> dict[str, Any]:
    """`mse` to the Bayes estimate, `power` of that estimate, the kernel, its relative error, held-out R²."""

    def last(split: int, count: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for index, start in enumerate(range(0, count, EACH)):
            some = min(EACH, count - start)
            # Held-out episodes are everyone's; those of the fit are shared by all mixers of a seed.
            own = 0 if split == HELD_OUT else seed
            seen, target = draw(regime, some, data["length"], split, own, index, data["persistence"])
            yield seen, target, predict(model, seen.to(device)).cpu()

    seen, target, said = (torch.cat(x).double() for x in zip(*last(HELD_OUT, data["held_out"]), strict=True))
    fit_seen, _, fit_said = (torch.cat(x).double() for x in zip(*last(FIT, data["fit"]), strict=True))
    kernel = ridge(fit_seen, fit_said[:, -1], data["penalty"])
    exact = bayes_kernel(regime, data["length"], data["persistence"])
    residual = said[:, -1] - seen @ kernel
    return {
        "mse": float((said - target).square().mean()),
        "power": float(target.square().mean()),
        "kernel": kernel.tolist(),
        "error": float((kernel - exact).norm() / exact.norm()),
        "r2": float(1 - residual.square().mean() / said[:, -1].var(correction=0)),
    }


def ridge(x: Tensor, y: Tensor, penalty: float) -> Tensor:
    """Coefficients `[D]` of `y [N]` on `x [N,D]`."""
    eye = torch.eye(x.shape[1], dtype=x.dtype)
    return torch.linalg.solve(x.T @ x + penalty * eye, x.T @ y)


def summary(recipe: Kernel, cells: Sequence[Cell], results: Results) -> dict[str, Any]:
    """Regret and kernel of every mixer in every regime, over seeds."""
    regimes = []
    for regime in recipe.regimes:
        mixers = []
        for spec in recipe.mixers:
            runs = [
                r
                for c, r in zip(cells, results, strict=True)
                if c.settings["regime"] == regime and c.settings["mixer"] == spec.model_dump(mode="json")
            ]
            if runs:
                mixers.append({"mixer": spec.label, **_over_seeds(runs)})
        kernel = bayes_kernel(regime, recipe.length, recipe.persistence).tolist()
        regimes.append({"regime": regime, "kernel": kernel, "mixers": mixers})
    return {"seeds": list(recipe.seeds), "steps": recipe.train.steps, "regimes": regimes}


def _over_seeds(runs: Results) -> dict[str, Any]:
    done = [r for r in runs if "kernel" in r]
    told = {key: spread([r.get(key) for r in runs]) for key in ("mse", "power", "error", "r2")}
    return {"parameters": runs[0]["parameters"], **told, "kernels": [r["kernel"] for r in done]}


def markdown(summary: dict[str, Any]) -> str:
    """One table a regime."""
    lines = [
        f"After {summary['steps']} updates, mean ± deviation of seeds {summary['seeds']}. Regret: mean "
        "squared distance to the Bayes estimate; error: of the fitted kernel, relative l2.",
    ]
    for found in summary["regimes"]:
        rows = [
            [
                counted(m["mixer"], m["mse"], summary["seeds"]),
                told(m["mse"], 4),
                told(m["error"]),
                told(m["r2"], 4),
                str(m["parameters"]),
            ]
            for m in found["mixers"]
        ]
        power = next((m["power"]["mean"] for m in found["mixers"] if m["power"]["mean"] is not None), None)
        mean = "" if power is None else f" (an estimate of 0 has regret {power:.3f})"
        lines += ["", f"{found['regime']} kernel{mean}:", ""]
        lines += table(["mixer", "regret", "kernel error", "R² of the kernel", "parameters"], rows)
    return "\n".join(lines) + "\n"


def figures(summary: dict[str, Any], folder: Path) -> list[Path]:
    """`kernels.png`, after the paper's Figure 2."""
    from regraft.probes.kernel_figures import draw as figure

    return [figure(summary, folder / "kernels.png")]
