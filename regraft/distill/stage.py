"""A stage: so many tokens with these losses, this trainable set and these schedules. Phases are stages, and
so is the whole control run.

Schedules are functions of the tokens done, so they do not depend on how much padding a step holds.
"""

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
    segments: tuple[tuple[int, int], ...]  # (tokens, rows a step), in order; a step never crosses a segment
    micro_batch: int | None
    logit_chunk: int
    evidence: Evidence | None

    @property
    def tokens(self) -> int:
        """Trained tokens of the stage."""
        return sum(tokens for tokens, _ in self.segments)

    def next_step(self, done: int) -> tuple[int, int]:
        """Rows and most tokens of the step after `done` tokens of the stage."""
        for tokens, rows in self.segments:
            if done < tokens:
                return rows, tokens - done
            done -= tokens
        raise IndexError(done)

    def lr_at(self, done: int, tokens: int) -> float:
        """Learning rate of a step of `tokens` after `done`, read at its middle: a linear rise from 0, then
        the schedule down to 0 at the end of the stage."""
        share, warmup = (done + tokens / 2) / self.tokens, self.optimiser.warmup
        if share < warmup:
            return self.lr * share / warmup
        gone = (share - warmup) / (1 - warmup)
        match self.optimiser.schedule:
            case "constant":
                return self.lr
            case "linear":
                return self.lr * (1 - gone)
            case _:
                return self.lr * 0.5 * (1 + math.cos(math.pi * gone))

    def evidence_at(self, done: int, tokens: int) -> float | None:
        """Evidence of a step, read at its end, so that one step at least has the ramp's last value; None
        where the schedule leaves it alone (no schedule, or learned from here)."""
        if self.evidence is None or self.learns_evidence(done):
            return None
        ramp = self.evidence.over * self.tokens
        gone = min(1.0, (done + tokens) / ramp) if ramp else 1.0
        if self.evidence.shape == "cosine":
            gone = 0.5 * (1 - math.cos(math.pi * gone))
        return self.evidence.start + (self.evidence.end - self.evidence.start) * gone

    def learns_evidence(self, done: int) -> bool:
        """Whether the evidence of each head is a trained parameter in the step after `done` tokens."""
        return bool(
            self.evidence and self.evidence.learn and done and done >= self.evidence.over * self.tokens
        )


def phase_stages(recipe: Recipe) -> list[Stage]:
    """The phases of a recipe."""
    return [
        Stage(
            name=phase.name,
            losses=phase.losses,
            train=phase.train,
            lr=phase.lr,
            optimiser=phase,
            segments=((phase.tokens, phase.batch_tokens // recipe.data.seq_len),),
            micro_batch=phase.micro_batch,
            logit_chunk=phase.logit_chunk,
            evidence=phase.evidence,
        )
        for phase in recipe.phases
    ]


def control_stages(
    recipe: Recipe, names: Sequence[str] | None = None, tokens: int | None = None
) -> list[Stage]:
    """The matched control: one stage over the rows of these phases (all), with cross-entropy.

    With `tokens` it is cut short there, or goes on so far with steps like the last.
    """
    phases = [stage for stage in phase_stages(recipe) if names is None or stage.name in names]
    segments = [segment for stage in phases for segment in stage.segments]
    if tokens is not None:
        left, cut = tokens, []
        for most, rows in segments:
            cut.append((min(most, left), rows))
            left -= cut[-1][0]
        segments = [segment for segment in (*cut, (left, segments[-1][1])) if segment[0]]
    return [
        Stage(
            name="control",
            losses=recipe.control.losses,
            train=phases[-1].train,
            lr=recipe.control.lr,
            optimiser=recipe.control,
            segments=tuple(segments),
            micro_batch=phases[-1].micro_batch,
            logit_chunk=phases[-1].logit_chunk,
            evidence=None,
        )
    ]
