"""`regraft convert` as a user calls it: what goes together is checked here, the work is done elsewhere."""

from __future__ import annotations

from pathlib import Path

from regraft.convert.convert import Choice, convert
from regraft.convert.revert import revert as put_back
from regraft.convert.targets import parse_targets
from regraft.errors import UserError


def convert_or_revert(
    model: str,
    *,
    layers: str | None,
    to: str,
    targets: list[str],
    noise_groups: int,
    process_match: float,
    tolerance: float | None,
    revert: str | None,
    teacher: str | None,
    out: Path | None,
    dtype: str,
    revision: str | None,
    allow_pickle: bool,
    dry_run: bool,
    overwrite: bool,
    push_to: str | None,
) -> None:
    """Convert `layers` of a teacher, or put those named by `revert` back into a student.

    Raises:
        UserError: both or neither, something needed is missing, or options that say nothing here.
    """
    if (revert is None) == (layers is None):
        raise UserError("--layers", "is missing, or given with --revert.", "give one of the two.")
    if out is None and not dry_run:
        raise UserError("--out", "is missing.", "name the student's directory, or pass --dry-run.")
    choice = Choice(layers or "", to, parse_targets(targets), noise_groups, process_match)
    if revert is None:
        if teacher is not None:
            raise UserError("--teacher", "belongs to --revert.", "leave it out: MODEL is the teacher.")
        convert(
            model,
            choice,
            tolerance=tolerance,
            out=out,
            dtype=dtype,
            revision=revision,
            allow_pickle=allow_pickle,
            dry_run=dry_run,
            overwrite=overwrite,
            push_to=push_to,
        )
        return
    if teacher is None:
        raise UserError("--teacher", "is missing.", "name the model the student was made from.")
    if choice != Choice("") or tolerance is not None:
        fix = "leave out --to, --target, --noise-groups, --process-match and --tolerance."
        raise UserError("--revert", "converts nothing.", fix)
    put_back(
        model,
        layers=revert,
        teacher=teacher,
        out=out,
        dtype=dtype,
        revision=revision,
        allow_pickle=allow_pickle,
        dry_run=dry_run,
        overwrite=overwrite,
        push_to=push_to,
    )
