"""Losses on next-token distributions, the head applied to a piece of tokens at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regraft.distill.divergence import head_loss

LOGIT_CHUNK = 512  # tokens whose logits exist at once, unless the recipe says otherwise


def head_losses(
    losses: Sequence[Any],
    h: Tensor,
    head: Tensor,
    labels: Tensor,
    *,
    teacher_h: Tensor | None = None,
    teacher_head: Tensor | None = None,
    chunk: int = LOGIT_CHUNK,
) -> Tensor:
    """Sums over tokens of several losses, `[len(losses)]` in float32.

    Logits of teacher and student are computed once for all losses and exist for `chunk` tokens at a time.

    Args:
        losses: items of the recipe (`divergence.HEAD_LOSSES`).
        h, teacher_h: hidden states `[N,d]` after the last norm. head, teacher_head: `[vocab,d]`.
        labels: next tokens `[N]`.
        chunk: tokens a piece.
    """
    return _HeadLosses.apply(h, head, labels, teacher_h, teacher_head, tuple(losses), chunk)


class _HeadLosses(torch.autograd.Function):
    """Gradients are taken piece by piece in the forward pass, so no logits are kept or computed twice."""

    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,
        head: Tensor,
        labels: Tensor,
        teacher_h: Tensor | None,
        teacher_head: Tensor | None,
        losses: tuple[Any, ...],
        chunk: int,
    ) -> Tensor:
        n, (for_h, for_head) = len(losses), ctx.needs_input_grad[:2]
        sums = h.new_zeros(n, dtype=torch.float32)
        grad_h = h.new_zeros(n, *h.shape) if for_h else None
        grad_head = head.new_zeros(n, *head.shape) if for_head else None
        for start in range(0, len(h), chunk):
            piece = slice(start, start + chunk)
            logits, theirs = F.linear(h[piece], head), None
            if teacher_h is not None and teacher_head is not None:
                theirs = F.linear(teacher_h[piece], teacher_head)
            for i, loss in enumerate(losses):
                value, gradient = head_loss(loss, logits, theirs, labels[piece])
                sums[i] += value.sum()
                gradient = gradient.to(logits.dtype)
                if grad_h is not None:
                    grad_h[i, piece] = gradient @ head
                if grad_head is not None:
                    grad_head[i] += gradient.mT @ h[piece]
        ctx.save_for_backward(grad_h, grad_head)
        return sums

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        by_h, by_head = (
            None if g is None else torch.tensordot(grads[0].to(g.dtype), g, dims=1) for g in ctx.saved_tensors
        )
        return by_h, by_head, None, None, None, None, None
