"""Files that are there whole or not at all: atomic directories and text, and the hashes that name them."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from regraft.errors import UserError

HASHED = ("config.json", "*.safetensors")  # what decides a model's outputs, given its token ids


@contextmanager
def atomic_directory(path: str | Path, overwrite: bool = False) -> Iterator[Path]:
    """Write a directory that appears complete, under its name, or not at all.

    Yields an empty directory beside `path` (same file system); when the block ends well, its files are
    synced to disk and it is renamed to `path`. An exception removes it, and an old `path` stays as it was.

    Args:
        path: the directory to make; missing parents are made with it.
        overwrite: replace an existing directory, which goes only once the new one is complete.

    Raises:
        UserError: `path` is a file, or a non-empty directory without `overwrite`.
    """
    path = Path(path).resolve()  # a link is replaced where it points to, not as a link
    refuse_existing(path, overwrite)
    temporary = _beside(path, "tmp")
    temporary.mkdir()
    try:
        yield temporary
        for file in (*temporary.rglob("*"), temporary):
            _sync(file)
        path.parent.mkdir(parents=True, exist_ok=True)
        _swap(temporary, path, overwrite)
    except BaseException:  # also an interrupt: nothing half-written stays
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def refuse_existing(path: str | Path, overwrite: bool = False) -> None:
    """Check that a directory may be written: for verbs that work long before they write.

    Raises:
        UserError: `path` is a file, a non-empty directory without `overwrite`, or lies where nothing may be
            written.
    """
    path = Path(path)
    if path.exists() and not path.is_dir():
        raise UserError(path, "is a file, not a directory.", "choose another output directory.")
    if path.is_dir() and not overwrite and any(path.iterdir()):
        raise UserError(path, "exists and is not empty.", "choose another directory, or pass --overwrite.")
    if not os.access(parent := _parent(path.resolve()), os.W_OK | os.X_OK):
        raise UserError(path, f"cannot be made: {parent} may not be written to.", "choose another place.")


def write_text(path: str | Path, text: str) -> None:
    """Write a UTF-8 file at once: readers see the old text or the new, also after a crash.

    Missing parents are made with it.
    """
    path = Path(path).resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _beside(path, "tmp")
    try:
        temporary.write_text(text, encoding="utf-8", newline="\n")
        _sync(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync(path.parent)


def write_json(path: str | Path, obj: object) -> None:
    """Write JSON at once, the same bytes for the same value: sorted keys, newline at the end.

    Raises:
        ValueError: a NaN or an infinity, which JSON cannot hold.
    """
    write_text(path, json.dumps(obj, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n")


def sha256_file(path: str | Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal, read in pieces of 1 MiB."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def hash_directory(path: str | Path) -> str:
    """SHA-256 of a model directory: names and contents of its config and its safetensors, in sorted order.

    Tokenizer, model card and verification may change without changing it.

    Raises:
        UserError: the directory holds neither.
    """
    files = sorted({file for pattern in HASHED for file in Path(path).glob(pattern)})
    if not files:
        raise UserError(path, "holds no config.json and no safetensors.", "give a model directory.")
    lines = "".join(f"{sha256_file(file)}  {file.name}\n" for file in files)  # the form of sha256sum
    return hashlib.sha256(lines.encode()).hexdigest()


def user_cache() -> Path:
    """`$REGRAFT_CACHE`, or `regraft` in the user's cache directory (`$XDG_CACHE_HOME`, `~/.cache`)."""
    if own := os.environ.get("REGRAFT_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "regraft"


def _swap(new: Path, path: Path, overwrite: bool) -> None:
    """Rename `new` to `path`; an old directory there is moved aside first and removed last."""
    old = _beside(path, "old")
    if overwrite and path.exists():
        os.rename(path, old)
    try:
        os.rename(new, path)
    except BaseException:
        if old.exists():
            os.rename(old, path)
        raise
    _sync(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def _beside(path: Path, kind: str) -> Path:
    """A free hidden name on the file system of `path`."""
    return _parent(path) / f".{path.name}.{kind}-{uuid.uuid4().hex[:8]}"


def _parent(path: Path) -> Path:
    """The nearest directory above that exists."""
    return next(p for p in path.parents if p.is_dir())


def _sync(path: Path) -> None:
    """Wait until a file's or directory's contents are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
