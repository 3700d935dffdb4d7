"""The one training loop: phases of a distillation and the control run go through it alike."""

from __future__ import annotations

import copy
import hashlib
import math
import time
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import set_seed

from regraft.distill import checkpoint
from regraft.distill.data import Rows, RowStream
from regraft.distill.engine import Engine, Step, whole
from regraft.distill.interrupt import interruptible
from regraft.distill.losses import Objective
from regraft.distill.metrics import Metrics, forget_after, live_line, memory_gb
from regraft.distill.stage import Stage
from regraft.distill.trainable import (
    evidence_parameters,
    parameter_groups,
    prefix_of,
    shares_prefix,
    trainable_names,
)
from regraft.errors import UserError
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
    loss_sum: float = 0.0  # over the steps since the last checkpoint
    loss_steps: int = 0


@dataclass
class Loop:
    """Trains `student` through `stages` and writes metrics and checkpoints into `folder`.

    Args:
        student: the model that moves, float32.
        teacher: what distillation losses compare with; None for the control.
        layers: converted layers, ascending.
        stages: what to do.
        stream: the rows, at their beginning; every process holds the whole stream.
        folder: run directory; `metrics.jsonl` and `checkpoints/` are made in it.
        every: steps between checkpoints. keep: checkpoints kept. best: keep the best one of each stage too.
        autocast: number format of matrix products (float32 switches autocast off).
        seed: of everything random but the order of data; drawn anew from it at every step.
        engine: devices and processes.
        wandb: send metrics there.
    """

    student: RegraftForCausalLM
    teacher: RegraftForCausalLM | None
    layers: tuple[int, ...]
    stages: list[Stage]
    stream: RowStream
    folder: Path
    every: int
    keep: int
    best: bool = False
    autocast: torch.dtype = torch.float32
    seed: int = 0
    engine: Engine = field(default_factory=Engine)
    wandb: bool = False
    at: Progressed = field(default_factory=Progressed)

    @property
    def total(self) -> int:
        """Tokens of all stages."""
        return sum(stage.tokens for stage in self.stages)

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints are."""
        return self.folder / "checkpoints"

    def resume(self) -> bool:
        """Go to the newest checkpoint, if there is one; metrics after it are dropped."""
        self.engine.once(partial(checkpoint.sweep, self.checkpoints))
        found = checkpoint.existing(self.checkpoints)
        state = checkpoint.read_state(found[-1]) if found else {}
        if found:
            self.stream.restore(state["data"], state["ledger"])
            self.at = Progressed(**state["at"])
            checkpoint.restore_parameters(found[-1], self.student)
            self._optimizer_from = found[-1]
        self.engine.once(partial(forget_after, self.folder, self.at.step))
        return bool(found)

    def run(self) -> Progressed:
        """Train to the end.

        Raises:
            KeyboardInterrupt: after Ctrl-C or a TERM, once the step is done and a checkpoint written.
            UserError: the loss is no longer a number, or a file cannot be written; the message says which
                checkpoint to go on from.
        """
        self._alike = shares_prefix(self.student, self.teacher, self.layers, ())
        module = self.engine.place(self.student, self.teacher)
        moved: set[str] = set(evidence_parameters(self.student))
        first = 0
        metrics = Metrics(self.folder, self.at.step, wandb=self.wandb) if self.engine.main else None
        try:
            with live_line(self.total, self.at.tokens, self.engine.main) as line, interruptible() as stop:
                for stage in self.stages:
                    names = trainable_names(self.student, stage.train, self.layers)
                    moved |= set(names)
                    if self.at.tokens < first + stage.tokens:
                        _Run(self, module, stage, first, names, moved, line, stop, metrics).run()
                    first += stage.tokens
        finally:
            if metrics is not None:
                metrics.close()
        return self.at


class _Run:
    """One stage of a loop."""

    def __init__(
        self,
        loop: Loop,
        step: Step,
        stage: Stage,
        first: int,
        names: list[str],
        moved: set[str],
        line: Any,
        stop: list[bool],
        metrics: Metrics | None,
    ) -> None:
        self.loop, self.stage, self.first, self.moved = loop, stage, first, moved
        self.engine, self.at, self.stream = loop.engine, loop.at, loop.stream
        self.line, self.stop, self.metrics = line, stop, metrics
        self.evidence = evidence_parameters(loop.student)
        learned = list(self.evidence) if stage.evidence is not None and stage.evidence.learn else []
        self.learned = [self.evidence[name] for name in learned]
        for name, p in loop.student.named_parameters():
            p.requires_grad_(name in names or name in learned)
        groups = parameter_groups(loop.student, [*names, *learned], stage.optimiser.weight_decay)
        self.optimizer = torch.optim.AdamW(groups, lr=stage.lr, betas=stage.optimiser.betas)
        if self.at.tokens > first:
            checkpoint.restore_optimizer(loop._optimizer_from, self.optimizer)
        else:
            self.at.variance, self.at.loss_sum, self.at.loss_steps = {}, 0.0, 0
        shared = loop._alike and not any(name.startswith(prefix_of(loop.layers)) for name in moved)
        step.objective = Objective(stage.losses, loop.layers, shared, self.at.variance, stage.logit_chunk)
        self.objective = step.objective
        self.module = self.engine.wrap(step)
        self.weights = {loss.kind: loss.weight for loss in stage.losses}

    @property
    def done(self) -> int:
        """Tokens of this stage done."""
        return self.at.tokens - self.first

    def run(self) -> None:
        while self.done < self.stage.tokens:
            began = time.monotonic()
            before = copy.deepcopy((self.at, self.stream.state(), self.stream.ledger))
            rows = self.stream.take(*self.stage.next_step(self.done))
            line = self._step(rows)
            if not math.isfinite(line["loss"] + line["grad_norm"]):
                self._give_up(line, *before)
            self._after(rows, line, time.monotonic() - began)
            stop = self.engine.any(self.stop[0])
            if self.done == self.stage.tokens or stop or self.at.step % self.loop.every == 0:
                self._save()
            if stop:
                raise KeyboardInterrupt

    def _step(self, rows: Rows) -> dict[str, float]:
        """One optimiser step; every loss, their weighted sum and the gradient norm. Nothing moves if that is
        no number."""
        stage, done = self.stage, self.done
        set_seed(_seed(self.loop.seed, self.at.step, self.engine.rank))
        self._set_evidence(stage.evidence_at(done, rows.tokens))
        self.optimizer.zero_grad(set_to_none=True)
        values = self._backward(rows)
        if not stage.learns_evidence(done):  # the schedule still leads
            for p in self.learned:
                p.grad = None
        moving = [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = nn.utils.clip_grad_norm_(moving, stage.optimiser.clip or float("inf"))
        values["grad_norm"] = float(whole(norm))
        for group in self.optimizer.param_groups:
            group["lr"] = stage.lr_at(done, rows.tokens)
        if math.isfinite(values["loss"] + values["grad_norm"]):
            self.optimizer.step()
        with torch.no_grad():
            for p in self.learned:
                p.clamp_(min=0)  # the layer clamps it too: below 0 it would have no gradient and never return
        return values

    def _backward(self, rows: Rows) -> dict[str, float]:
        """Gradients of a whole step in the parameters, whatever it was split into."""
        loop, engine = self.loop, self.engine
        micros = engine.micro_batches(rows, self.stage.micro_batch)
        device, kind = engine.device.type, loop.autocast
        autocast = partial(torch.autocast, device, kind, kind != torch.float32)
        if loop.teacher is not None and not self.objective.variance:
            with autocast():
                self.objective.measure(loop.teacher, micros, engine.sum)
        sums: dict[str, Tensor] = {}
        for i, micro in enumerate(micros):
            with engine.accumulating(self.module, i + 1 == len(micros)):
                with autocast():
                    losses = self.module(micro, rows.tokens, rows.targets)
                # processes average their gradients; the parts of one step are to be added
                total = torch.stack([w * losses[name] for name, w in self.weights.items()]).sum()
                (total * engine.world).backward()
            for name, loss in losses.items():
                sums[name] = sums.get(name, 0.0) + loss.detach().double()
        totals = engine.sum(torch.stack(list(sums.values()))).tolist()
        values = dict(zip(sums, totals, strict=True))
        return {"loss": sum(w * values[name] for name, w in self.weights.items()), **values}

    @torch.no_grad()
    def _set_evidence(self, level: float | None) -> None:
        for p in self.evidence.values():
            if level is not None:
                p.fill_(level)

    def _after(self, rows: Rows, values: dict[str, float], seconds: float) -> None:
        """Note a step that went well."""
        at = self.at
        lr = self.stage.lr_at(self.done, rows.tokens)
        at.data_sha256 = hashlib.sha256(at.data_sha256.encode() + rows.ids.numpy().tobytes()).hexdigest()
        at.step, at.tokens, at.seconds = at.step + 1, at.tokens + rows.tokens, at.seconds + seconds
        at.places[self.stage.name] = at.places.get(self.stage.name, 0) + rows.ids.numel()
        at.loss_sum, at.loss_steps = at.loss_sum + values["loss"], at.loss_steps + 1
        line: dict[str, Any] = {
            "step": at.step,
            "stage": self.stage.name,
            "tokens": at.tokens,
            "tokens_per_second": round(rows.tokens / seconds, 1),
            "memory_gb": round(memory_gb(self.engine.device), 3),
            "rows": at.data_sha256[:16],
            "lr": lr,
            **values,
        }
        if self.evidence:
            means = [whole(p.detach()).mean() for p in self.evidence.values()]
            line["evidence"] = float(torch.stack(means).mean())
        if self.metrics is not None:
            self._writing(partial(self.metrics.write, line))
        self.line(line)

    def _save(self) -> None:
        """Write a checkpoint; a process that cannot write stops all of them."""
        at = self.at
        mean = at.loss_sum / max(1, at.loss_steps)
        at.loss_sum, at.loss_steps = 0.0, 0
        state = {
            "at": asdict(at),
            "data": self.stream.state(),
            "ledger": self.stream.ledger,
            "stage": self.stage.name,
            "ends_stage": self.done == self.stage.tokens,
            "loss": mean,
        }
        parameters = dict(self.loop.student.named_parameters())
        saved = {name: whole(parameters[name].detach()) for name in sorted(self.moved)}
        moments = {name: whole(m) for name, m in checkpoint.moments(self.optimizer).items()}
        write = partial(
            checkpoint.save,
            self.loop.checkpoints,
            at.step,
            parameters=saved,
            moments=moments,
            state=state,
            keep=self.loop.keep,
            best=self.loop.best,
        )
        self.engine.once(partial(self._writing, write))

    def _writing(self, write: Any) -> None:
        """Write something; a full disk ends the run with what to do."""
        try:
            write()
        except OSError as error:
            reason = f"step {self.at.step} cannot be written: {error.strerror or error}."
            raise UserError(self.loop.folder, reason, f"make room, then {self._go_on()}") from error

    def _give_up(self, line: dict[str, float], at: Progressed, data: Any, ledger: Any) -> None:
        """End at a loss that is no number: save the state before that step."""
        bad = [name for name, value in line.items() if not math.isfinite(value)]
        number = at.step + 1
        vars(self.at).update(vars(at))
        self.stream.restore(data, ledger)
        if at.tokens > self.first and all(bool(whole(p).isfinite().all()) for p in self._parameters()):
            self._save()
        reason = f"step {number} of stage {self.stage.name}: {', '.join(bad)} is no number."
        fix = f"lower lr or clip in a new run; {self._go_on()}"
        raise UserError(self.loop.folder, reason, fix)

    def _parameters(self) -> list[Tensor]:
        return [p.detach() for group in self.optimizer.param_groups for p in group["params"]]

    def _go_on(self) -> str:
        found = checkpoint.existing(self.loop.checkpoints)
        return (
            f"--resume goes on from {found[-1].name}." if found else "start again: no checkpoint was written."
        )


def _seed(*parts: int) -> int:
    """One seed of several numbers, so that what is random in a step depends on nothing before it."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "big")
