"""The losses: each a sum over real tokens, divided by the count of the WHOLE step.

So the gradient does not depend on how a step is split into micro-batches, and a fully masked one gives 0.
Distances are divided by the teacher's variance at that place, measured once on the first step of a stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regraft.distill.data import Rows
from regraft.layers import RegraftForCausalLM
from regraft.recipes.schema import BoundaryMSE, CrossEntropy, ForwardKL, LayerNMSE

HEAD_TOKENS = 1024  # tokens whose logits exist at once
Chunk = Callable[[Tensor, Tensor, Tensor], Tensor]  # (hidden, other, head) of some tokens -> sum of losses


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
        losses: items of the recipe.
        layers: converted layers, ascending.
        shared_prefix: teacher and student are equal before `layers[0]`, so that part runs once.
    """

    losses: Sequence[Any]
    layers: tuple[int, ...]
    shared_prefix: bool
    variance: dict[str, list[float]] = field(default_factory=dict)

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

        Args:
            student, teacher: the models; no teacher is needed for cross-entropy alone.
            rows: the micro-batch.
            tokens, targets: real tokens and predicted tokens of the whole step.
        """
        kinds = {loss.kind for loss in self.losses}
        only_layers = kinds == {"layer_nmse"}
        seen = Trace()
        if kinds != {"cross_entropy"}:
            assert teacher is not None
            with torch.no_grad():
                seen = trace(teacher, rows, self.layers, whole=not only_layers)
                self._measure(seen, rows)
        mine = Trace()
        if not only_layers:
            mine = trace(student, rows, self.layers, entry=seen.entry if self.shared_prefix else None)
        per_token = rows.real / max(1, tokens)
        results: dict[str, Tensor] = {}
        for loss in self.losses:
            match loss:
                case LayerNMSE():
                    mixers = {i: student.model.layers[i].get_submodule("attn") for i in self.layers}
                    outputs = [
                        mixers[i](seen.mixer_in[i], cu_seqlens=rows.cu_seqlens)[0] for i in self.layers
                    ]
                    results[loss.kind] = self._distance("mixer", outputs, seen.mixer_out, per_token)
                case BoundaryMSE():
                    outputs = [mine.boundary[i] for i in self.layers]
                    results[loss.kind] = self._distance("boundary", outputs, seen.boundary, per_token)
                case ForwardKL():
                    results[loss.kind] = _kl(student, teacher, mine, seen, rows, loss.temperature, targets)
                case CrossEntropy():
                    results[loss.kind] = _cross_entropy(student, mine, rows, targets)
        return results

    def _measure(self, seen: Trace, rows: Rows) -> None:
        """The teacher's variance per place, on the first rows that a stage sees."""
        if self.variance:
            return
        for name, values in (("mixer", seen.mixer_out), ("boundary", seen.boundary)):
            picked = (values[i][rows.real].float() for i in self.layers)
            self.variance[name] = [max(float(v.var(0, correction=0).mean()), 1e-12) for v in picked]

    def _distance(
        self, place: str, mine: list[Tensor], theirs: dict[int, Tensor], per_token: Tensor
    ) -> Tensor:
        """Mean over layers and channels of the squared difference over the teacher's variance."""
        parts = [
            ((y.float() - theirs[i].float()).square().mean(-1) * per_token).sum() / variance
            for i, y, variance in zip(self.layers, mine, self.variance[place], strict=True)
        ]
        return torch.stack(parts).mean()


class _ForwardKL(torch.autograd.Function):
    """KL(teacher ‖ student) per token in float32; its gradient is the difference of the probabilities.

    Written out so that equal logits give exactly 0, value and gradient.
    """

    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
        log_s = F.log_softmax(student.float() / temperature, dim=-1)
        log_t = F.log_softmax(teacher.float() / temperature, dim=-1)
        p_t = log_t.exp()
        ctx.save_for_backward(log_s.exp() - p_t)
        ctx.temperature, ctx.dtype = temperature, student.dtype
        return (p_t * (log_t - log_s)).sum(-1) * temperature**2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (difference,) = ctx.saved_tensors
        return (grads[0][..., None] * difference * ctx.temperature).to(ctx.dtype), None, None


def forward_kl(student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    """`T² KL(softmax(teacher / T) ‖ softmax(student / T))` of logits `[...,vocab]`, per token, float32."""
    return _ForwardKL.apply(student, teacher, temperature)


def _kl(
    student: RegraftForCausalLM,
    teacher: RegraftForCausalLM | None,
    mine: Trace,
    seen: Trace,
    rows: Rows,
    temperature: float,
    targets: int,
) -> Tensor:
    assert teacher is not None and mine.final is not None and seen.final is not None

    def chunk(h_s: Tensor, h_t: Tensor, head: Tensor) -> Tensor:
        with torch.no_grad():
            reference = teacher.lm_head(h_t)
        return forward_kl(F.linear(h_s, head), reference, temperature).sum()

    predicts = rows.predicted
    h_s, h_t = mine.final[:, :-1][predicts], seen.final[:, :-1][predicts]
    return _SumOverTokens.apply(chunk, h_s, h_t, student.lm_head.weight) / max(1, targets)


def _cross_entropy(student: RegraftForCausalLM, mine: Trace, rows: Rows, targets: int) -> Tensor:
    assert mine.final is not None

    def chunk(h: Tensor, labels: Tensor, head: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(h, head).float(), labels, reduction="sum")

    predicts = rows.predicted
    h, labels = mine.final[:, :-1][predicts], rows.ids[:, 1:][predicts]
    return _SumOverTokens.apply(chunk, h, labels, student.lm_head.weight) / max(1, targets)


class _SumOverTokens(torch.autograd.Function):
    """Sum of a loss over pieces of tokens, each piece's gradient taken at once.

    Only one piece's logits exist at a time, and none is computed twice.
    """

    @staticmethod
    def forward(ctx: Any, chunk: Chunk, h: Tensor, other: Tensor, weight: Tensor) -> Tensor:
        wanted = ctx.needs_input_grad[1], ctx.needs_input_grad[3]
        total = h.new_zeros((), dtype=torch.float32)
        grad_h = torch.zeros_like(h)
        grad_weight = torch.zeros_like(weight) if wanted[1] else None
        weight = weight.detach().requires_grad_(wanted[1])
        for start in range(0, len(h), HEAD_TOKENS):
            piece = slice(start, start + HEAD_TOKENS)
            with torch.set_grad_enabled(any(wanted)):
                mine = h[piece].detach().requires_grad_(wanted[0])
                loss = chunk(mine, other[piece], weight)
            total += loss.detach()
            if any(wanted):
                inputs = [t for t in (mine, weight) if t.requires_grad]
                grads = iter(torch.autograd.grad(loss, inputs))
                if wanted[0]:
                    grad_h[piece] = next(grads)
                if grad_weight is not None:
                    grad_weight += next(grads)
        ctx.save_for_backward(grad_h, grad_weight)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None, Tensor | None]:
        grad_h, grad_weight = ctx.saved_tensors
        return None, grads[0] * grad_h, None, None if grad_weight is None else grads[0] * grad_weight
