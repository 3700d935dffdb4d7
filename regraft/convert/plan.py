"""The key plan: where every tensor of a student comes from, worked out from headers alone.

It is total: each source tensor is used or dropped with a reason, each target filled or new; else it fails.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from regraft.convert.checkpoint import FLOATS, Checkpoint
from regraft.errors import UserError
from regraft.layers import RegraftConfig, RegraftForCausalLM
from regraft.layers.attention import mixers_of
from regraft.layers.mixers import build_mixer, layer_class

TEACHER_TYPE = "gated_deltanet"
# Fields of fla's configuration that our decoder has in one form only, and what the others would be.
ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "use_short_conv": ((True,), "no short convolutions"),
    "hidden_act": (("swish", "silu"), "another activation in its MLPs"),
    "output_gate_activation": (("swish", "silu"), "another activation of its output gates"),
    "attnres_block_size": ((None,), "attention over the residuals of earlier layers"),
}
# What fla takes where config.json is silent, if it is not what our configuration takes.
FLA_DEFAULTS = {"hidden_size": 2048, "expand_v": 2.0, "num_heads": 6, "num_hidden_layers": 21}
_LEGACY_D = re.compile(r"model\.layers\.\d+\.attn\.D")
_GATE = re.compile(r"model\.layers\.\d+\.mlp\.gate_proj\.weight")
_BYTES = {torch.float32: 4, torch.bfloat16: 2}


@dataclass(frozen=True)
class Entry:
    """One target tensor; `source` is None where it is new, `rows` cuts a fused source on its first axis."""

    target: str
    source: str | None
    how: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    rows: tuple[int, int] | None = None

    @property
    def nbytes(self) -> int:
        """Size in the student's file."""
        return prod(self.shape) * _BYTES[self.dtype]


@dataclass(frozen=True)
class Plan:
    """What a conversion will do, and the configuration of its result."""

    config: RegraftConfig
    entries: tuple[Entry, ...]
    dropped: tuple[tuple[str, str], ...]  # source tensor, reason

    @property
    def new(self) -> tuple[Entry, ...]:
        """Targets that no source tensor fills."""
        return tuple(e for e in self.entries if e.source is None)

    def print(self, console: Console, checkpoint: Checkpoint) -> None:
        """Every tensor with source, target, initialisation and size."""
        table = Table("target", "source", "initialisation", "shape", "type", "bytes", box=None)
        for e in self.entries:
            source = "-" if e.source is None else "same name" if e.source == e.target else e.source
            kind = str(e.dtype).removeprefix("torch.")
            size = "x".join(map(str, e.shape))
            style = "bold" if e.source is None else ""
            table.add_row(e.target, source, e.how, size, kind, f"{e.nbytes:,}", style=style)
        console.print(table)
        for name, reason in self.dropped:
            console.print(f"dropped: {name} ({reason})")
        total = sum(e.nbytes for e in self.entries)
        console.print(
            f"{checkpoint.path}: {len(self.entries)} tensors, {len(self.new)} new, "
            f"{len(self.dropped)} dropped, {total:,} bytes"
        )


def model_config(checkpoint: Checkpoint, *, headers_only: bool = False) -> RegraftConfig:
    """Our configuration of a folder: a teacher in fla's format, or a model that regraft exported.

    Args:
        checkpoint: the opened folder.
        headers_only: read no weights; a stored head then counts as one that differs from the embedding.

    Raises:
        UserError: another model type, or a Gated DeltaNet of a form that our decoder does not host.
    """
    raw, where = checkpoint.config, checkpoint.path / "config.json"
    kind = raw.get("model_type")
    if kind == RegraftConfig.model_type:
        return _build_config(raw, where)
    if kind != TEACHER_TYPE:
        fix = f"give a {TEACHER_TYPE} checkpoint or a model exported by regraft."
        raise UserError(where, f"describes a {kind!r} model.", fix)
    for field, (hosted, what) in ONLY.items():
        if raw.get(field, hosted[0]) not in hosted:
            raise UserError(where, f"has {field}={raw[field]!r}: {what}.", "use a teacher that has it not.")
    raw = FLA_DEFAULTS | raw
    known = set(RegraftConfig.__init__.__annotations__) | {"bos_token_id", "eos_token_id", "pad_token_id"}
    fields = {name: raw[name] for name in known & set(raw)}
    tied = bool(raw.get("tie_word_embeddings", False))
    fields["tie_word_embeddings"] = tied and _may_tie(checkpoint, headers_only)
    return _build_config(fields, where, raw.get("attn"))


def _build_config(fields: dict[str, Any], where: Path, attn: Any = None) -> RegraftConfig:
    """The configuration of these fields; `attn` is what fla calls the attention layers of a hybrid."""
    try:
        config = RegraftConfig(**fields)
        attention = mixers_of(attn, config.num_hidden_layers) if attn else {}
        config.mixers = [attention.get(i, mixer) for i, mixer in enumerate(config.mixers)]
        with torch.device("meta"):
            for layer in attention:
                build_mixer(config, layer)
        return config
    except (ValueError, TypeError) as error:
        fix = "use the published config.json."
        raise UserError(where, f"does not describe a model: {error}.", fix) from error


def _may_tie(checkpoint: Checkpoint, headers_only: bool) -> bool:
    """Whether head and embedding are one: the head is not stored, or stored and equal."""
    names = ["model.embeddings.weight", "lm_head.weight"]
    if any(name not in checkpoint.tensors for name in names):
        return True
    if headers_only:
        return False
    first, second = (tensor for _, tensor in checkpoint.read(names))
    return torch.equal(first, second)


def make_plan(checkpoint: Checkpoint, config: RegraftConfig, dtype: torch.dtype) -> Plan:
    """Match the tensors of a folder with those of a model of this configuration.

    Raises:
        UserError: tensors are missing, unexpected or of another shape; names up to five of each.
    """
    with torch.device("meta"):
        model = RegraftForCausalLM(config)
    shapes = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    if config.tie_word_embeddings:
        shapes.pop("lm_head.weight", None)
    dropped = {name: reason for name in checkpoint.tensors if (reason := _dropped(name, config))}
    entries, problems = [], []
    for target, shape in shapes.items():
        entry = _source_of(target, shape, checkpoint, config, dtype)
        if entry is None:
            problems.append(f"{target} is missing")
            continue
        found = checkpoint.tensors[entry.source].shape if entry.source else shape
        if entry.rows is None and found != shape:
            problems.append(f"{target} has shape {list(found)}, not {list(shape)}")
        if entry.source and (kind := checkpoint.tensors[entry.source].dtype) not in FLOATS:
            problems.append(f"{target} holds {kind}, not floats of 16 to 64 bits")
        entries.append(entry)
    used = {e.source for e in entries} | set(dropped)
    problems += [f"{name} is unexpected" for name in checkpoint.tensors if name not in used]
    if problems:
        more = f", and {len(problems) - 5} more" if len(problems) > 5 else ""
        reason = f"does not fit its config.json: {'; '.join(problems[:5])}{more}."
        raise UserError(checkpoint.path, reason, "use the config.json that belongs to these weights.")
    return Plan(config, tuple(entries), tuple(sorted(dropped.items())))


def _dropped(name: str, config: RegraftConfig) -> str:
    """Why a source tensor is not used; empty where it is."""
    if _LEGACY_D.fullmatch(name):
        return "legacy, zero and never read"
    if name == "lm_head.weight" and config.tie_word_embeddings:
        return "tied to the embedding"
    return ""


def _source_of(
    target: str, shape: tuple[int, ...], checkpoint: Checkpoint, config: RegraftConfig, dtype: torch.dtype
) -> Entry | None:
    """Where a target comes from; None if it should be there and is not."""
    kept = torch.float32 if _is_float32(target, config) else dtype
    tensors = checkpoint.tensors
    gate = target.replace(".up_proj.", ".gate_proj.")
    if _GATE.fullmatch(gate) and gate in tensors and tensors[gate].shape == (2 * shape[0], *shape[1:]):
        # An older fla stored [gate; up] in one matrix.
        first = 0 if target == gate else shape[0]
        return Entry(target, gate, "part of fused gate_proj", shape, kept, (first, first + shape[0]))
    if target in tensors:
        return Entry(target, target, "copied", shape, kept)
    if _is_new(target, config):
        return Entry(target, None, f"new: {_start_of(target)}", shape, kept)
    return None


def _mixer_tensor(target: str, config: RegraftConfig) -> tuple[str, str] | None:
    """Kind of mixer and parameter name of `model.layers.N.attn.NAME...`."""
    match = re.fullmatch(r"model\.layers\.(\d+)\.attn\.(\w+)(\.weight)?", target)
    return (config.mixers[int(match[1])]["kind"], match[2]) if match else None


def _is_float32(target: str, config: RegraftConfig) -> bool:
    mixer = _mixer_tensor(target, config)
    return mixer is not None and mixer[1] in layer_class(mixer[0]).float32_parameters


def _is_new(target: str, config: RegraftConfig) -> bool:
    """Whether a Gated DeltaNet has no such tensor, so that a conversion has to make it."""
    mixer = _mixer_tensor(target, config)
    return mixer is not None and mixer[1] in layer_class(mixer[0]).new_parameters


def _start_of(target: str) -> str:
    return "process_match" if target.endswith(".refresh") else "zeros"
