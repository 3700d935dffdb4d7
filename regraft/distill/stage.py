"""A stage: so many steps with these losses, this trainable set and these schedules. Phases are stages, and so
is the whole control run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from regraft.recipes.schema import Evidence, Optimiser, Recipe


@dataclass(frozen=True)
class Stage:
    """What the training loop needs to know of one stretch of training."""

    name: str
    losses: Sequence[Any]
    train: Any  # as `trainable_names` takes it
    lr: float
    optimiser: Optimiser
    batches: tuple[tuple[int, int], ...]  # (steps, rows a step), in order
    micro_batch: int | None
    logit_chunk: int
    evidence: Evidence | None

    @property
    def steps(self) -> int:
        """Optimiser steps of the stage."""
        return sum(n for n, _ in self.batches)

    def rows_at(self, step: int) -> int:
        """Rows of a step, counted from 0."""
        for steps, rows in self.batches:
            if step < steps:
                return rows
            step -= steps
        raise IndexError(step)

    def lr_at(self, step: int) -> float:
        """Learning rate of a step: a linear rise, then the schedule down to 0 after the last step."""
        warmup = math.ceil(self.optimiser.warmup * self.steps)
        if step < warmup:
            return self.lr * (step + 1) / (warmup + 1)
        done = (step - warmup) / max(1, self.steps - warmup)
        match self.optimiser.schedule:
            case "constant":
                return self.lr
            case "linear":
                return self.lr * (1 - done)
            case _:
                return self.lr * 0.5 * (1 + math.cos(math.pi * done))

    def evidence_at(self, step: int) -> float | None:
        """Evidence of a step; None where the schedule leaves it alone (no schedule, or learned from here)."""
        if self.evidence is None or self.learns_evidence(step):
            return None
        ramp = self._ramp_steps
        done = 1.0 if step >= ramp else (step + 1) / (ramp + 1)
        if self.evidence.shape == "cosine":
            done = 0.5 * (1 - math.cos(math.pi * done))
        return self.evidence.start + (self.evidence.end - self.evidence.start) * done

    def learns_evidence(self, step: int) -> bool:
        """Whether the evidence of each head is a trained parameter at this step."""
        return self.evidence is not None and self.evidence.learn and step > self._ramp_steps

    @property
    def _ramp_steps(self) -> int:
        assert self.evidence is not None
        return round(self.evidence.over * self.steps)


def phase_stages(recipe: Recipe) -> list[Stage]:
    """The phases of a recipe."""
    return [
        Stage(
            name=phase.name,
            losses=phase.losses,
            train=phase.train,
            lr=phase.lr,
            optimiser=phase,
            batches=(_steps(phase.tokens, phase.batch_tokens, recipe.data.seq_len),),
            micro_batch=phase.micro_batch,
            logit_chunk=phase.logit_chunk,
            evidence=phase.evidence,
        )
        for phase in recipe.phases
    ]


def control_stages(recipe: Recipe, names: Sequence[str] | None = None) -> list[Stage]:
    """The matched control: one stage over the rows of these phases (all), with cross-entropy."""
    phases = [stage for stage in phase_stages(recipe) if names is None or stage.name in names]
    return [
        Stage(
            name="control",
            losses=recipe.control.losses,
            train=phases[-1].train,
            lr=recipe.control.lr,
            optimiser=recipe.control,
            batches=tuple(batch for stage in phases for batch in stage.batches),
            micro_batch=phases[-1].micro_batch,
            logit_chunk=phases[-1].logit_chunk,
            evidence=None,
        )
    ]


def _steps(tokens: int, batch_tokens: int, seq_len: int) -> tuple[int, int]:
    """Steps and rows a step for a token budget; the last step is a whole one."""
    return math.ceil(tokens / batch_tokens), batch_tokens // seq_len
