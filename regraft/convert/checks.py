"""The ways of running a model in which teacher and student have to agree."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from regraft.layers import RegraftForCausalLM

CHUNK = 64  # tokens that the filter takes at once
LENGTH = 3 * CHUNK + 1
DECODED = 16
PADDING = 7

Run = Callable[[RegraftForCausalLM, Tensor], Tensor]


def _full(length: int) -> Run:
    return lambda model, ids: model(ids[:, :length]).logits


def pieces(model: RegraftForCausalLM, ids: Tensor) -> Tensor:
    """Prefill in pieces of 64, 1, 63 and the rest."""
    logits, cache = [], None
    for piece in ids.split([CHUNK, 1, CHUNK - 1, ids.shape[1] - 2 * CHUNK], dim=1):
        out = model(piece, cache=cache, use_cache=True)
        logits.append(out.logits)
        cache = out.cache
    return torch.cat(logits, dim=1)


def step_by_step(model: RegraftForCausalLM, ids: Tensor) -> Tensor:
    """Logits `[B,DECODED+1,vocab]` of the last tokens, taken one at a time after a prefill."""
    out = model(ids[:, :-DECODED], use_cache=True, logits_to_keep=1)
    logits = [out.logits]
    for token in ids[:, -DECODED:].split(1, dim=1):
        logits.append(model(token, cache=out.cache).logits)
    return torch.cat(logits, dim=1)


def _padded(left: bool) -> Run:
    def run(model: RegraftForCausalLM, ids: Tensor) -> Tensor:
        """Logits of a batch whose rows hold 7, 14, ... padding tokens on one side; padding is left out."""
        B, T = ids.shape
        lengths = torch.tensor([[T - PADDING * (i + 1)] for i in range(B)], device=ids.device)
        column = torch.arange(T, device=ids.device)
        mask = (column >= T - lengths) if left else (column < lengths)
        rows = torch.zeros_like(ids)
        rows[mask] = torch.cat([row[: int(n)] for row, n in zip(ids, lengths, strict=True)])
        return model(rows, attention_mask=mask.long()).logits[mask]

    return run


def packed(model: RegraftForCausalLM, ids: Tensor) -> Tensor:
    """The first row as three documents that do not see each other."""
    cuts = torch.tensor([0, 50, 50 + CHUNK, ids.shape[1]], device=ids.device)
    return model(ids[:1], cu_seqlens=cuts).logits


def checks(length: int = LENGTH) -> dict[str, Run]:
    """The checks by name; `length` is that of the longest sequence, at least `LENGTH`."""
    lengths = sorted({1, CHUNK - 1, CHUNK, CHUNK + 1, length})
    return {
        **{f"length_{n}": _full(n) for n in lengths},
        "chunked_prefill": pieces,
        "step_by_step": step_by_step,
        "left_padded": _padded(left=True),
        "right_padded": _padded(left=False),
        "packed": packed,
    }


def greedy_regret(teacher: RegraftForCausalLM, student: RegraftForCausalLM, ids: Tensor) -> float:
    """How much less the teacher likes the student's greedy tokens than its own, in logits, at worst.

    Both decode the teacher's greedy continuation of `ids`, one token at a time. 0 means the same tokens;
    ties, which rounding may break either way, cost nothing.
    """
    caches, token, worst = [None, None], ids, 0.0
    for _ in range(DECODED):
        logits = []
        for i, model in enumerate((teacher, student)):
            out = model(token, cache=caches[i], use_cache=True, logits_to_keep=1)
            caches[i] = out.cache
            logits.append(out.logits[:, -1].float())
        best, token = logits[0].max(-1, keepdim=True)
        chosen = logits[0].gather(-1, logits[1].argmax(-1, keepdim=True))
        regret = float((best - chosen).max())
        worst = regret if regret != regret else max(worst, regret)  # a NaN is kept
    return worst


@torch.no_grad()
def layer_differences(
    teacher: RegraftForCausalLM, student: RegraftForCausalLM, ids: Tensor
) -> dict[int, float]:
    """For each layer whose mixer changed: largest difference of its output on the teacher's own input.

    Relative to the largest output of the teacher's layer.
    """
    inputs: dict[int, Tensor] = {}

    def record(layer: int) -> Callable[..., None]:
        return lambda _module, arguments, _output: inputs.update({layer: arguments[0]})

    pairs = zip(teacher.config.mixers, student.config.mixers, strict=True)
    changed = [i for i, (mine, theirs) in enumerate(pairs) if mine != theirs]
    hooks = [_mixer(teacher, i).register_forward_hook(record(i)) for i in changed]
    try:
        teacher(ids, logits_to_keep=1)
    finally:
        for hook in hooks:
            hook.remove()
    differences = {}
    for i in changed:
        expected = _mixer(teacher, i)(inputs[i])[0].float()
        got = _mixer(student, i)(inputs[i])[0].float()
        differences[i] = float((got - expected).abs().max() / expected.abs().max().clamp(min=1e-30))
    return differences


def _mixer(model: RegraftForCausalLM, layer: int) -> nn.Module:
    return model.get_submodule(f"model.layers.{layer}.attn")
