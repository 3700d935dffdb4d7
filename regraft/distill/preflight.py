"""Checks of a recipe's training in seconds, before it takes days.

A student that is its teacher has loss 0 and gradient 0; a student a little away from it feels every loss in
every parameter that the loss can reach and the stage trains.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from regraft.distill.data import Rows
from regraft.distill.losses import Objective, needs_teacher
from regraft.distill.stage import Stage
from regraft.distill.trainable import evidence_parameters, shares_prefix, trainable_names
from regraft.errors import UserError
from regraft.layers import RegraftForCausalLM
from regraft.recipes.schema import BoundaryMSE, LayerNMSE

TOKENS = 80  # more than one chunk of the filter, so that its state matters
NOTHING = 1e-6  # below this a loss or gradient is 0; on a CPU it is so exactly
SHIFT = 0.02  # how far parameters move, relative to their size
LEARNED = 0.1  # evidence where no schedule says how far it gets


def preflight(
    student: RegraftForCausalLM,
    teacher: RegraftForCausalLM | None,
    stages: Sequence[Stage],
    layers: tuple[int, ...],
    *,
    autocast: torch.dtype = torch.float32,
) -> None:
    """Run the losses of every stage on a few made-up tokens; both models end as they were.

    Args:
        student, teacher: the models, on one device; no teacher for the control.
        stages: what is trained.
        layers: converted layers.
        autocast: number format of matrix products.

    Raises:
        UserError: a loss is not 0 where the student is its teacher, or does not reach what it should, or a
            stage would never leave its teacher.
    """
    if teacher is not None:
        _leaves_its_teacher(student, teacher, stages)
    rows = _made_up(student)
    for stage in stages:
        with torch.autocast(rows.ids.device.type, autocast, autocast != torch.float32):
            if teacher is not None and needs_teacher(stage.losses):
                _zero_at_the_teacher(teacher, stage, layers, rows)
            _reaches(student, teacher, stage, stages, layers, rows)


def _leaves_its_teacher(
    student: RegraftForCausalLM, teacher: RegraftForCausalLM, stages: Sequence[Stage]
) -> None:
    """At an exact start distillation losses are 0 and stay so: evidence or cross-entropy has to move it."""
    evidence = evidence_parameters(student)
    for stage in stages:
        schedule = stage.evidence if evidence else None
        if schedule is not None and (schedule.start or schedule.end):
            return
        if any(loss.kind == "cross_entropy" and loss.weight for loss in stage.losses):
            return
    theirs = dict(teacher.named_parameters())
    apart = any(bool(p.any()) for p in evidence.values()) or any(
        name in theirs and not torch.equal(p, theirs[name]) for name, p in student.named_parameters()
    )
    if not apart:
        reason = "the student is its teacher and every loss is 0 there: nothing would be trained."
        fix = "add cross_entropy" + (
            ", or let the evidence rise." if evidence else ": this mixer has no evidence."
        )
        raise UserError("phases", reason, fix)


def _made_up(model: RegraftForCausalLM) -> Rows:
    rng = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (1, TOKENS), generator=rng)
    real, first = torch.ones_like(ids, dtype=torch.bool), torch.zeros_like(ids, dtype=torch.bool)
    first[:, 0] = True
    return Rows(ids, real, first).to(model.model.embeddings.weight.device)


def _zero_at_the_teacher(
    teacher: RegraftForCausalLM, stage: Stage, layers: tuple[int, ...], rows: Rows
) -> None:
    losses = [loss for loss in stage.losses if needs_teacher([loss])]
    names = trainable_names(teacher, "converted", layers)
    with _training(teacher, names) as parameters:
        for kind, value, grads in _each_loss(losses, teacher, teacher, layers, True, rows, parameters):
            size = max([abs(value), *(float(g.abs().max()) for g in grads.values())])
            if not size <= NOTHING:  # NaN is no 0 either
                reason = (
                    f"{kind} is {value:.3g} where student and teacher are one; gradient up to {size:.3g}."
                )
                raise UserError(
                    f"phase {stage.name}", reason, "this is a mistake in the loss: please report it."
                )


def _reaches(
    student: RegraftForCausalLM,
    teacher: RegraftForCausalLM | None,
    stage: Stage,
    stages: Sequence[Stage],
    layers: tuple[int, ...],
    rows: Rows,
) -> None:
    names = set(trainable_names(student, stage.train, layers))
    evidence = evidence_parameters(student)
    if stage.evidence is not None and stage.evidence.learn:
        names |= set(evidence)
    shared = shares_prefix(student, teacher, layers, names)
    losses = [loss for loss in stage.losses if loss.weight]
    where, never = f"phase {stage.name}", set(names)
    with _shifted(student, names, _level(stage, stages)), _training(student, names) as parameters:
        for kind, value, grads in _each_loss(losses, student, teacher, layers, shared, rows, parameters):
            if not all(torch.isfinite(g).all() for g in grads.values()) or value != value:
                raise UserError(
                    where, f"{kind} or its gradient is no number.", "check the teacher's weights."
                )
            reached = {name for name, g in grads.items() if bool(g.any())}
            declared = {name for name in names if _in_reach(kind, name, layers)}
            never -= reached
            missing = sorted(declared - reached)
            if missing or not declared:
                what = _some(missing) if missing else "anything that the phase trains"
                raise UserError(where, f"{kind} does not reach {what}.", _FIX)
    if never:
        raise UserError(where, f"no loss reaches {_some(sorted(never))}.", _FIX)


_FIX = "train less, add a loss that reaches it, or let the evidence rise above 0."


def _level(stage: Stage, stages: Sequence[Stage]) -> float | None:
    """Highest evidence that a stage sees by schedules; None where none has led it so far."""
    level = None
    for earlier in stages:
        schedule = earlier.evidence
        if schedule is not None:
            level = schedule.end or (LEARNED if schedule.learn else 0.0)
        if earlier is stage:
            return level if schedule is None or level is None else max(schedule.start, level)
    return level


def _in_reach(kind: str, name: str, layers: tuple[int, ...]) -> bool:
    """Whether a loss depends on a parameter by its definition."""
    if kind == LayerNMSE().kind:
        return name.startswith(tuple(f"model.layers.{i}.attn." for i in layers))
    if kind == BoundaryMSE().kind:
        before = ("model.embeddings.", *(f"model.layers.{i}." for i in range(layers[-1] + 1)))
        return name.startswith(before)
    return True


def _each_loss(
    losses: Sequence[Any],
    student: RegraftForCausalLM,
    teacher: RegraftForCausalLM | None,
    layers: tuple[int, ...],
    shared: bool,
    rows: Rows,
    parameters: dict[str, nn.Parameter],
) -> Iterator[tuple[str, float, dict[str, Tensor]]]:
    """Name, value and gradients of one loss after the other."""
    for loss in losses:
        objective = Objective([loss], layers, shared)
        if teacher is not None:
            objective.measure(teacher, [rows])
        values = objective(student, teacher, rows, tokens=rows.tokens, targets=rows.targets)
        value = values[loss.kind]
        found = {}
        if value.requires_grad:
            grads = torch.autograd.grad(value, list(parameters.values()), allow_unused=True)
            found = {n: g for n, g in zip(parameters, grads, strict=True) if g is not None}
        yield loss.kind, float(value.detach()), found


@contextmanager
def _training(model: nn.Module, names: Sequence[str] | set[str]) -> Iterator[dict[str, nn.Parameter]]:
    """Only these parameters want gradients."""
    parameters = dict(model.named_parameters())
    before = {name: p.requires_grad for name, p in parameters.items()}
    try:
        for name, p in parameters.items():
            p.requires_grad_(name in names)
        yield {name: parameters[name] for name in parameters if name in names}
    finally:
        for name, p in parameters.items():
            p.requires_grad_(before[name])


@contextmanager
def _shifted(model: nn.Module, names: set[str], level: float | None) -> Iterator[None]:
    """The student a little away from where it is: trained parameters by 2 % of their size, and evidence."""
    rng = torch.Generator().manual_seed(1)
    parameters = dict(model.named_parameters())
    evidence = evidence_parameters(model)
    before = {n: parameters[n].detach().clone() for n in parameters if n in names or n in evidence}
    try:
        with torch.no_grad():
            for name, old in before.items():
                p = parameters[name]
                if name in evidence:
                    if level is not None:
                        p.fill_(level)
                    continue
                size = float(old.float().square().mean().sqrt()) or 1.0
                p.add_((SHIFT * size * torch.randn(p.shape, generator=rng)).to(p))
        yield
    finally:
        with torch.no_grad():
            for name, old in before.items():
                parameters[name].copy_(old)


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}"
