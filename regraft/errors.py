"""The two ways a verb can end badly on purpose: a user's mistake (exit 2), a failed verification (exit 3)."""

from __future__ import annotations


class UserError(Exception):
    """A mistake the user can mend; the command line prints it without a traceback and exits with 2.

    Args:
        where: the path, recipe key or argument that is wrong.
        reason: what is wrong with it.
        fix: what to do instead.
    """

    exit_code = 2

    def __init__(self, where: object, reason: str, fix: str = "") -> None:
        super().__init__(f"{where}: {reason}" + (f" Fix: {fix}" if fix else ""))
        self.where, self.reason, self.fix = str(where), reason, fix


class VerificationError(Exception):
    """The student differs from its teacher by more than the tolerance; exit code 3."""

    exit_code = 3
