"""Which parameters move, and which of them weight decay may touch."""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch
from torch import nn
from torch.nn import Parameter

from regraft.errors import UserError
from regraft.layers import RegraftForCausalLM

EVIDENCE = "evidence"
_NORM = re.compile(r"(attn_norm|mlp_norm|o_norm|model\.norm)\.weight$")


def trainable_names(model: RegraftForCausalLM, train: str, layers: Iterable[int]) -> list[str]:
    """Names of the parameters that a stage trains; evidence follows its own schedule and is not among them.

    Args:
        model: the model.
        train: `converted` (mixers of `layers`), `converted+norms` (these and every norm) or `all`.
        layers: the converted layers, or the control's same ones.

    Raises:
        UserError: nothing would be trained.
    """
    mixers = tuple(f"model.layers.{i}.attn." for i in layers)

    def moves(name: str) -> bool:
        if name.endswith(f".{EVIDENCE}"):
            return False
        if train == "all" or name.startswith(mixers):
            return True
        return train == "converted+norms" and _NORM.search(name) is not None

    names = [name for name, _ in model.named_parameters() if moves(name)]
    if not names:
        raise UserError("train", f"{train!r} selects no parameter.", "choose converted layers or `all`.")
    return names


def shares_prefix(
    student: nn.Module, teacher: nn.Module | None, layers: tuple[int, ...], names: Iterable[str]
) -> bool:
    """Whether student and teacher are one and the same before the first converted layer, and stay so while
    the parameters in `names` train: their tensors are compared."""
    if teacher is None:
        return False
    before = ("model.embeddings.", *(f"model.layers.{i}." for i in range(layers[0])))
    theirs = {n: p for n, p in teacher.named_parameters() if n.startswith(before)}
    mine = {n: p for n, p in student.named_parameters() if n.startswith(before)}
    return (
        theirs.keys() == mine.keys()
        and not any(name.startswith(before) for name in names)
        and all(torch.equal(p, mine[n]) for n, p in theirs.items())
    )


def evidence_parameters(model: nn.Module) -> dict[str, Parameter]:
    """The evidence of every Bayesian Layer, `[H]` each, by name."""
    return {n: p for n, p in model.named_parameters() if n.endswith(f".{EVIDENCE}")}


def parameter_groups(
    model: RegraftForCausalLM, names: Iterable[str], weight_decay: float
) -> list[dict[str, object]]:
    """Optimiser groups: matrices decay; norms, convolutions, decay rates and noise parameters do not."""
    parameters = dict(model.named_parameters())
    exempt = set(model._keep_in_fp32_modules_strict)

    def decays(name: str) -> bool:
        return parameters[name].dim() == 2 and not exempt & set(name.split("."))

    names = list(names)
    groups = [([n for n in names if decays(n)], weight_decay), ([n for n in names if not decays(n)], 0.0)]
    return [
        {"params": [parameters[n] for n in group], "names": group, "weight_decay": decay}
        for group, decay in groups
        if group
    ]
