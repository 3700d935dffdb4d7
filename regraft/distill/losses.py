"""The losses: each a sum over real tokens, divided by the count of the WHOLE step.

So the gradient does not depend on how a step is split into micro-batches or ranks, and a fully masked one
gives 0.
Distances are divided by the teacher's variance at that place, measured once on the first step of a stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from regraft.distill.data import Rows
from regraft.distill.divergence import HEAD_LOSSES
from regraft.distill.head import LOGIT_CHUNK, head_losses
from regraft.layers import RegraftForCausalLM
from regraft.recipes.schema import BoundaryMSE, CrossEntropy, LayerNMSE


def needs_teacher(losses: Iterable[Any]) -> bool:
    """Whether any of the losses compares with a teacher."""
    return any(not isinstance(loss, CrossEntropy) for loss in losses)


@dataclass
class Trace:
    """What one pass saw. Keys are layer indices; tensors are `[R,T,d]`."""

    entry: Tensor | None = None  # input of the first traced layer's block
    mixer_in: dict[int, Tensor] = field(default_factory=dict)
    mixer_out: dict[int, Tensor] = field(default_factory=dict)
    boundary: dict[int, Tensor] = field(default_factory=dict)  # output of the block
    final: Tensor | None = None  # after the last norm; None if the pass stopped early


def trace(
    model: RegraftForCausalLM,
    rows: Rows,
    layers: Sequence[int],
    *,
    entry: Tensor | None = None,
    whole: bool = True,
) -> Trace:
    """Run the decoder and keep what happens at `layers` (ascending).

    Args:
        model: the decoder.
        rows: the input; padding stands at the end of a row, where a causal model cannot see it.
        layers: where to look.
        entry: input of block `layers[0]`, to leave out the blocks before it.
        whole: False stops after block `layers[-1]`.
    """
    seen = Trace()
    body = model.model
    hooks = [hook for i in layers for hook in _taps(body.layers[i], i, seen)]
    try:
        first = 0 if entry is None else layers[0]
        h = body.embeddings(rows.ids) if entry is None else entry
        for i, block in enumerate(body.layers[first : None if whole else layers[-1] + 1], start=first):
            if i == layers[0]:
                seen.entry = h
            h = block(h, None, None, rows.cu_seqlens)
        seen.final = body.norm(h) if whole else None
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def _taps(block: Any, layer: int, seen: Trace) -> list[Any]:
    def at_mixer(_: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Any]) -> None:
        seen.mixer_in[layer], seen.mixer_out[layer] = inputs[0], output[0]

    def at_block(_: Any, __: Any, output: Tensor) -> None:
        seen.boundary[layer] = output

    return [block.attn.register_forward_hook(at_mixer), block.register_forward_hook(at_block)]


@dataclass
class Objective:
    """The losses of a stage on one student, and the teacher's variances they are measured in.

    Args:
        losses: items of the recipe, one a kind.
        layers: converted layers, ascending.
        shared_prefix: teacher and student are equal before `layers[0]`, so that part runs once.
        variance: `{"mixer": [...], "boundary": [...]}`, one number a layer; `measure` fills it.
        logit_chunk: tokens whose logits exist at once.
    """

    losses: Sequence[Any]
    layers: tuple[int, ...]
    shared_prefix: bool
    variance: dict[str, list[float]] = field(default_factory=dict)
    logit_chunk: int = LOGIT_CHUNK

    @property
    def whole(self) -> bool:
        """Whether the models run to their heads."""
        return bool(self._head)

    @property
    def _head(self) -> list[Any]:
        return [loss for loss in self.losses if isinstance(loss, HEAD_LOSSES)]

    @property
    def _places(self) -> list[str]:
        places = {"mixer": LayerNMSE, "boundary": BoundaryMSE}
        return [name for name, kind in places.items() if any(isinstance(x, kind) for x in self.losses)]

    @torch.no_grad()
    def measure(
        self,
        teacher: RegraftForCausalLM,
        micro_batches: Iterable[Rows],
        reduce: Callable[[Tensor], Tensor] = lambda x: x,
    ) -> None:
        """Measure the teacher's variances on the rows of a whole step, however it is split.

        Args:
            teacher: the model.
            micro_batches: the rows of this process, on its device.
            reduce: sums a tensor over all processes.
        """
        sums: dict[str, Tensor] = {}  # [layers, 3, d]: count, sum and sum of squares by channel
        for rows in micro_batches if self._places else ():
            seen = trace(teacher, rows, self.layers, whole=False)
            weight = rows.real[..., None].double()
            for name in self._places:
                found = seen.mixer_out if name == "mixer" else seen.boundary
                xs = [found[i].double() for i in self.layers]
                new = torch.stack(
                    [
                        torch.stack([(weight * x**p).sum((0, 1)).expand(x.shape[-1]) for p in range(3)])
                        for x in xs
                    ]
                )
                sums[name] = sums[name] + new if name in sums else new
        for name, mine in sums.items():
            count, total, squares = reduce(mine).unbind(1)
            variances = (squares / count - (total / count).square()).mean(-1)
            self.variance[name] = [max(float(v), 1e-12) for v in variances]

    def __call__(
        self,
        student: RegraftForCausalLM,
        teacher: RegraftForCausalLM | None,
        rows: Rows,
        *,
        tokens: int,
        targets: int,
    ) -> dict[str, Tensor]:
        """Each loss by its name, unweighted, as this micro-batch's part of the step's mean.

        `layer_nmse.3` and `boundary_mse.3`, what layer 3 alone has, stand beside them without a gradient.

        Args:
            student, teacher: the models; no teacher is needed for cross-entropy alone.
            rows: the micro-batch.
            tokens, targets: real tokens and predicted tokens of the whole step.
        """
        whole = self.whole
        seen = Trace()
        if needs_teacher(self.losses):
            assert teacher is not None
            with torch.no_grad():
                seen = trace(teacher, rows, self.layers, whole=whole)
        mine = Trace()
        if whole or "boundary" in self._places:
            entry = seen.entry if self.shared_prefix else None
            mine = trace(student, rows, self.layers, entry=entry, whole=whole)
        results: dict[str, Tensor] = {}
        for loss in self.losses:
            if isinstance(loss, LayerNMSE):
                outputs = [
                    student.get_submodule(f"model.layers.{i}.attn")(
                        seen.mixer_in[i], cu_seqlens=rows.cu_seqlens
                    )[0]
                    for i in self.layers
                ]
                parts = self._distances("mixer", outputs, seen.mixer_out, rows, tokens)
            elif isinstance(loss, BoundaryMSE):
                outputs = [mine.boundary[i] for i in self.layers]
                parts = self._distances("boundary", outputs, seen.boundary, rows, tokens)
            else:
                continue
            results[loss.kind] = torch.stack(parts).mean()
            results |= {f"{loss.kind}.{i}": part.detach() for i, part in zip(self.layers, parts, strict=True)}
        return results | self._head_losses(student, teacher, mine, seen, rows, targets)

    def _distances(
        self, place: str, mine: list[Tensor], theirs: dict[int, Tensor], rows: Rows, tokens: int
    ) -> list[Tensor]:
        """For each layer the mean over channels of the squared difference over the teacher's variance."""
        per_token = rows.real / max(1, tokens)
        return [
            ((y.float() - theirs[i].float()).square().mean(-1) * per_token).sum() / variance
            for i, y, variance in zip(self.layers, mine, self.variance[place], strict=True)
        ]

    def _head_losses(
        self,
        student: RegraftForCausalLM,
        teacher: RegraftForCausalLM | None,
        mine: Trace,
        seen: Trace,
        rows: Rows,
        targets: int,
    ) -> dict[str, Tensor]:
        if not self._head:
            return {}
        assert mine.final is not None
        at = rows.predicting
        theirs: dict[str, Tensor] = {}
        if teacher is not None and seen.final is not None:
            theirs = {"teacher_h": seen.final.flatten(0, 1)[at], "teacher_head": teacher.lm_head.weight}
        sums = head_losses(
            self._head,
            mine.final.flatten(0, 1)[at],
            student.lm_head.weight,
            rows.ids.flatten()[at + 1],
            chunk=self.logit_chunk,
            **theirs,
        )
        return {
            loss.kind: total / max(1, targets) for loss, total in zip(self._head, sums.unbind(), strict=True)
        }
