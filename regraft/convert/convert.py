"""`regraft convert`: plan, swap mixers, verify, export."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import regraft
from regraft.convert.card import model_card
from regraft.convert.checkpoint import Checkpoint, open_checkpoint
from regraft.convert.export import export_model, push
from regraft.convert.load import DTYPES, fill, graft
from regraft.convert.plan import Plan, make_plan, model_config
from regraft.convert.scan import scan_checkpoint
from regraft.convert.targets import choose_mixers, with_mixers
from regraft.convert.verify import Certificate, compare, probe_text, write_certificate
from regraft.errors import UserError, VerificationError
from regraft.files import atomic_directory, hash_directory, refuse_existing, write_text
from regraft.layers import BayesianLayer, RegraftForCausalLM
from regraft.layers.attention import Attention
from regraft.layers.mixers import inverse_softplus

# Softplus has no zero. In a head that never forgets this noise adds up over a document, and late writes go
# over early ones (docs/decisions.md): nothing that a conversion should bring in.
_LEAST_MATCH = 1e-5


@dataclass(frozen=True)
class Choice:
    """What a conversion is asked to do, but for its files.

    Args:
        layers: indices, `every:N`, `last:N` or `scan:N`.
        to: target of these layers.
        targets: layers among them that get another target.
        noise_groups: groups of value columns with a noise of their own.
        process_match: share by which extra process noise restores the teacher's write gain at evidence 1.
    """

    layers: str | Sequence[int]
    to: str = "bayesian"
    targets: Mapping[int, str] = field(default_factory=dict)
    noise_groups: int = 1
    process_match: float = 0.0


@dataclass(frozen=True)
class Output:
    """Where a model is written, and how.

    Args:
        out: its directory; None only in a dry run.
        dtype: number format of its weights.
        dry_run: print the plan, read no weights, write nothing.
        overwrite: replace an existing `out`.
        push_to: Hub repository that the finished folder is uploaded to.
    """

    out: Path | None
    dtype: str = "float32"
    dry_run: bool = False
    overwrite: bool = False
    push_to: str | None = None


@dataclass(frozen=True)
class Conversion:
    """A verified student in float32, with what led to it."""

    checkpoint: Checkpoint
    plan: Plan
    choice: Choice
    mixers: dict[int, dict[str, Any]]
    student: RegraftForCausalLM
    certificate: Certificate

    @property
    def layers(self) -> tuple[int, ...]:
        """The converted layers."""
        return tuple(self.mixers)


def plan_conversion(
    checkpoint: Checkpoint, choice: Choice, *, dtype: str = "float32", headers_only: bool = False
) -> tuple[Plan, dict[int, dict[str, Any]]]:
    """What a conversion will do, and the new mixers. `headers_only` reads no weights (see `model_config`).

    Raises:
        UserError: a layer that does not exist or cannot be converted, or tensors that do not fit.
    """
    teacher = model_config(checkpoint, headers_only=headers_only)
    mixers = choose_mixers(
        teacher, choice.layers, to=choice.to, targets=choice.targets, noise_groups=choice.noise_groups
    )
    return make_plan(checkpoint, with_mixers(teacher, mixers), DTYPES[dtype]), mixers


def make_student(
    model: str,
    layers: str | Sequence[int],
    *,
    to: str = "bayesian",
    targets: Mapping[int, str] | None = None,
    noise_groups: int = 1,
    process_match: float = 0.0,
    revision: str | None = None,
    allow_pickle: bool = False,
    tolerance: float | None = None,
) -> Conversion:
    """Convert in memory and verify, in float32; memory holds the weights once.

    Raises:
        UserError: wrong layers or a checkpoint that does not fit.
        VerificationError: the student's logits differ from the teacher's by more than `tolerance`
            (1e-5 of the largest logit, at least 1e-4, by default).
    """
    choice = Choice(layers, to, targets or {}, noise_groups, process_match)
    return student_of(model, choice, revision=revision, allow_pickle=allow_pickle, tolerance=tolerance)


def student_of(
    model: str,
    choice: Choice,
    *,
    revision: str | None = None,
    allow_pickle: bool = False,
    tolerance: float | None = None,
) -> Conversion:
    """`make_student`, what is done to the layers given as one `Choice`."""
    checkpoint = open_checkpoint(model, revision, allow_pickle=allow_pickle)
    choice = replace(choice, layers=scanned(checkpoint, choice.layers))
    plan, mixers = plan_conversion(checkpoint, choice)
    teacher = fill(checkpoint, make_plan(checkpoint, model_config(checkpoint), torch.float32))
    student = graft(teacher, checkpoint, plan)
    for layer in mixers:
        mixer = student.model.layers[layer].attn
        if isinstance(mixer, BayesianLayer):
            mixer.refresh.data.fill_(inverse_softplus(max(choice.process_match, _LEAST_MATCH)))
    ids = probe_text(checkpoint, teacher.config.vocab_size)
    certificate = compare(teacher, student, ids, tolerance=tolerance)
    if not certificate.passed:
        raise VerificationError(f"{certificate.failure()}; nothing was written")
    return Conversion(checkpoint, plan, choice, mixers, student, certificate)


def scanned(checkpoint: Checkpoint, layers: str | Sequence[int]) -> str | Sequence[int]:
    """`scan:N` as the N layers that a scan of the model finds, any other selection as it is."""
    if not isinstance(layers, str) or not re.fullmatch(r"scan:[1-9][0-9]*", layers.strip()):
        return layers
    mixers = model_config(checkpoint, headers_only=True).mixers
    n, total = int(layers.split(":")[1]), sum(m["kind"] != Attention.kind for m in mixers)
    if n > total:
        reason = f"the model has {total} layers that can be converted."
        raise UserError(f"layers {layers!r}", reason, f"choose up to {total}.")
    return scan_checkpoint(checkpoint).best(n)


def convert(
    model: str,
    choice: Choice,
    output: Output,
    *,
    revision: str | None = None,
    allow_pickle: bool = False,
    tolerance: float | None = None,
) -> None:
    """Convert a teacher and write the student with its certificate; or print the plan of a dry run.

    Raises:
        UserError: a mistake in the arguments or the checkpoint; nothing is written.
        VerificationError: the student is not the teacher's copy; nothing is written.
    """
    console = Console()
    if output.dry_run or output.out is None:
        checkpoint = open_checkpoint(model, revision, allow_pickle=allow_pickle)
        plan, _ = plan_conversion(checkpoint, choice, dtype=output.dtype, headers_only=True)
        # A table for reading and for grep: never cut to the width of a terminal.
        plan.print(Console(width=max(console.width, 160)), checkpoint)
        return
    out = output.out
    refuse_existing(out, output.overwrite)
    done = student_of(model, choice, revision=revision, allow_pickle=allow_pickle, tolerance=tolerance)
    with atomic_directory(out, output.overwrite) as folder:
        write_student(done, folder, output.dtype)
    certificate = done.certificate
    names = ", ".join(f"{layer} {choice.targets.get(layer, choice.to)}" for layer in done.layers)
    console.print(
        f"converted layers of {model}: {names}; largest logit "
        f"difference {certificate.worst:.2g} (tolerance {certificate.tolerance:.2g}, logits up to "
        f"{certificate.teacher_logits:.3g})"
    )
    console.print(f"student: {out}\ncertificate: {out / 'verify.json'}", soft_wrap=True)
    if output.push_to is not None:
        console.print(f"uploaded: {push(out, output.push_to)}", soft_wrap=True)


def write_student(done: Conversion, folder: Path, dtype: str = "float32") -> str:
    """Export a converted student and its certificate into an empty folder; returns the student's hash."""
    student = done.student
    if dtype != "float32":
        cast_model(student, DTYPES[dtype])
    digest = export_model(student, folder, companions_from=done.checkpoint.path)
    teacher = hash_directory(done.checkpoint.path)
    write_certificate(folder / "verify.json", done.certificate, teacher=teacher, student=digest)
    choice = asdict(done.choice)
    card = model_card(
        teacher=done.checkpoint.name,
        teacher_folder=done.checkpoint.path,
        recipe={"teacher": done.checkpoint.name, "convert": {**choice, "layers": list(done.layers)}},
        certificate=done.certificate,
        num_layers=student.config.num_hidden_layers,
        version=regraft.__version__,
    )
    write_text(folder / "README.md", card)
    return digest


def cast_model(model: RegraftForCausalLM, dtype: torch.dtype) -> None:
    """Cast weights in place; what has to stay float32 stays."""
    kept = set(model._keep_in_fp32_modules_strict)
    for name, p in model.named_parameters():
        if not kept & set(name.split(".")):
            p.data = p.data.to(dtype)
