"""Documents as token ids on disk: made once for a content, a tokenizer and its settings, then memory-mapped.

The folder `tokens` of the cache may be deleted at any time; what is missing is made again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from transformers import PreTrainedTokenizerFast

from regraft.errors import UserError
from regraft.files import atomic_directory, sha256_file, user_cache, write_json

FORMAT = 1  # goes into every key: a change of what is written makes old folders strangers
_BATCH = 256  # texts tokenised at once
_META = "meta.json"

Texts = Callable[[], Iterable[str]]


class Documents(Protocol):
    """Finitely many documents as token ids."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sequence[int]: ...

    @property
    def tokens(self) -> int:
        """Tokens of all documents."""


@dataclass(frozen=True)
class TokenStore:
    """Token ids of all documents laid end to end, `[tokens]`, and where each document ends, `[documents]`."""

    ids: np.ndarray
    ends: np.ndarray

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def tokens(self) -> int:
        """Tokens of all documents."""
        return len(self.ids)

    def __getitem__(self, index: int) -> list[int]:
        start = int(self.ends[index - 1]) if index else 0
        return self.ids[start : int(self.ends[index])].tolist()


class Framing:
    """Turns texts into documents: what the tokenizer itself puts first, the text, the end-of-text token.

    Each stands there once, also where the text brings its own. Evaluation puts the same before a prompt.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        plain = tokenizer.encode("a", add_special_tokens=False)
        framed = tokenizer.encode("a")
        self.before = framed[: next((i for i in range(len(framed)) if framed[i:][: len(plain)] == plain), 0)]
        self.end = tokenizer.eos_token_id
        state = json.loads(tokenizer.backend_tokenizer.to_str())
        state.update(padding=None, truncation=None)  # set and unset by calls, no part of what a text becomes
        named = json.dumps([state, self.before, self.end], sort_keys=True)
        self.sha256 = hashlib.sha256(named.encode()).hexdigest()

    def __call__(self, texts: list[str]) -> list[list[int]]:
        """Documents of texts; one of white space alone is empty."""
        if not texts:
            return []
        encoded = self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return [self._frame(ids) if text.strip() else [] for text, ids in zip(texts, encoded, strict=True)]

    def _frame(self, ids: list[int]) -> list[int]:
        if self.before and ids[: len(self.before)] != self.before:
            ids = self.before + ids
        return ids if self.end is None or ids[-1:] == [self.end] else [*ids, self.end]


def stored(content: Sequence[Any], texts: Texts, framing: Framing) -> TokenStore:
    """The documents of some texts, from the cache if they were made before.

    Args:
        content: what decides the texts, plain values such as file hashes.
        texts: gives them, in order.
        framing: the tokenizer.

    Raises:
        UserError: a text cannot be read, or the cache not be written.
    """
    key = json.dumps([FORMAT, list(content), framing.sha256])
    folder = user_cache() / "tokens" / hashlib.sha256(key.encode()).hexdigest()[:32]
    found = _read(folder)
    if found is not None:
        return found
    try:
        with atomic_directory(folder, overwrite=True) as temporary:
            _write(temporary, _documents(texts(), framing), len(framing.tokenizer))
    except OSError as error:
        if (found := _read(folder)) is not None:  # another process was first
            return found
        fix = "make room, or name another folder in REGRAFT_CACHE."
        raise UserError(folder, f"cannot be written: {error.strerror or error}.", fix) from error
    found = _read(folder)
    assert found is not None
    return found


def token_file(path: Path, dtype: str, framing: Framing) -> TokenStore:
    """Documents of a file of token ids, which end with the tokenizer's end-of-text token.

    Args:
        path: `.npy` with one axis of integers, else raw little-endian integers.
        dtype: of raw integers.
        framing: the tokenizer.

    Raises:
        UserError: not such a file, or ids that the tokenizer has not.
    """
    try:
        raw = np.dtype(dtype).newbyteorder("<")
        ids = np.load(path, mmap_mode="r") if path.suffix == ".npy" else np.memmap(path, raw, mode="r")
    except (ValueError, OSError, EOFError) as error:
        raise UserError(path, f"cannot be read: {error}.", "check the file and its dtype.") from error
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        reason = f"holds {ids.dtype} of {ids.ndim} axes, not one axis of integers."
        raise UserError(path, reason, "write token ids one after another.")
    ends, words = [], len(framing.tokenizer)
    for start in range(0, len(ids), 1 << 20):
        piece = ids[start : start + (1 << 20)]
        if piece.min() < 0 or piece.max() >= words:
            reason = f"holds token {piece.min() if piece.min() < 0 else piece.max()}."
            raise UserError(path, reason, f"use this tokenizer's ids, below {words}; check the dtype.")
        if framing.end is not None:
            ends.append(np.flatnonzero(piece == framing.end) + start + 1)
    if len(ids) and (not ends or not len(ends[-1]) or ends[-1][-1] != len(ids)):
        ends.append(np.array([len(ids)]))  # the last document may go without
    return TokenStore(ids, np.concatenate(ends) if ends else np.zeros(0, np.int64))


def file_content(paths: Iterable[Path]) -> list[str]:
    """What decides what files hold: their hashes, in order."""
    return [sha256_file(path) for path in paths]


def _documents(texts: Iterable[str], framing: Framing) -> Iterator[list[int]]:
    waiting = iter(texts)
    while batch := list(islice(waiting, _BATCH)):
        yield from framing(batch)


def _write(folder: Path, documents: Iterable[list[int]], words: int) -> None:
    kind = np.dtype("<u2" if words <= 1 << 16 else "<u4")
    ends, total, blank = [], 0, 0
    with (folder / "ids.bin").open("wb") as file:
        for ids in documents:
            if not ids:
                blank += 1
                continue
            file.write(np.asarray(ids, kind).tobytes())
            total += len(ids)
            ends.append(total)
    (folder / "ends.bin").write_bytes(np.asarray(ends, "<i8").tobytes())
    meta = {"dtype": kind.str, "tokens": total, "documents": len(ends), "blank_documents": blank}
    write_json(folder / _META, meta)


def _read(folder: Path) -> TokenStore | None:
    """None where there is nothing, or not what was written."""
    try:
        meta = json.loads((folder / _META).read_text(encoding="utf-8"))
        if not meta["documents"]:
            return TokenStore(np.zeros(0, np.uint16), np.zeros(0, np.int64))
        ids = np.memmap(folder / "ids.bin", meta["dtype"], mode="r")
        ends = np.fromfile(folder / "ends.bin", "<i8")
    except (OSError, ValueError, KeyError):
        return None
    whole = len(ids) == meta["tokens"] and len(ends) == meta["documents"]
    return TokenStore(ids, ends) if whole else None
