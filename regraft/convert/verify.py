"""Does the student compute what its teacher computes? Measured, not assumed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from regraft.assets import austen
from regraft.convert.checkpoint import Checkpoint, open_checkpoint
from regraft.convert.checks import LENGTH, checks, greedy_regret, layer_differences
from regraft.convert.load import DTYPES, fill, load_tokenizer
from regraft.convert.plan import make_plan, model_config
from regraft.errors import UserError, VerificationError
from regraft.files import hash_directory, write_json
from regraft.layers import RegraftForCausalLM
from regraft.layers.fla_kernels import KernelsUnusable

# Largest logit difference that counts as equal: at least so much, and this share of the largest logit. In
# bfloat16 both models round after every operation, to 2^-8; docs/checkpoints.md has what was measured.
TOLERANCES = {"float32": (1e-4, 1e-5), "bfloat16": (0.0, 2**-4)}
EXACT = {"float32": 1e-4, "bfloat16": 2**-6}  # of a layer's output, relative to its largest value


@dataclass(frozen=True)
class Certificate:
    """Largest absolute logit difference of each check, and the tolerance they had to meet."""

    checks: dict[str, float]
    layers: dict[
        int, dict[str, Any]
    ]  # changed layers: mixer, relative difference of its output, exact or not
    teacher_logits: float  # largest magnitude, to judge the differences by
    dtype: str
    tolerance: float
    rule: str  # where the tolerance comes from

    @property
    def worst(self) -> float:
        """The largest difference; a NaN if there is one."""
        return float(torch.tensor(list(self.checks.values())).max())

    @property
    def passed(self) -> bool:
        """Whether every difference is within the tolerance; a NaN is not."""
        return all(x <= self.tolerance for x in self.checks.values())

    def to_dict(self) -> dict[str, Any]:
        """Plain types, for `verify.json`; a value that is not finite becomes text."""
        return {
            "checks": {name: _plain(x) for name, x in self.checks.items()},
            "layers": {
                str(i): {**row, "difference": _plain(row["difference"])} for i, row in self.layers.items()
            },
            "teacher_logits": _plain(self.teacher_logits),
            "dtype": self.dtype,
            "tolerance": self.tolerance,
            "tolerance_rule": self.rule,
            "worst": _plain(self.worst),
            "passed": self.passed,
        }

    def failure(self) -> str:
        """What did not hold, in one line."""
        failed = {name: x for name, x in self.checks.items() if not x <= self.tolerance}
        listed = ", ".join(f"{name} {x:.3g}" for name, x in failed.items())
        return (
            f"logits of teacher and student differ by up to {self.worst:.3g}, tolerance {self.tolerance:.3g} "
            f"({self.rule}); {listed}"
        )

    def print(self, console: Console) -> None:
        """A table of the checks, then one of the changed layers."""
        table = Table("check", "largest logit difference", "", box=None)
        for name, x in self.checks.items():
            table.add_row(name, f"{x:.2g}", "ok" if x <= self.tolerance else "too large")
        console.print(table)
        table = Table("layer", "mixer", "output difference", "start", box=None)
        for i, row in self.layers.items():
            start = "exact copy" if row["exact"] else "not a copy"
            table.add_row(str(i), row["mixer"]["kind"], f"{row['difference']:.2g}", start)
        console.print(table)


def tolerance_for(dtype: str, logits: float) -> tuple[float, str]:
    """Largest difference that counts as equal where the largest logit is `logits`, and the rule in words."""
    least, share = TOLERANCES[dtype]
    rule = f"{share:g} of the largest logit" + (f", at least {least:g}" if least else "")
    return max(least, share * logits), f"{dtype}: {rule}"


@torch.no_grad()
def compare(
    teacher: RegraftForCausalLM,
    student: RegraftForCausalLM,
    ids: Tensor | None = None,
    *,
    tolerance: float | None = None,
    length: int = LENGTH,
) -> Certificate:
    """Run all checks on two models of one vocabulary.

    Args:
        teacher, student: models of one dtype, on one device.
        ids: `[1,length]` tokens to compare on; random ones are added, or used alone.
        tolerance: largest logit difference that counts as equal; `tolerance_for` says it if None.
        length: tokens of the longest sequence, at least 193.
    """
    random = torch.randint(teacher.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    ids = random if ids is None else torch.cat([ids[:, :length], random[:, : ids.shape[1]]])
    ids = ids.to(teacher.device)
    differences, largest = {}, 0.0
    for name, run in checks(ids.shape[1]).items():
        long = name == f"length_{ids.shape[1]}"
        rows = ids if long else ids[:, :LENGTH] if name.endswith("padded") else ids[:1, :LENGTH]
        expected = run(teacher, rows).float()
        differences[name] = float((run(student, rows).float() - expected).abs().max())
        largest = float(expected.abs().max()) if long else largest
    differences["greedy"] = greedy_regret(teacher, student, ids[:, :LENGTH])
    dtype = str(teacher.model.embeddings.weight.dtype).removeprefix("torch.")
    layers = {
        i: {"mixer": student.config.mixers[i], "difference": x, "exact": x <= EXACT[dtype]}
        for i, x in layer_differences(teacher, student, ids[:, :LENGTH]).items()
    }
    rule = "as given"
    if tolerance is None:
        tolerance, rule = tolerance_for(dtype, largest)
    return Certificate(differences, layers, largest, dtype, tolerance, rule)


def verify(
    student: str,
    *,
    teacher: str,
    revision: str | None = None,
    dtype: str = "float32",
    tolerance: float | None = None,
    length: int = LENGTH,
    device: str = "cpu",
    kernels: str | None = None,
    out: Path | None = None,
    allow_pickle: bool = False,
) -> Certificate:
    """`regraft verify`: compare two folders and print, or also write, the certificate.

    Args:
        student: folder of a converted model.
        teacher: `embedded`, a local folder or a Hub id; `revision` is its.
        dtype: number format both are run in.
        tolerance: largest logit difference that counts as equal; by default 1e-5 of the largest logit, at
            least 1e-4, in float32, and 1/16 of it in bfloat16.
        length: tokens of the longest sequence.
        device: where both are run.
        kernels: whose kernels the delta-rule layers run, `fla` or `regraft`; what a user has if not given.
        out: file of the certificate.
        allow_pickle: read a teacher's `.bin` weights.

    Raises:
        UserError: a folder that does not load, or two vocabularies.
        VerificationError: a difference above the tolerance; the certificate is written all the same.
    """
    if device.split(":")[0] == "cuda" and not torch.cuda.is_available():
        raise UserError("--device", "torch sees no GPU.", "leave it out to run on the CPU.")
    if length < LENGTH:
        raise UserError("--length", f"{length} is too short for the checks.", f"give at least {LENGTH}.")
    theirs, ours = open_checkpoint(teacher, revision, allow_pickle=allow_pickle), open_checkpoint(student)
    plans = [make_plan(c, model_config(c), DTYPES[dtype]) for c in (theirs, ours)]
    first = fill(theirs, plans[0])
    models = [first, fill(ours, plans[1], beside=first)]
    sizes = [(m.config.vocab_size, m.config.num_hidden_layers) for m in models]
    if sizes[0] != sizes[1]:
        reason = f"teacher and student have {sizes[0]} and {sizes[1]} tokens and layers."
        raise UserError(student, reason, "name the teacher it was made from.")
    for model in models:
        model.set_kernels(kernels)
        model.to(torch.device(device))
    text = probe_text(theirs, models[0].config.vocab_size, length)
    try:
        certificate = compare(models[0], models[1], text, tolerance=tolerance, length=length)
    except KernelsUnusable as error:
        raise UserError("--kernels", f"{error}", "leave it out to run what works here.") from error
    console = Console()
    certificate.print(console)
    if out is not None:
        write_certificate(
            out, certificate, teacher=hash_directory(theirs.path), student=hash_directory(ours.path)
        )
        console.print(f"certificate: {out}", soft_wrap=True)
    if not certificate.passed:
        raise VerificationError(certificate.failure())
    return certificate


def write_certificate(path: Path, certificate: Certificate, *, teacher: str, student: str) -> None:
    """Write `verify.json`: the measured differences and the hashes of both models."""
    write_json(path, {**certificate.to_dict(), "teacher_sha256": teacher, "student_sha256": student})


def probe_text(checkpoint: Checkpoint, vocab_size: int, length: int = LENGTH) -> Tensor | None:
    """A passage of built-in text `[1,length]` in the tokens of a folder, if it has a tokenizer that fits."""
    if not any(checkpoint.path.glob("tokenizer*")):
        return None
    text = austen()[10_000 : 10_000 + 16 * length]
    ids = load_tokenizer(checkpoint.path).encode(text, add_special_tokens=False)[:length]
    if len(ids) < length or max(ids) >= vocab_size:
        return None
    return torch.tensor([ids])


def _plain(x: float) -> float | str:
    return x if x == x and abs(x) != float("inf") else str(x)
