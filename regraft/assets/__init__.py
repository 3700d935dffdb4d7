"""What ships with the package: the embedded teacher, its tokenizer, built-in text and needle documents."""

from __future__ import annotations

import lzma
from functools import lru_cache
from pathlib import Path

_HERE = Path(__file__).parent


def teacher_dir() -> Path:
    """Folder of the embedded teacher (Hugging Face layout), what the name `embedded` stands for."""
    return _HERE / "teacher"


@lru_cache(maxsize=1)
def austen() -> str:
    """Six novels of Jane Austen (public domain), 4.0 M characters: built-in training text and haystack."""
    return lzma.open(_HERE / "austen.txt.xz", "rt", encoding="utf-8").read()
