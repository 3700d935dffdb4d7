"""`regraft convert` as a user calls it: what goes together is checked here, the work is done elsewhere."""

from __future__ import annotations

from regraft.convert.convert import Choice, Output, convert
from regraft.convert.revert import revert as put_back
from regraft.errors import UserError


def convert_or_revert(
    model: str,
    choice: Choice,
    output: Output,
    *,
    revert: str | None,
    teacher: str | None,
    tolerance: float | None,
    revision: str | None,
    allow_pickle: bool,
) -> None:
    """Convert the chosen layers of a teacher, or put those named by `revert` back into a student.

    Raises:
        UserError: both or neither, something needed is missing, or options that say nothing here.
    """
    if (revert is None) == (choice.layers == ()):
        raise UserError("--layers", "is missing, or given with --revert.", "give one of the two.")
    if output.out is None and not output.dry_run:
        raise UserError("--out", "is missing.", "name the student's directory, or pass --dry-run.")
    if revert is None:
        if teacher is not None:
            raise UserError("--teacher", "belongs to --revert.", "leave it out: MODEL is the teacher.")
        convert(model, choice, output, revision=revision, allow_pickle=allow_pickle, tolerance=tolerance)
        return
    if teacher is None:
        raise UserError("--teacher", "is missing.", "name the model the student was made from.")
    if choice != Choice(()) or tolerance is not None:
        fix = "leave out --to, --target, --noise-groups, --process-match and --tolerance."
        raise UserError("--revert", "converts nothing.", fix)
    put_back(model, output, layers=revert, teacher=teacher, revision=revision, allow_pickle=allow_pickle)
