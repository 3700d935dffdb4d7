"""Versions that do not go together, as `regraft doctor` knows them."""

from __future__ import annotations

from regraft.doctor.known import KNOWN_BAD

HEAD = """# Versions

What `regraft doctor` knows not to go together, and the fix. A pair in italics does not touch regraft itself.

| what | what goes wrong | fix |
|---|---|---|
"""


def versions_page() -> str:
    """Markdown of the known pairs."""
    rows = []
    for pair in KNOWN_BAD:
        what = f"*{pair.what}*" if pair.note else pair.what
        command = pair.fix.startswith("pip ") and "," not in pair.fix
        cells = (what, pair.reason, f"`{pair.fix}`" if command else pair.fix)
        rows.append("| " + " | ".join(cell.replace("|", chr(92) + "|") for cell in cells) + " |")
    return HEAD + "\n".join(rows) + "\n"
