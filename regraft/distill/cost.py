"""What a stage costs, worked out before it starts: FLOPs and memory of a micro-batch.

The stage's own losses run forward and backward on tensors that have shapes and no contents, so nothing is
computed and no weights are read; operators are counted as they pass.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils.flop_counter import flop_registry, shape_wrapper

from regraft.convert.load import DTYPES
from regraft.distill import engine
from regraft.distill.adapters import add_adapters
from regraft.distill.data import Rows
from regraft.distill.losses import Objective, needs_teacher
from regraft.distill.peak import PeakMemory, nbytes
from regraft.distill.stage import Stage
from regraft.distill.trainable import evidence_parameters, prefix_of, trainable_names
from regraft.layers import RegraftConfig, RegraftForCausalLM
from regraft.recipes.schema import LoRA, Recipe

SAMPLE = 128  # tokens of a stand-in row: two chunks of the filter; the cost a token is that of longer rows

# What makes memory, and the recipe's key that shrinks it.
TEACHER, STUDENT, MOMENTS = "teacher weights", "student weights", "gradients and AdamW moments"
MIXERS, FEED_FORWARD, LOGITS = "mixer activations", "feed-forward activations", "logits"
RESIDUAL, BACKWARD = "residual stream and norms", "backward pass"
TEACHES = "in the teacher"
SHRINKS = {
    TEACHER: "a smaller teacher.model",
    STUDENT: "a smaller teacher.model",
    MOMENTS: "phases.N.train",
    MIXERS: "engine.recompute, phases.N.micro_batch, convert.noise_groups",
    FEED_FORWARD: "engine.recompute, phases.N.micro_batch",
    RESIDUAL: "phases.N.micro_batch",
    BACKWARD: "phases.N.micro_batch",
    LOGITS: "phases.N.logit_chunk",
}


@dataclass(frozen=True)
class Cost:
    """Cost of one stage.

    Attributes:
        flops: FLOPs a token of forward and backward pass, the teacher's forward pass included: matrix
            products, convolutions, factorisations and solves; what works element by element is left out.
        teacher_flops: the part of a forward pass of the teacher alone.
        memory: bytes at the worst moment of a step, by what makes them.
    """

    flops: float
    teacher_flops: float
    memory: dict[str, int]

    @property
    def peak(self) -> int:
        """Bytes at the worst moment."""
        return sum(self.memory.values())

    def explain(self) -> str:
        """The peak, the three largest parts of it and what shrinks each."""
        parts = sorted(self.memory.items(), key=lambda item: -item[1])[:3]
        listed = "; ".join(f"{name} {size / 1e9:.2f} GB ({SHRINKS[name]})" for name, size in parts)
        return f"about {self.peak / 1e9:.2f} GB: {listed}"


def stage_costs(
    stages: Sequence[Stage],
    student: RegraftConfig,
    teacher: RegraftConfig | None,
    layers: tuple[int, ...],
    recipe: Recipe,
) -> dict[str, Cost]:
    """The cost of every stage of a recipe, by name; arguments as in `stage_cost`."""
    settings: dict[str, Any] = {
        "seq_len": recipe.data.seq_len,
        "lora": recipe.lora,
        "dtype": DTYPES[recipe.teacher.dtype],
        "recompute": recipe.engine.recompute,
    }
    return {stage.name: stage_cost(stage, student, teacher, layers, **settings) for stage in stages}


def memory_line(costs: Mapping[str, Cost], free: int) -> str:
    """What the stage that needs most memory needs, of what, and how much is free."""
    name, worst = max(costs.items(), key=lambda item: item[1].peak)
    more = "" if worst.peak <= free else "; this may not be enough"
    return f"memory: {worst.explain()} in {name}; {free / 1e9:.1f} GB free{more}"


def free_memory() -> int:
    """Bytes free on the device that a run would use."""
    if torch.cuda.is_available():
        return int(torch.cuda.mem_get_info()[0])
    information = Path("/proc/meminfo")
    if information.is_file():  # what the system would free for us counts too
        found = dict(line.split(":") for line in information.read_text().splitlines())
        return int(found["MemAvailable"].split()[0]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def spent(costs: Mapping[str, Cost], places: Mapping[str, int]) -> dict[str, Any]:
    """FLOPs of a run for its manifest, from the token places (padding included) that each stage computed."""
    flops = {name: costs[name].flops * n for name, n in places.items()}
    teacher = sum(costs[name].teacher_flops * n for name, n in places.items())
    return {
        "flops": sum(flops.values()),
        "flops_of_teacher": teacher,
        "stages": {
            name: {"token_places": places[name], "flops": flops[name], "memory_estimate": costs[name].peak}
            for name in places
        },
    }


class _FullRows(Rows):
    """Rows without padding, every token of which predicts one."""

    @property
    def predicting(self) -> Tensor:
        """All places but the last."""
        return torch.arange(self.ids.numel() - 1)


def stage_cost(
    stage: Stage,
    student: RegraftConfig,
    teacher: RegraftConfig | None,
    layers: tuple[int, ...],
    *,
    seq_len: int,
    lora: LoRA | None = None,
    dtype: torch.dtype = torch.float32,
    recompute: bool = False,
) -> Cost:
    """FLOPs a token and memory of a stage.

    Args:
        stage: what is trained.
        student, teacher: shapes; no teacher for the control.
        layers: converted layers.
        seq_len: tokens of a row.
        lora: adapters, if the recipe has any.
        dtype: number format of matrix products; weights are float32.
        recompute: as the recipe's `engine` has it.
    """
    whole = max(rows for _, rows in stage.segments)
    rows = min(stage.micro_batch or whole, whole)
    return _cost(
        stage.losses,
        stage.train,
        stage.evidence is not None and stage.evidence.learn,
        stage.logit_chunk,
        student.to_json_string(),
        None if teacher is None or not needs_teacher(stage.losses) else teacher.to_json_string(),
        layers,
        max(1, math.ceil(rows * seq_len / min(seq_len, SAMPLE))),
        min(seq_len, SAMPLE),
        lora,
        dtype,
        recompute,
    )


@lru_cache
def _cost(
    losses: tuple[Any, ...],
    train: Any,
    learn_evidence: bool,
    logit_chunk: int,
    student: str,
    teacher: str | None,
    layers: tuple[int, ...],
    rows: int,
    length: int,
    lora: LoRA | None,
    dtype: torch.dtype,
    recompute: bool,
) -> Cost:
    with FakeTensorMode():
        model = _model(student, lora, layers)
        reference = None if teacher is None else _model(teacher).requires_grad_(False)
        names = set(trainable_names(model, train, layers))
        if learn_evidence:
            names |= set(evidence_parameters(model))
        for name, p in model.named_parameters():
            p.requires_grad_(name in names)
            p.grad = torch.zeros_like(p) if name in names else None  # from the micro-batch before
        if recompute:
            engine.recompute(model)
        shared = reference is not None and not any(name.startswith(prefix_of(layers)) for name in names)
        ids = torch.zeros(rows, length, dtype=torch.long)
        real, first = (torch.full_like(ids, value, dtype=torch.bool) for value in (True, False))
        variance = {place: [1.0] * len(layers) for place in ("mixer", "boundary")}
        objective = Objective(losses, layers, shared, variance, logit_chunk)
        count = _Count(model.config.vocab_size)
        parts = _parts(model)
        if reference is not None:
            parts += [(TEACHES, block) for block in reference.model.layers] + _parts(reference)
        with torch.autocast("cpu", dtype, dtype != torch.float32), count, count.watching(parts):
            values = objective(model, reference, _FullRows(ids, real, first), tokens=ids.numel(), targets=1)
            total = torch.stack([loss.weight * values[loss.kind] for loss in losses]).sum()
            with count.at(BACKWARD):
                total.backward()
        weights = {
            STUDENT: nbytes(model.parameters()),
            MOMENTS: 3 * nbytes(p for n, p in model.named_parameters() if n in names),
        }
        head = 0
        if reference is not None:
            weights[TEACHER] = nbytes(reference.parameters())
            head = 2 * reference.lm_head.weight.numel() if objective.whole else 0
        tokens = ids.numel()
        return Cost(
            flops=sum(count.flops.values()) / tokens,
            teacher_flops=count.flops[True] / tokens + head,
            memory=weights | count.at_peak,
        )


def _model(config: str, lora: LoRA | None = None, layers: tuple[int, ...] = ()) -> RegraftForCausalLM:
    """The model, called under a FakeTensorMode; built without one, for peft moves the tensors it makes."""
    with torch.device("meta"), unset_fake_temporarily():
        model = RegraftForCausalLM(RegraftConfig(**json.loads(config)))
        if lora is not None:
            add_adapters(model, lora, layers)
    fake: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, p in list(module._parameters.items()):
            if p is not None:
                if id(p) not in fake:
                    fake[id(p)] = nn.Parameter(torch.empty(p.shape, dtype=p.dtype))
                module._parameters[name] = fake[id(p)]
    return model


class _Count(PeakMemory):
    """FLOPs and memory by part of the model; logits are told by their width."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.place, self.vocab = [RESIDUAL], vocab
        self.flops: Counter[bool] = Counter()  # by whether the teacher's body takes them

    def place_of(self, x: Tensor) -> str:
        if x.dim() == 2 and x.shape[1] == self.vocab:
            return LOGITS
        place = super().place_of(x)
        return RESIDUAL if place == TEACHES else place

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if (formula := _FORMULAS.get(func._overloadpacket)) is not None:
            self.flops[TEACHES in self.place] += formula(*args, **(kwargs or {}), out_val=out)
        return out


def _parts(model: RegraftForCausalLM) -> list[tuple[str, Any]]:
    blocks = [model.get_submodule(f"model.layers.{i}") for i in range(model.config.num_hidden_layers)]
    return [
        *((MIXERS, block.get_submodule("attn")) for block in blocks),
        *((FEED_FORWARD, block.get_submodule("mlp")) for block in blocks),
    ]


def _convolution(x: Any, weight: Any, *_: Any, out_shape: Any, **__: Any) -> int:
    return 2 * math.prod(out_shape) * math.prod(weight[1:])


def _convolution_backward(grad: Any, x: Any, weight: Any, *rest: Any, out_shape: Any, **_: Any) -> int:
    """As often the forward pass as there are gradients; torch's own formula has no groups."""
    wanted = sum(map(bool, rest[-1][:2]))
    return wanted * 2 * math.prod(grad) * math.prod(weight[1:])


def _cholesky(x: Any, *_: Any, out_shape: Any, **__: Any) -> int:
    return math.prod(x) * x[-1] // 3


def _solve_triangular(a: Any, b: Any, *_: Any, out_shape: Any, **__: Any) -> int:
    return math.prod(out_shape) * a[-1]


_aten = torch.ops.aten
_OWN = {
    _aten.convolution: _convolution,
    _aten.convolution_backward: _convolution_backward,
    _aten.linalg_cholesky_ex: _cholesky,
    _aten.linalg_solve_triangular: _solve_triangular,
}
_FORMULAS = {**flop_registry, **{op: shape_wrapper(formula) for op, formula in _OWN.items()}}
