"""Learned recall with addresses given from outside: collisions (E.5.1) and random keys (E.5.4) of paper 000.

Nothing but the update rule differs between models, so the overlap of the keys is the one that the rule sees.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regraft.probes.backbone import Backbone, parameters
from regraft.probes.mixers import mixer_config
from regraft.probes.pool import Tick
from regraft.probes.recall_data import TEST, TRAIN, Recalled, collision_batch, random_batch
from regraft.probes.recall_rules import FixedAddress
from regraft.probes.runner import Cell, Results
from regraft.probes.schema import CollisionRecall, MixerSpec, RandomRecall, Recall, Training
from regraft.probes.tables import counted, spread, table, told
from regraft.probes.train import train

SHAPE = ("width", "layers", "heads", "key_width", "mlp", "chunk_size")


def cells(recipe: Recall) -> list[Cell]:
    """A run a task, mixer and seed."""
    found = []
    for name, task in (("collision", recipe.collision), ("random", recipe.random)):
        if task is None:
            continue
        for spec in recipe.mixers:
            settings = {
                "task": name,
                "data": task.model_dump(mode="json"),
                "mixer": spec.model_dump(mode="json"),
                "train": recipe.train.model_dump(mode="json"),
                "model": {key: getattr(recipe, key) for key in SHAPE},
            }
            model_of(settings)  # a mixer that cannot be built shows before anything runs
            found += [
                Cell(f"{name}-{spec.label}-{seed}", {**settings, "seed": seed}) for seed in recipe.seeds
            ]
    return found


def _task(settings: dict[str, Any]) -> CollisionRecall | RandomRecall:
    schema = CollisionRecall if settings["task"] == "collision" else RandomRecall
    return schema.model_validate(settings["data"])


def model_of(settings: dict[str, Any]) -> Backbone:
    """The model of a cell, initialised from torch's generator.

    Raises:
        UserError: a mixer that cannot be built or takes no addresses, or widths that do not fit.
    """
    task, m = _task(settings), settings["model"]
    spec = MixerSpec.model_validate(settings["mixer"])
    if isinstance(task, CollisionRecall):
        token, labels, keys = 1 + 4 * task.pairs, 2 * task.pairs, 2 * task.pairs
    else:
        token, labels, keys = 1 + task.raw + task.labels, task.labels, m["key_width"]
    config = mixer_config(
        spec, m["width"], m["heads"], conv=1, head_dim=keys, intermediate_size=m["mlp"], use_gate=False
    )
    return Backbone(
        config,
        nn.Linear(token, m["width"]),
        nn.Linear(m["width"], labels),
        ["mixer"] * m["layers"],
        spec,
        mlp=True,
        chunk_size=m["chunk_size"],
        wrap=FixedAddress,
    )


def run(settings: dict[str, Any], device: str, tick: Tick) -> dict[str, Any]:
    """Train one model and test it where it was trained and beyond."""
    task, training = _task(settings), Training.model_validate(settings["train"])
    torch.manual_seed(settings["seed"])
    model = model_of(settings).to(device)

    def batch(step: int) -> Recalled:
        return batch_of(settings, training.batch, step).to(device)

    found = train(model, batch, loss, training, tick)
    tests = [] if found["diverged"] else list(_tests(model, task, settings, device))
    return {"training": found, "parameters": parameters(model), "tests": tests}


def batch_of(settings: dict[str, Any], size: int, step: int) -> Recalled:
    """The training batch of one step of a cell."""
    return drawn(_task(settings), size, settings["model"]["key_width"], settings["seed"], step)


def drawn(task: CollisionRecall | RandomRecall, size: int, width: int, seed: int, step: int) -> Recalled:
    """The training batch of one step: its length goes round the sizes of the task."""
    entropy = [TRAIN, seed, step]
    if isinstance(task, CollisionRecall):
        flood = task.floods[step % len(task.floods)]
        return collision_batch(task, size, flood, task.overlap, entropy)
    return random_batch(task, size, task.writes[step % len(task.writes)], width, entropy)


def loss(model: nn.Module, batch: Recalled) -> Tensor:
    """Cross-entropy at the queries."""
    logits = model(batch.tokens, batch.address, batch.write, at=batch.at)
    return F.cross_entropy(logits.flatten(0, 1), batch.answer.flatten())


@torch.no_grad()
def accuracy(model: nn.Module, batches: Iterator[Recalled]) -> dict[str, float]:
    """Share of queries answered right, and share answered with the flooded partner's label."""
    right = rival = count = 0
    for batch in batches:
        said = model(batch.tokens, batch.address, batch.write, at=batch.at).argmax(-1)
        right += int((said == batch.answer).sum())
        rival += int((said == batch.rival).sum())
        count += said.numel()
    return {"accuracy": right / count, "rival": rival / count}


def _tests(
    model: nn.Module, task: CollisionRecall | RandomRecall, settings: dict[str, Any], device: str
) -> Iterator[dict[str, Any]]:
    """The tests of a task; every run and mixer sees the same sequences."""
    size = min(task.test, settings["train"]["batch"])
    parts = range(-(-task.test // size))
    if isinstance(task, CollisionRecall):
        for flood, overlap in _floods(task):
            batches = (
                collision_batch(task, size, flood, overlap, [TEST, flood, i]).to(device) for i in parts
            )
            yield {"flood": flood, "overlap": list(overlap), **accuracy(model, batches)}
    else:
        width = settings["model"]["key_width"]
        for writes in task.test_writes:
            batches = (random_batch(task, size, writes, width, [TEST, writes, i]).to(device) for i in parts)
            yield {"writes": writes, **accuracy(model, batches)}


def _floods(task: CollisionRecall) -> list[tuple[int, tuple[float, float]]]:
    """Flood and range of the overlap of every test."""
    grid = [(flood, overlap) for flood in task.test_floods for overlap in task.test_overlaps]
    return [*grid, *((max(task.test_floods), (rho, rho)) for rho in task.curve)]


def summary(recipe: Recall, cells: Sequence[Cell], results: Results) -> dict[str, Any]:
    """Accuracies of every mixer by test, over seeds."""
    found: dict[str, Any] = {"seeds": list(recipe.seeds), "width": recipe.key_width}
    for name, task in (("collision", recipe.collision), ("random", recipe.random)):
        if task is None:
            continue
        found[name] = {"task": task.model_dump(mode="json"), "mixers": []}
        for spec in recipe.mixers:
            runs = [
                r
                for c, r in zip(cells, results, strict=True)
                if c.settings["task"] == name and c.settings["mixer"] == spec.model_dump(mode="json")
            ]
            if runs:
                found[name]["mixers"].append({"mixer": spec.label, **_over_seeds(runs)})
        if not found[name]["mixers"]:
            del found[name]
    return found


def _over_seeds(runs: Results) -> dict[str, Any]:
    tests: list[dict[str, Any]] = next((r["tests"] for r in runs if r["tests"]), [])
    rows = []
    for i, test in enumerate(tests):
        row = {key: value for key, value in test.items() if key not in ("accuracy", "rival")}
        for key in ("accuracy", "rival"):
            row[key] = spread([r["tests"][i][key] if r["tests"] else None for r in runs])
        rows.append(row)
    losses = spread([r["training"]["loss"] for r in runs])
    return {"parameters": runs[0]["parameters"], "loss": losses, "tests": rows}


def markdown(summary: dict[str, Any]) -> str:
    """Accuracy by flood length and overlap, and by the number of random keys."""
    lines: list[str] = []
    if "collision" in summary:
        task = summary["collision"]["task"]
        lines += [
            f"Accuracy after a flood, {task['pairs']} pairs, trained on floods of {task['floods']} and "
            f"overlaps of {task['overlap']}; mean ± deviation of seeds {summary['seeds']}; "
            f"chance {1 / (2 * task['pairs']):.4f}.",
            "",
        ]
        heads = [f"{t['flood']}, {_range(t['overlap'])}" for t in _columns(summary["collision"])]
        lines += _rows(summary["collision"], ["mixer", "training loss", *heads], summary["seeds"])
    if "random" in summary:
        task, width = summary["random"]["task"], summary["width"]
        lines += [
            "",
            f"Accuracy with n random keys in {width} channels, trained on n of {task['writes']}; "
            f"chance {1 / task['labels']:.4f}.",
            "",
        ]
        heads = [f"n = {t['writes']} ({t['writes'] / width:g} D)" for t in _columns(summary["random"])]
        lines += _rows(summary["random"], ["mixer", "training loss", *heads], summary["seeds"])
    return "\n".join(lines) + "\n"


def _columns(found: dict[str, Any]) -> list[dict[str, Any]]:
    return next((m["tests"] for m in found["mixers"] if m["tests"]), [])


def _range(overlap: Sequence[float]) -> str:
    low, high = overlap
    return f"{low:g}" if low == high else f"{low:g}-{high:g}"


def _rows(found: dict[str, Any], header: list[str], seeds: Sequence[int]) -> list[str]:
    rows = [
        [counted(m["mixer"], m["loss"], seeds), told(m["loss"]), *(told(t["accuracy"]) for t in m["tests"])]
        for m in found["mixers"]
    ]
    return table(header, rows)


def figures(summary: dict[str, Any], folder: Path) -> list[Path]:
    """`flood.png`, `overlap.png` and `random.png`, after the paper's Figure 3c and 3d."""
    from regraft.probes.recall_figures import draw

    return draw(summary, folder)
