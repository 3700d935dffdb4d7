"""Which parameters move, which of them weight decay may touch, and a table that says so."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from itertools import groupby
from typing import Any

import torch
from rich.table import Table
from torch import nn
from torch.nn import Parameter

from regraft.distill.adapters import is_adapter, plain_name
from regraft.distill.stage import Stage
from regraft.errors import UserError
from regraft.layers import RegraftForCausalLM
from regraft.layers.mixer import Mixer
from regraft.recipes.problems import nearest
from regraft.recipes.schema import LoRA

EVIDENCE = "evidence"
_NORM = re.compile(r"(attn_norm|mlp_norm|o_norm|model\.norm)\.weight$")


def trainable_names(model: RegraftForCausalLM, train: Any, layers: Iterable[int]) -> list[str]:
    """Names of the parameters that a stage trains; evidence follows its own schedule and is not among them.

    Args:
        model: the model, with its adapters if the recipe asks for any.
        train: `converted` (mixers of `layers`), `converted+norms` (these and every norm), `all`, patterns of
            parameter names, where ! before one takes out what fits it (of `converted`, if nothing else is
            named), or the recipe's `LoRA`: adapters, and what a conversion made new.
        layers: the converted layers, or the control's same ones.

    Raises:
        UserError: nothing would be trained, or a pattern fits no parameter.
    """
    names = [n for n, _ in model.named_parameters() if not n.endswith(f".{EVIDENCE}")]
    if isinstance(train, LoRA):
        new = new_names(model)
        chosen = [n for n in names if is_adapter(n) or n in new]
    else:
        chosen = _chosen(model, [n for n in names if not is_adapter(n)], train, layers)
    if not chosen:
        raise UserError("train", f"{train!r} selects no parameter.", "choose converted layers or `all`.")
    return chosen


def _chosen(model: nn.Module, names: list[str], train: Any, layers: Iterable[int]) -> list[str]:
    if train == "all":
        return names
    if not isinstance(train, str):
        plain = {name: plain_name(name) for name in names}

        def fitting(pool: list[str], patterns: Iterable[str]) -> list[str]:
            return [n for n in pool if any(fnmatchcase(plain[n], pattern) for pattern in patterns)]

        moving = [pattern for pattern in train if not pattern.startswith("!")]
        staying = [pattern[1:] for pattern in train if pattern.startswith("!")]
        for pattern in (*moving, *(staying if new_names(model) else ())):  # a control has not all of them
            if not fitting(names, [pattern]):
                fix = f"{nearest(pattern, plain.values())} A * stands for anything."
                raise UserError("train", f"{pattern!r} fits no parameter.", fix)
        chosen = fitting(names, moving) if moving else _chosen(model, names, "converted", layers)
        kept = set(fitting(chosen, staying))
        return [n for n in chosen if n not in kept]
    mixers = tuple(f"model.layers.{i}.attn." for i in layers)
    norms = train == "converted+norms"
    return [n for n in names if n.startswith(mixers) or (norms and _NORM.search(n))]


def new_names(model: nn.Module) -> set[str]:
    """Parameters that a conversion made, for the teacher has none of their kind."""
    return {
        f"{prefix}.{name}"
        for prefix, mixer in model.named_modules()
        if isinstance(mixer, Mixer)
        for name, _ in mixer.named_parameters()
        if name.split(".")[0] in mixer.new_parameters
    }


def prefix_of(layers: tuple[int, ...]) -> tuple[str, ...]:
    """What the names of parameters before the first of these layers start with."""
    return ("model.embeddings.", *(f"model.layers.{i}." for i in range(layers[0])))


def shares_prefix(
    student: nn.Module, teacher: nn.Module | None, layers: tuple[int, ...], names: Iterable[str]
) -> bool:
    """Whether student and teacher are one and the same before the first converted layer, and stay so while
    the parameters in `names` train: their tensors are compared."""
    if teacher is None:
        return False
    before = prefix_of(layers)
    theirs = {n: p for n, p in teacher.named_parameters() if n.startswith(before)}
    mine = {n: p for n, p in student.named_parameters() if n.startswith(before)}
    adapters = {n: mine.pop(n) for n in list(mine) if is_adapter(n)}  # without effect while B is 0
    kept = {plain_name(n): p for n, p in mine.items()}
    return (
        theirs.keys() == kept.keys()
        and not any(name.startswith(before) for name in names)
        and not any(bool(p.any()) for n, p in adapters.items() if ".lora_B." in n)
        and all(torch.equal(p, kept[n]) for n, p in theirs.items())
    )


def evidence_parameters(model: nn.Module) -> dict[str, Parameter]:
    """The evidence of every Bayesian Layer, `[H]` each, by name."""
    return {n: p for n, p in model.named_parameters() if n.endswith(f".{EVIDENCE}")}


def parameter_groups(
    model: RegraftForCausalLM, names: Iterable[str], weight_decay: float
) -> list[dict[str, object]]:
    """Optimiser groups: matrices decay; norms, convolutions, decay rates and noise parameters do not."""
    parameters = dict(model.named_parameters())
    names = list(names)
    decayed = {name for name in names if decays(model, name, parameters[name])}
    groups = [
        ([n for n in names if n in decayed], weight_decay),
        ([n for n in names if n not in decayed], 0.0),
    ]
    return [
        {"params": [parameters[n] for n in group], "names": group, "weight_decay": decay}
        for group, decay in groups
        if group
    ]


def decays(model: RegraftForCausalLM, name: str, parameter: Parameter) -> bool:
    """Whether weight decay may touch a parameter."""
    return parameter.dim() == 2 and not set(model._keep_in_fp32_modules_strict) & set(name.split("."))


def trainable_table(model: RegraftForCausalLM, stages: Sequence[Stage], layers: tuple[int, ...]) -> Table:
    """What every tensor is (kept, new, adapter), whether weight decay may touch it, and where it trains.

    Tensors that agree in all of this, and in their layers, share a row.
    """
    new = new_names(model)
    trained = [set(trainable_names(model, stage.train, layers)) for stage in stages]
    parameters = dict(model.named_parameters())

    def describe(name: str) -> tuple[str, ...]:
        origin = "adapter" if is_adapter(name) else "new" if name in new else "kept"
        moves = ["trained" if name in names else "frozen" for names in trained]
        if name.endswith(f".{EVIDENCE}"):
            moves = ["schedule"] * len(stages)
        return origin, "yes" if decays(model, name, parameters[name]) else "no", *moves

    forms: dict[tuple[str, ...], list[str]] = {}  # (short name, description) -> names
    for name in parameters:
        forms.setdefault((_short(name), *describe(name)), []).append(name)
    rows: dict[tuple[str, ...], list[str]] = {}  # (layers, description) -> names
    for (_, *description), names in forms.items():
        rows.setdefault((_layers(names), *description), []).extend(names)
    columns = ("tensors", "layers", "numbers", "origin", "may decay", *(stage.name for stage in stages))
    table = Table(*columns, box=None, show_footer=True)

    def numbers(names: Iterable[str]) -> str:
        return f"{sum(parameters[n].numel() for n in names):,}"

    for (where, *description), names in rows.items():
        shorts = " ".join(dict.fromkeys(_short(n) for n in names))
        table.add_row(shorts, where, numbers(names), *description)
    footer = ("trained", "", numbers(parameters), "", "", *(numbers(names) for names in trained))
    for column, text in zip(table.columns, footer, strict=True):
        column.footer = text
    return table


def _short(name: str) -> str:
    return re.sub(r"^model\.(layers\.\d+\.)?(attn\.)?|(_[AB]\.default)?(\.weight)?$", "", plain_name(name))


def _layers(names: list[str]) -> str:
    """`1, 3-5` of parameter names."""
    found = sorted({int(m[1]) for n in names if (m := re.search(r"\.layers\.(\d+)\.", n))})
    runs = [[i for _, i in run] for _, run in groupby(enumerate(found), key=lambda pair: pair[1] - pair[0])]
    return ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)
