"""Does the student compute what its teacher computes? Measured, not assumed, before anything is written."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from regraft.layers import RegraftForCausalLM

LENGTH = 193  # three chunks of 64 and one token more
DECODED = 16
PADDING = 7


@dataclass(frozen=True)
class Certificate:
    """Largest absolute logit difference of each check, in float32, and the tolerance they had to meet."""

    full_sequence: float
    step_by_step: float
    left_padded: float
    teacher_logits: float  # largest magnitude, to judge the differences by
    tolerance: float

    @property
    def worst(self) -> float:
        """The largest difference."""
        return max(self.full_sequence, self.step_by_step, self.left_padded)

    @property
    def passed(self) -> bool:
        """Whether every difference is within the tolerance; a NaN is not."""
        return all(x <= self.tolerance for x in (self.full_sequence, self.step_by_step, self.left_padded))

    def to_dict(self) -> dict[str, Any]:
        """Plain types, for `verify.json`."""
        return {**asdict(self), "worst": self.worst, "passed": self.passed, "dtype": "float32"}


@torch.no_grad()
def verify(
    teacher: RegraftForCausalLM, student: RegraftForCausalLM, ids: Tensor | None = None, *, tolerance: float
) -> Certificate:
    """Compare logits over a full sequence, step-by-step decoding and a left-padded batch.

    Args:
        teacher, student: models of one vocabulary, in float32.
        ids: `[B,T]` tokens to compare on, T > 17; random ones are added, or used alone.
        tolerance: largest logit difference that counts as equal.
    """
    vocab = teacher.config.vocab_size
    random = torch.randint(vocab, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    ids = random if ids is None else torch.cat([ids[:, :LENGTH], random[:, : ids.shape[1]]])
    expected = teacher(ids).logits
    return Certificate(
        full_sequence=_largest(student(ids).logits - expected),
        step_by_step=_largest(_decode(student, ids) - _decode(teacher, ids)),
        left_padded=_largest(_padded(student, ids) - _padded(teacher, ids)),
        teacher_logits=_largest(expected),
        tolerance=tolerance,
    )


def _largest(x: Tensor) -> float:
    return float(x.abs().max())


def _decode(model: RegraftForCausalLM, ids: Tensor) -> Tensor:
    """Logits `[B,DECODED+1,vocab]` of the last tokens, taken one at a time after a prefill."""
    out = model(ids[:, :-DECODED], use_cache=True, logits_to_keep=1)
    logits = [out.logits]
    for token in ids[:, -DECODED:].split(1, dim=1):
        logits.append(model(token, cache=out.cache).logits)
    return torch.cat(logits, dim=1)


def _padded(model: RegraftForCausalLM, ids: Tensor) -> Tensor:
    """Logits of a batch whose rows hold 7, 14, ... padding tokens in front; padding itself is left out."""
    B, T = ids.shape
    lengths = torch.tensor([T - PADDING * (i + 1) for i in range(B)])
    mask = (torch.arange(T) >= T - lengths[:, None]).long()
    rows = torch.zeros_like(ids)
    rows[mask.bool()] = torch.cat([row[:n] for row, n in zip(ids, lengths.tolist(), strict=True)])
    return model(rows, attention_mask=mask).logits[mask.bool()]
