"""Documents in files: text, JSON lines and Parquet, packed or not, read piece by piece and never whole."""

from __future__ import annotations

import glob
import gzip
import json
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from regraft.errors import UserError

PIECE_CHARS = 8000  # a text file is a long document: cut into pieces of whole paragraphs about this long


def files(path: str) -> list[Path]:
    """The file of this path, or all that a pattern with `*` fits, by name.

    Raises:
        UserError: there is none.
    """
    found = (
        [Path(path)] if Path(path).is_file() else [Path(p) for p in sorted(glob.glob(path, recursive=True))]
    )
    found = [p for p in found if p.is_file()]
    if not found:
        raise UserError(path, "no such file.", "check the path; a * in it stands for several files.")
    return found


def text_pieces(path: Path) -> Iterator[str]:
    """Pieces of a text file.

    Raises:
        UserError: the file cannot be read or is not UTF-8.
    """
    with _lines(path) as lines:
        yield from paragraphs(lines)


def read_text(path: Path, characters: int | None = None) -> str:
    """A text file whole, or its first characters: it is then read no further than the line that has the last.

    Raises:
        UserError: the file cannot be read or is not UTF-8.
    """
    parts, size = [], 0
    with _lines(path) as lines:
        for line in lines:
            parts.append(line)
            size += len(line)
            if characters is not None and size >= characters:
                break
    return "".join(parts)[:characters]


def json_texts(path: Path, field: str) -> Iterator[str]:
    """The text of each line of a JSONL file; empty lines are passed over.

    Raises:
        UserError: the file cannot be read, or a line is no object with text under this field.
    """
    with _lines(path) as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield _json_text(line, field, f"{path}, line {number}")


def parquet_texts(path: Path, field: str) -> Iterator[str]:
    """The text of each row of a Parquet file; a null counts as empty.

    Raises:
        UserError: the file cannot be read, or has no column of text under this name.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
        if field not in file.schema_arrow.names:
            fix = f"name one of {', '.join(file.schema_arrow.names)}."
            raise UserError(path, f"has no column {field!r}.", fix)
        kind = file.schema_arrow.field(field).type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            raise UserError(path, f"column {field!r} holds {kind}, not text.", "name another column.")
        for batch in file.iter_batches(batch_size=1024, columns=[field]):
            yield from (text or "" for text in batch.column(0).to_pylist())
    except (pa.ArrowInvalid, OSError) as error:
        raise UserError(path, f"cannot be read: {error}.", "check the file.") from error


def paragraphs(lines: Iterable[str]) -> Iterator[str]:
    """Lines in pieces of whole paragraphs, each up to about 8000 characters; pieces of nothing are left out.

    Args:
        lines: with their line ends; an empty one ends a paragraph.
    """
    piece: list[str] = []
    size = 0
    for paragraph in _paragraphs(lines):
        if size and size + len(paragraph) > PIECE_CHARS:
            yield from _some("".join(piece))
            piece, size = [], 0
        piece.append(paragraph)
        size += len(paragraph)
    yield from _some("".join(piece))


def _paragraphs(lines: Iterable[str]) -> Iterator[str]:
    """Each with the empty line after it."""
    paragraph: list[str] = []
    for line in lines:
        paragraph.append(line)
        if not line.strip():
            yield "".join(paragraph)
            paragraph = []
    yield "".join(paragraph)


def _some(piece: str) -> Iterator[str]:
    if piece.strip():
        yield piece.strip("\n")


def _json_text(line: str, field: str, where: str) -> str:
    try:
        text = json.loads(line)[field]
    except (ValueError, KeyError, TypeError) as error:
        reason = f"is not a JSON object with the field {field!r}."
        raise UserError(where, reason, "mend the line, or name the field.") from error
    if not isinstance(text, str):
        raise UserError(where, f"{field!r} is not text.", "name another field.")
    return text.encode("utf-8", "replace").decode()  # half of a surrogate pair is no text


@contextmanager
def _lines(path: Path) -> Iterator[Iterable[str]]:
    """The lines of a file, unpacked by its suffix, any line end as \\n, a byte order mark left out."""
    openers: dict[str, Callable[..., IO[str]]] = {".gz": gzip.open, ".xz": lzma.open}
    damaged: tuple[type[Exception], ...] = (OSError, EOFError, lzma.LZMAError, zlib.error)
    if path.suffix == ".zst":
        import zstandard

        openers[".zst"], damaged = zstandard.open, (*damaged, zstandard.ZstdError)
    try:
        with openers.get(path.suffix, open)(path, "rt", encoding="utf-8-sig") as handle:
            yield handle
    except UnicodeDecodeError as error:
        raise UserError(path, f"is not UTF-8: {error}.", "convert it to UTF-8.") from error
    except damaged as error:
        raise UserError(path, f"cannot be read: {error}.", "check the path and the file.") from error


def unpacked_suffix(path: Path) -> str:
    """The suffix that tells a file's format, under one that tells how it is packed."""
    return next((s for s in reversed(path.suffixes) if s not in (".gz", ".xz", ".zst")), "")
