"""Multi-query associative recall: which mixers learn to bind, to overwrite and to leave alone.

Models are Zoology's: blocks without MLP, embedding and read-out tied. Keys and values come from one
vocabulary, so nothing but their place tells them apart (paper 000, 4.2).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regraft.probes.backbone import Backbone, parameters
from regraft.probes.mixers import mixer_config
from regraft.probes.mqar_data import TEST, TRAIN, VALIDATION, Asked, draw
from regraft.probes.pool import Tick
from regraft.probes.runner import Cell, Results
from regraft.probes.schema import MixerSpec, Mqar, MqarTask, Training
from regraft.probes.tables import counted, spread, table, told
from regraft.probes.train import train

SHAPE = ("heads", "conv", "layers", "vocabulary", "chunk_size")
DATA = ("vocabulary", "filler", "stop_at", "validation", "sequences")


def cells(recipe: Mqar) -> list[Cell]:
    """A run a task, mixer, width, learning rate and seed."""
    found: list[Cell] = []
    for task in recipe.tasks:
        for spec in recipe.mixers:
            for width in recipe.widths:
                settings = {
                    "task": task.model_dump(mode="json"),
                    "data": {key: getattr(recipe, key) for key in DATA},
                    "mixer": spec.model_dump(mode="json"),
                    "model": {"width": width, **{key: getattr(recipe, key) for key in SHAPE}},
                }
                model_of(settings)  # a mixer that cannot be built shows before anything runs
                found += _runs(recipe, settings, f"{task.name}-{spec.label}-{width}")
    return found


def _runs(recipe: Mqar, settings: dict[str, Any], name: str) -> Iterator[Cell]:
    for rate in recipe.rates:
        training = recipe.train.model_copy(update={"lr": rate}).model_dump(mode="json")
        for seed in recipe.seeds:
            yield Cell(f"{name}-{rate:g}-{seed}", {**settings, "train": training, "seed": seed})


def model_of(settings: dict[str, Any]) -> Backbone:
    """The model of a cell, initialised from torch's generator.

    Raises:
        UserError: a mixer that cannot be built, or heads that do not divide the width.
    """
    m, spec = settings["model"], MixerSpec.model_validate(settings["mixer"])
    config = mixer_config(spec, m["width"], m["heads"], m["conv"], intermediate_size=1, use_gate=False)
    model = Backbone(
        config,
        nn.Embedding(m["vocabulary"], m["width"]),
        nn.Linear(m["width"], m["vocabulary"], bias=False),
        m["layers"],
        spec,
        mlp=False,
        chunk_size=m["chunk_size"],
    )
    model.readout.weight = model.embed.weight
    return model


def run(settings: dict[str, Any], device: str, tick: Tick) -> dict[str, Any]:
    """Train one model, validate it, and test it at every size."""
    task, data = MqarTask.model_validate(settings["task"]), settings["data"]
    training = Training.model_validate(settings["train"])
    torch.manual_seed(settings["seed"])
    model = model_of(settings).to(device)

    def batch(step: int) -> Asked:
        return batch_of(settings, training.batch, step).to(device)

    def validated() -> float:
        each = -(-data["validation"] // len(task.train))
        return statistics.fmean(
            _tested(model, settings, size, VALIDATION, each, device)["accuracy"] for size in task.train
        )

    found = train(model, batch, loss, training, tick, lambda: validated() >= data["stop_at"])
    tests = (
        []
        if found["diverged"]
        else [
            {"size": list(size), **_tested(model, settings, size, TEST, data["sequences"], device)}
            for size in task.test
        ]
    )
    validation = 0.0 if found["diverged"] else validated()
    return {"training": found, "parameters": parameters(model), "validation": validation, "tests": tests}


def batch_of(settings: dict[str, Any], size: int, step: int) -> Asked:
    """The training batch of one step of a cell: its size goes round those of the task."""
    task, data = MqarTask.model_validate(settings["task"]), settings["data"]
    sizes = task.train[step % len(task.train)]
    seed = [TRAIN, settings["seed"], step]
    return draw(task, sizes, data["vocabulary"], data["filler"], size, seed)


def loss(model: nn.Module, batch: Asked) -> Tensor:
    """Cross-entropy at the queries."""
    return F.cross_entropy(model(batch.ids, at=batch.at).flatten(0, 1), batch.answer.flatten())


def _tested(
    model: nn.Module, settings: dict[str, Any], size: tuple[int, int], split: int, count: int, device: str
) -> dict[str, Any]:
    task, data = MqarTask.model_validate(settings["task"]), settings["data"]
    each = min(count, settings["train"]["batch"])
    batches = (
        draw(task, size, data["vocabulary"], data["filler"], each, [split, i]).to(device)
        for i in range(-(-count // each))
    )
    return accuracy(model, batches)


@torch.no_grad()
def accuracy(model: nn.Module, batches: Iterator[Asked]) -> dict[str, float | None]:
    """Share of queries answered right: of all keys, of those written twice, of the others; or None."""
    right, count = [0, 0], [0, 0]
    for batch in batches:
        hit = model(batch.ids, at=batch.at).argmax(-1) == batch.answer
        for kind in (0, 1):
            of_kind = batch.updated == bool(kind)
            right[kind] += int((hit & of_kind).sum())
            count[kind] += int(of_kind.sum())
    untouched, updated = (r / c if c else None for r, c in zip(right, count, strict=True))
    return {"accuracy": sum(right) / sum(count), "updated": updated, "untouched": untouched}


def summary(recipe: Mqar, cells: Sequence[Cell], results: Results) -> dict[str, Any]:
    """Accuracies by task, mixer and width, over seeds, at the learning rate with the best validation."""
    tasks = []
    for task in recipe.tasks:
        mixers = []
        for spec in recipe.mixers:
            of_mixer = [
                (c.settings, r)
                for c, r in zip(cells, results, strict=True)
                if c.settings["task"] == task.model_dump(mode="json")
                and c.settings["mixer"] == spec.model_dump(mode="json")
            ]
            by_width = ((w, [p for p in of_mixer if p[0]["model"]["width"] == w]) for w in recipe.widths)
            widths = [_best(runs, w) for w, runs in by_width if runs]
            if widths:
                mixers.append({"mixer": spec.label, "widths": widths})
        if mixers:
            tasks.append({"task": task.model_dump(mode="json"), "mixers": mixers})
    return {"seeds": list(recipe.seeds), "rates": list(recipe.rates), "tasks": tasks}


def _best(runs: list[tuple[dict[str, Any], dict[str, Any]]], width: int) -> dict[str, Any]:
    """The tests of a width at its best rate, among those that have been run with the most seeds.

    A run counts as a guess where its validation is no better than that of a reader who knows the values and
    not whose they are, one in `n`.
    """
    guess = statistics.fmean(1 / n for _, n in runs[0][0]["task"]["train"])
    by_rate: dict[float, list[dict[str, Any]]] = {}
    for settings, result in runs:
        by_rate.setdefault(settings["train"]["lr"], []).append(result)
    tried = {lr: spread([r["validation"] for r in by_rate[lr]]) for lr in sorted(by_rate)}
    most = max(map(len, by_rate.values()))
    rate = max((lr for lr in tried if len(by_rate[lr]) == most), key=lambda lr: tried[lr]["mean"])
    chosen = by_rate[rate]
    tests: list[dict[str, Any]] = next((r["tests"] for r in chosen if r["tests"]), [])
    rows = []
    for i, test in enumerate(tests):
        row: dict[str, Any] = {"size": test["size"]}
        for key in ("accuracy", "updated", "untouched"):
            if test[key] is not None:
                row[key] = spread([r["tests"][i][key] if r["tests"] else None for r in chosen])
        rows.append(row)
    return {
        "width": width,
        "rate": rate,
        "parameters": chosen[0]["parameters"],
        "steps": spread([float(r["training"]["steps"]) for r in chosen]),
        "validation": tried[rate],
        "tried": [
            {"rate": lr, "validation": found, "guesses": sum(v <= guess for v in found["values"])}
            for lr, found in tried.items()
        ],
        "tests": rows,
    }


def markdown(summary: dict[str, Any]) -> str:
    """One table a task."""
    lines = [
        f"Accuracy, mean ± deviation of seeds {summary['seeds']}, at the rate with the best validation of "
        f"{summary['rates']}."
    ]
    for found in summary["tasks"]:
        task = found["task"]
        kinds = ("accuracy", "updated", "untouched") if task["updated"] else ("accuracy",)
        header = ["mixer", "width", "rate", "validation by rate", "steps"]
        header += [f"T = {T}, n = {n}{_kind(k)}" for T, n in task["test"] for k in kinds]
        rows = [
            [
                counted(m["mixer"], w["validation"], summary["seeds"]),
                str(w["width"]),
                f"{w['rate']:g}",
                ", ".join(map(_tried, w["tried"])),
                told(w["steps"], 0),
                *(told(t[k]) if k in t else "" for t in w["tests"] for k in kinds),
            ]
            for m in found["mixers"]
            for w in m["widths"]
        ]
        lines += ["", f"{task['name']}, trained on [tokens, pairs] of {task['train']}:", ""]
        lines += table(header, rows)
    return "\n".join(lines) + "\n"


def _tried(rate: dict[str, Any]) -> str:
    text, guesses = f"{rate['rate']:g}: {rate['validation']['mean']:.2f}", rate["guesses"]
    return f"{text} ({guesses} of {len(rate['validation']['values'])} at chance)" if guesses else text


def _kind(name: str) -> str:
    return "" if name == "accuracy" else f", {name}"


def figures(summary: dict[str, Any], folder: Path) -> list[Path]:
    """`width.png`, after the paper's Figure 4, `pairs.png`, and `updates.png` where keys are rewritten."""
    from regraft.probes.mqar_figures import draw as figure

    return figure(summary, folder)
