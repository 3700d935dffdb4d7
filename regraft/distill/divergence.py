"""What a head loss is: per token, its value and its gradient by the student's logits, in float32.

Both are written out, so that equal logits give exactly 0 twice and no graph over the vocabulary is kept.
Logits are `[N,vocab]`; a temperature T divides both sets of logits and the loss is multiplied by T², so that
the size of the gradient hardly depends on T.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regraft.recipes.schema import JSD, CrossEntropy, ForwardKL, ReverseKL

HEAD_LOSSES = (ForwardKL, ReverseKL, JSD, CrossEntropy)
ValueAndGradient = tuple[Tensor, Tensor]  # [N] and [N,vocab], float32


def head_loss(loss: Any, student: Tensor, teacher: Tensor | None, labels: Tensor) -> ValueAndGradient:
    """Value and gradient of one loss of the recipe.

    Args:
        loss: the recipe's item.
        student, teacher: logits `[N,vocab]`; cross-entropy needs no teacher.
        labels: the next tokens `[N]`.
    """
    if isinstance(loss, CrossEntropy):
        return cross_entropy(student, labels)
    assert teacher is not None
    match loss:
        case ForwardKL():
            return forward_kl(student, teacher, loss.temperature)
        case ReverseKL():
            return reverse_kl(student, teacher, loss.temperature)
        case JSD():
            return jsd(student, teacher, loss.beta, loss.temperature)
    raise TypeError(f"no such head loss: {loss!r}")


def forward_kl(student: Tensor, teacher: Tensor, temperature: float = 1.0) -> ValueAndGradient:
    """`T² KL(teacher ‖ student)`."""
    log_s, log_t = _log_softmax(student, temperature), _log_softmax(teacher, temperature)
    p_t = log_t.exp()
    value = torch.linalg.vecdot(p_t, log_t.sub_(log_s))
    return value.clamp(min=0) * temperature**2, log_s.exp_().sub_(p_t).mul_(temperature)


def reverse_kl(student: Tensor, teacher: Tensor, temperature: float = 1.0) -> ValueAndGradient:
    """`T² KL(student ‖ teacher)`."""
    log_s, log_t = _log_softmax(student, temperature), _log_softmax(teacher, temperature)
    excess = torch.sub(log_s, log_t, out=log_t)
    return _against(log_s.exp_(), excess, 1.0, temperature)


def jsd(student: Tensor, teacher: Tensor, beta: float, temperature: float = 1.0) -> ValueAndGradient:
    """`T² [β KL(teacher ‖ m) + (1-β) KL(student ‖ m)]` with `m = β teacher + (1-β) student`, 0 < β < 1.

    Divided by β it nears the forward KL as β goes to 0, and divided by 1-β the reverse KL as β goes to 1.
    """
    log_s, log_t = _log_softmax(student, temperature), _log_softmax(teacher, temperature)
    d = log_t - log_s
    # log(m / larger of the two), whose exponentials cannot overflow
    over_larger = d.abs().neg_().expm1_()
    over_larger.mul_(torch.where(d > 0, 1 - beta, beta)).log1p_()
    theirs = -torch.linalg.vecdot(log_t.exp_(), over_larger - d.clamp(max=0))
    over_s = over_larger.add_(d.clamp_(min=0))  # log(m / student)
    value, gradient = _against(log_s.exp_(), over_s.neg_(), 1 - beta, temperature)
    return value + beta * theirs.clamp(min=0) * temperature**2, gradient


def cross_entropy(student: Tensor, labels: Tensor) -> ValueAndGradient:
    """`-log student[label]`."""
    log_s = F.log_softmax(student.float(), dim=-1)
    value = -log_s.gather(-1, labels[:, None]).squeeze(-1)
    gradient = log_s.exp_()
    return value, gradient.scatter_add_(-1, labels[:, None], gradient.new_full((len(labels), 1), -1.0))


def _against(p: Tensor, excess: Tensor, factor: float, temperature: float) -> ValueAndGradient:
    """`factor · T² Σ p · excess` and its gradient, where excess is `log p` minus a log-density whose own
    dependence on p cancels in the gradient."""
    value = torch.linalg.vecdot(p, excess)
    gradient = excess.sub_(value[:, None]).mul_(p).mul_(factor * temperature)
    return value.clamp(min=0) * (factor * temperature**2), gradient


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    scaled = logits.float() if temperature == 1 else logits.float() / temperature
    return F.log_softmax(scaled, dim=-1)
