"""`regraft convert`: plan, swap mixers, verify, export."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from regraft.assets import austen
from regraft.convert.checkpoint import Checkpoint, open_checkpoint
from regraft.convert.export import export_model, write_certificate
from regraft.convert.load import DTYPES, fill, load_tokenizer
from regraft.convert.plan import Plan, make_plan, model_config, student_config
from regraft.convert.verify import LENGTH, Certificate, verify
from regraft.errors import VerificationError
from regraft.files import atomic_directory, hash_directory, refuse_existing
from regraft.layers import BayesianLayer, RegraftForCausalLM
from regraft.layers.mixers import inverse_softplus
from regraft.recipes.selector import resolve_layers

TOLERANCE = 1e-4
_LEAST_MATCH = 0.01  # softplus has no zero; at evidence 0 the extra noise is absent anyway


@dataclass(frozen=True)
class Conversion:
    """Teacher and verified student in float32, with what led to them."""

    checkpoint: Checkpoint
    plan: Plan
    layers: tuple[int, ...]
    teacher: RegraftForCausalLM
    student: RegraftForCausalLM
    certificate: Certificate


def plan_conversion(
    checkpoint: Checkpoint,
    layers: str | Sequence[int],
    *,
    to: str,
    noise_groups: int,
    dtype: str,
    headers_only: bool = False,
) -> tuple[Plan, tuple[int, ...]]:
    """What a conversion will do. `headers_only` reads no weights (see `model_config`).

    Raises:
        UserError: a layer that does not exist or cannot be converted, or tensors that do not fit.
    """
    teacher = model_config(checkpoint, headers_only=headers_only)
    chosen = resolve_layers(layers, teacher.num_hidden_layers)
    config = student_config(teacher, chosen, {"kind": to, "noise_groups": noise_groups})
    return make_plan(checkpoint, config, DTYPES[dtype]), chosen


def make_student(
    model: str,
    layers: str | Sequence[int],
    *,
    to: str = "bayesian",
    noise_groups: int = 1,
    process_match: float = 0.0,
    revision: str | None = None,
    tolerance: float = TOLERANCE,
) -> Conversion:
    """Convert in memory and verify; both models are in float32.

    Raises:
        UserError: wrong layers or a checkpoint that does not fit.
        VerificationError: the student's logits differ from the teacher's by more than `tolerance`.
    """
    checkpoint = open_checkpoint(model, revision)
    plan, chosen = plan_conversion(checkpoint, layers, to=to, noise_groups=noise_groups, dtype="float32")
    teacher = fill(checkpoint, make_plan(checkpoint, model_config(checkpoint), torch.float32))
    student = fill(checkpoint, plan)
    for layer in chosen:
        mixer = student.model.layers[layer].attn
        if isinstance(mixer, BayesianLayer):
            mixer.refresh.data.fill_(inverse_softplus(max(process_match, _LEAST_MATCH)))
    certificate = verify(teacher, student, _probe_text(checkpoint, teacher), tolerance=tolerance)
    if not certificate.passed:
        raise VerificationError(
            f"logits of teacher and student differ by up to {certificate.worst:.3g}, tolerance {tolerance:g} "
            f"(full sequence {certificate.full_sequence:.3g}, step by step {certificate.step_by_step:.3g}, "
            f"left-padded {certificate.left_padded:.3g}); nothing was written"
        )
    return Conversion(checkpoint, plan, chosen, teacher, student, certificate)


def convert(
    model: str,
    *,
    layers: str,
    out: Path | None,
    to: str = "bayesian",
    noise_groups: int = 1,
    process_match: float = 0.0,
    dtype: str = "float32",
    revision: str | None = None,
    tolerance: float = TOLERANCE,
    dry_run: bool = False,
    overwrite: bool = False,
) -> None:
    """Convert a teacher and write the student with its certificate; or print the plan (`dry_run`).

    Raises:
        UserError: a mistake in the arguments or the checkpoint; nothing is written.
        VerificationError: the student is not the teacher's copy; nothing is written.
    """
    console = Console()
    if dry_run or out is None:
        checkpoint = open_checkpoint(model, revision)
        plan, _ = plan_conversion(
            checkpoint, layers, to=to, noise_groups=noise_groups, dtype=dtype, headers_only=True
        )
        # A table for reading and for grep: never cut to the width of a terminal.
        plan.print(Console(width=max(console.width, 160)), checkpoint)
        return
    refuse_existing(out, overwrite)
    done = make_student(
        model,
        layers,
        to=to,
        noise_groups=noise_groups,
        process_match=process_match,
        revision=revision,
        tolerance=tolerance,
    )
    with atomic_directory(out, overwrite) as folder:
        write_student(done, folder, dtype)
    certificate = done.certificate
    console.print(
        f"layers {', '.join(map(str, done.layers))} of {model} are now {to}; largest logit difference "
        f"{certificate.worst:.2g} (tolerance {tolerance:g}, logits up to {certificate.teacher_logits:.3g})"
    )
    console.print(f"student: {out}\ncertificate: {out / 'verify.json'}", soft_wrap=True)


def write_student(done: Conversion, folder: Path, dtype: str = "float32") -> str:
    """Export a converted student and its certificate into an empty folder; returns the student's hash."""
    student = done.student
    if dtype != "float32":
        cast_model(student, DTYPES[dtype])
    digest = export_model(student, folder, companions_from=done.checkpoint.path)
    teacher = hash_directory(done.checkpoint.path)
    write_certificate(folder / "verify.json", done.certificate.to_dict(), teacher=teacher, student=digest)
    return digest


def cast_model(model: RegraftForCausalLM, dtype: torch.dtype) -> None:
    """Cast weights in place; what has to stay float32 stays."""
    kept = set(model._keep_in_fp32_modules_strict)
    for name, p in model.named_parameters():
        if not kept & set(name.split(".")):
            p.data = p.data.to(dtype)


def _probe_text(checkpoint: Checkpoint, teacher: RegraftForCausalLM) -> torch.Tensor | None:
    """A passage of built-in text in the teacher's tokens, if it has a tokenizer."""
    if not any(checkpoint.path.glob("tokenizer*")):
        return None
    ids = load_tokenizer(checkpoint.name).encode(austen()[10_000:14_000], add_special_tokens=False)[:LENGTH]
    if len(ids) < LENGTH or max(ids) >= teacher.config.vocab_size:
        return None
    return torch.tensor([ids])
