"""What `regraft probe` does: read the recipe, run what is missing, hand back the text to print."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from regraft.errors import UserError
from regraft.probes.load import load
from regraft.probes.runner import markdown, run_probe
from regraft.probes.schema import Sweep


def run_verb(
    verb: str,
    recipe: str,
    overrides: Sequence[str] = (),
    *,
    out: Path | None = None,
    device: str = "cpu",
    jobs: int = 1,
    as_json: bool = False,
    overwrite: bool = False,
    minutes: float | None = None,
) -> str:
    """Run a probe and return its tables, or JSON.

    Raises:
        UserError: a recipe, device or directory that does not do.
    """
    loaded: Any = load(verb, recipe, overrides)
    if isinstance(loaded, Sweep) and out is None:
        raise UserError("--out", "is needed: this recipe trains models.", "name a directory for its runs.")
    if minutes is not None and not isinstance(loaded, Sweep):
        raise UserError("--minutes", "is for recipes that train models.", "leave it out.")
    _check_device(device)
    summary = run_probe(
        loaded,
        out,
        device=device,
        jobs=jobs,
        overwrite=overwrite,
        shown=sys.stderr.isatty(),
        minutes=minutes,
    )
    if as_json:
        return json.dumps(summary, indent=2)
    return markdown(summary).rstrip()


def _check_device(name: str) -> None:
    import torch

    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError) as error:
        reason = f"cannot be used here ({str(error).splitlines()[0]})."
        raise UserError(f"--device {name}", reason, "use cpu, or a GPU that torch sees.") from error
