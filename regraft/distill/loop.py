"""The one training loop: phases of a distillation and the control run go through it alike."""

from __future__ import annotations

import hashlib
import json
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from regraft.distill import checkpoint
from regraft.distill.data import Rows, RowStream
from regraft.distill.losses import Objective
from regraft.distill.stage import Stage
from regraft.distill.trainable import (
    evidence_parameters,
    parameter_groups,
    shares_prefix,
    trainable_names,
)
from regraft.layers import RegraftForCausalLM


@dataclass
class Progressed:
    """Where a run is; saved with every checkpoint."""

    step: int = 0  # over all stages
    tokens: int = 0
    seconds: float = 0.0
    data_sha256: str = ""  # chain over the ids of every row trained on, in order
    variance: dict[str, list[float]] = field(default_factory=dict)  # of the current stage
    places: dict[str, int] = field(default_factory=dict)  # places for tokens computed, by stage; with padding


@dataclass
class Loop:
    """Trains `student` through `stages` and writes metrics and checkpoints into `folder`.

    Args:
        student: the model that moves, float32, on the device to train on.
        teacher: what distillation losses compare with; None for the control.
        layers: converted layers, ascending.
        stages: what to do.
        stream: the rows, at their beginning.
        folder: run directory; `metrics.jsonl` and `checkpoints/` are made in it.
        every: steps between checkpoints. keep: checkpoints kept.
        autocast: number format of matrix products (float32 switches autocast off).
    """

    student: RegraftForCausalLM
    teacher: RegraftForCausalLM | None
    layers: tuple[int, ...]
    stages: list[Stage]
    stream: RowStream
    folder: Path
    every: int
    keep: int
    autocast: torch.dtype = torch.float32
    at: Progressed = field(default_factory=Progressed)

    @property
    def total(self) -> int:
        """Steps of all stages."""
        return sum(stage.steps for stage in self.stages)

    def resume(self) -> bool:
        """Go to the newest checkpoint, if there is one; metrics after it are dropped."""
        found = checkpoint.existing(self.folder / "checkpoints")
        if not found:
            return False
        state = checkpoint.read_state(found[-1])
        self.stream.restore(state.pop("data"))
        self.at = Progressed(**state)
        checkpoint.restore_parameters(found[-1], self.student)
        self._optimizer_from = found[-1]
        metrics = self.folder / "metrics.jsonl"
        if metrics.is_file():
            lines = metrics.read_text(encoding="utf-8").splitlines()
            kept = [line for line in lines if json.loads(line)["step"] <= self.at.step]
            metrics.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        return True

    def run(self) -> Progressed:
        """Train to the end.

        Raises:
            KeyboardInterrupt: after Ctrl-C, once the step is done and a checkpoint written.
        """
        moved: set[str] = set(evidence_parameters(self.student))
        first = 0
        with _progress(self.total, self.at.step) as bar, _interruptible() as stop, self._metrics() as metrics:
            for stage in self.stages:
                names = trainable_names(self.student, stage.train, self.layers)
                moved |= set(names)
                if self.at.step < first + stage.steps:
                    self._run_stage(stage, first, names, moved, bar, stop, metrics)
                first += stage.steps
        return self.at

    def _run_stage(
        self,
        stage: Stage,
        first: int,
        names: list[str],
        moved: set[str],
        bar: Any,
        stop: list[bool],
        metrics: Any,
    ) -> None:
        resumed = self.at.step > first
        evidence = evidence_parameters(self.student)
        learned = list(evidence) if stage.evidence is not None and stage.evidence.learn else []
        for name, p in self.student.named_parameters():
            p.requires_grad_(name in names or name in learned)
        groups = parameter_groups(self.student, [*names, *learned], stage.optimiser.weight_decay)
        optimizer = torch.optim.AdamW(groups, lr=stage.lr, betas=stage.optimiser.betas)
        if resumed:
            checkpoint.restore_optimizer(self._optimizer_from, optimizer)
        else:
            self.at.variance = {}
        shared = shares_prefix(self.student, self.teacher, self.layers, names)
        objective = Objective(stage.losses, self.layers, shared, self.at.variance, stage.logit_chunk)
        for step in range(self.at.step - first, stage.steps):
            began = time.monotonic()
            self._set_evidence(stage, step, evidence)
            rows = self.stream.take(stage.rows_at(step))
            values = self._step(stage, step, objective, optimizer, rows, learned)
            self.at.step += 1
            self.at.tokens += rows.tokens
            self.at.places[stage.name] = self.at.places.get(stage.name, 0) + rows.ids.numel()
            seconds = time.monotonic() - began
            self.at.seconds += seconds
            line = {
                "step": self.at.step,
                "stage": stage.name,
                "tokens": self.at.tokens,
                "tokens_per_second": round(rows.tokens / seconds, 1),
                "rows": self.at.data_sha256[:16],
                "lr": stage.lr_at(step),
                **values,
            }
            if evidence:
                line["evidence"] = float(torch.stack([p.detach().mean() for p in evidence.values()]).mean())
            metrics.write(json.dumps(line) + "\n")
            metrics.flush()
            bar(stage.name, line)
            last = step + 1 == stage.steps
            if last or stop[0] or self.at.step % self.every == 0:
                self._save(moved, optimizer)
            if stop[0]:
                raise KeyboardInterrupt

    def _step(
        self,
        stage: Stage,
        step: int,
        objective: Objective,
        optimizer: torch.optim.Optimizer,
        rows: Rows,
        learned: list[str],
    ) -> dict[str, float]:
        """One optimiser step; returns every loss, their weighted sum and the gradient norm."""
        digest = hashlib.sha256(self.at.data_sha256.encode() + rows.ids.numpy().tobytes())
        self.at.data_sha256 = digest.hexdigest()
        weights = {loss.kind: loss.weight for loss in stage.losses}
        sums = dict.fromkeys(weights, 0.0)
        optimizer.zero_grad(set_to_none=True)
        device = self.student.model.embeddings.weight.device
        micros = [micro.to(device) for micro in rows.split(stage.micro_batch or len(rows.ids))]
        autocast = partial(torch.autocast, device.type, self.autocast, self.autocast != torch.float32)
        if self.teacher is not None and not objective.variance:
            with autocast():
                objective.measure(self.teacher, micros)
        for micro in micros:
            with autocast():
                losses = objective(
                    self.student, self.teacher, micro, tokens=rows.tokens, targets=rows.targets
                )
            total = torch.stack([weight * losses[name] for name, weight in weights.items()]).sum()
            if total.requires_grad:
                total.backward()
            for name, loss in losses.items():
                sums[name] = sums.get(name, 0.0) + float(loss.detach())
        evidence = [p for n, p in evidence_parameters(self.student).items() if n in learned]
        if not stage.learns_evidence(step):  # the schedule still leads
            for p in evidence:
                p.grad = None
        moving = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.nn.utils.clip_grad_norm_(moving, stage.optimiser.clip or float("inf"))
        for group in optimizer.param_groups:
            group["lr"] = stage.lr_at(step)
        optimizer.step()
        with torch.no_grad():
            for p in evidence:
                p.clamp_(min=0)  # the layer clamps it too: below 0 it would have no gradient and never return
        return {
            "loss": sum(weight * sums[name] for name, weight in weights.items()),
            **sums,
            "grad_norm": float(norm),
        }

    @torch.no_grad()
    def _set_evidence(self, stage: Stage, step: int, evidence: dict[str, torch.nn.Parameter]) -> None:
        level = stage.evidence_at(step)
        for p in evidence.values():
            if level is not None:
                p.fill_(level)

    def _save(self, moved: set[str], optimizer: torch.optim.Optimizer) -> None:
        state = {k: v for k, v in vars(self.at).items() if k != "step"}
        state["data"] = self.stream.state()
        checkpoint.save(
            self.folder / "checkpoints",
            self.at.step,
            model=self.student,
            names=moved,
            optimizer=optimizer,
            state=state,
            keep=self.keep,
        )

    @contextmanager
    def _metrics(self) -> Iterator[Any]:
        with (self.folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
            yield file


@contextmanager
def _interruptible() -> Iterator[list[bool]]:
    """Turns the first Ctrl-C (or a TERM) into a wish to stop after this step."""
    stop = [False]

    def wish(*_: object) -> None:
        stop[0] = True
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a second one stops at once

    old = {s: signal.signal(s, wish) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


@contextmanager
def _progress(total: int, done: int) -> Iterator[Any]:
    """A live line: stage, bar, steps, losses, evidence, tokens a second, time left."""
    columns = (
        TextColumn("{task.description:>8}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[numbers]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns) as progress:
        task = progress.add_task("", total=total, completed=done, numbers="")

        def update(stage: str, line: dict[str, Any]) -> None:
            shown = [f"loss {line['loss']:.4g}"]
            shown += [f"evidence {line['evidence']:.2f}"] if "evidence" in line else []
            shown.append(f"{line['tokens_per_second']:,.0f} tokens/s")
            progress.update(task, advance=1, description=stage, numbers="  ".join(shown))

        yield update
