"""What `regraft probe` does: run a probe, write its files, hand back the text to print."""

from __future__ import annotations

import json
from pathlib import Path

from regraft.files import atomic_directory, refuse_existing, write_json, write_text
from regraft.probes.collision import collision, markdown


def run_collision(
    *, rotations: int = 32, out: Path | None = None, as_json: bool = False, overwrite: bool = False
) -> str:
    """Run the two-key collision.

    Args:
        rotations: random bases of the rotated variant, at least 1.
        out: directory for `collision.json`, `collision.md`, `margin.png` and `gain.png`; None writes nothing.
        as_json: hand back JSON instead of Markdown.
        overwrite: replace an existing `out`.

    Raises:
        UserError: `out` exists and is not empty.
    """
    if out is not None:
        refuse_existing(out, overwrite)
    result = collision(rotations)
    text = markdown(result)
    if out is not None:
        from regraft.probes.figures import collision_figures

        with atomic_directory(out, overwrite) as folder:
            write_json(folder / "collision.json", result)
            write_text(folder / "collision.md", text)
            collision_figures(folder)
    return json.dumps(result, indent=2) if as_json else text.rstrip()
