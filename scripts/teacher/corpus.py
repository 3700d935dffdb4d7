"""Books as token ids in one file, made once by several processes, and the text that hides needles."""

from __future__ import annotations

import json
import lzma
import multiprocessing
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from regraft.files import atomic_directory, sha256_file, write_json

HAYSTACK_CHARS = 12_000_000
VALID_TOKENS = 262_144
TITLE_CHARS = 2000  # of a book's beginning that are no prose

_tokenizer: PreTrainedTokenizerFast | None = None  # of a worker


@dataclass(frozen=True)
class Corpus:
    """Ids of training and held-out books, an end-of-text token after each, and prose to hide needles in."""

    books: np.ndarray  # uint16, read from disk where it is needed
    valid: np.ndarray  # uint16
    haystack: str


def corpus(
    folder: Path, texts: list[Path], valid: Path | None, tokenizer: Path, *, workers: int, max_chars: int
) -> Corpus:
    """The corpus in a folder, made from `.jsonl.xz` files (text, author) if it is not there."""
    if not (folder / "meta.json").is_file():
        if not texts or valid is None:
            raise SystemExit(f"{folder} is not there yet: name --text and --valid")
        _make(folder, texts, valid, tokenizer, workers, max_chars)
    return Corpus(
        np.memmap(folder / "books.bin", "<u2", mode="r"),
        np.fromfile(folder / "valid.bin", "<u2"),
        (folder / "haystack.txt").read_text(encoding="utf-8"),
    )


def _make(
    folder: Path, texts: list[Path], valid: Path, tokenizer: Path, workers: int, max_chars: int
) -> None:
    prose: list[str] = []

    def books() -> Iterator[str]:
        room = min(HAYSTACK_CHARS, max_chars)
        for text in read_texts(texts, max_chars):
            if room > 0:
                prose.append(text[TITLE_CHARS:][:room])
                room -= len(prose[-1])
            yield text

    with atomic_directory(folder, overwrite=True) as new:
        counts = {
            "books.bin": write_ids(new / "books.bin", books(), tokenizer, workers),
            "valid.bin": write_ids(
                new / "valid.bin", read_texts([valid], 4 * VALID_TOKENS), tokenizer, workers, VALID_TOKENS
            ),
        }
        (new / "haystack.txt").write_text("\n".join(prose), encoding="utf-8")
        files = {path.name: sha256_file(path) for path in (*texts, valid)}
        write_json(new / "meta.json", {"tokens": counts, "sha256": files})


def read_texts(paths: Iterable[Path], max_chars: int) -> Iterator[str]:
    """Books, Jane Austen's left out: hers is the evaluation's haystack."""
    done = 0
    for path in paths:
        with lzma.open(path, "rt", encoding="utf-8") as file:
            for line in file:
                book = json.loads(line)
                if "Austen" in str(book.get("author")):
                    continue
                done += len(book["text"])
                yield book["text"]
                if done > max_chars:
                    return


def write_ids(
    path: Path, texts: Iterable[str], tokenizer: Path, workers: int, most: int | None = None
) -> int:
    """Write the ids of all texts, <|endoftext|> after each, as raw uint16; returns how many."""
    total = 0
    with path.open("wb") as file:
        for ids in encoded(texts, tokenizer, workers):
            piece = ids if most is None else ids[: most - total]
            piece.tofile(file)
            total += len(piece)
            if total == most:
                break
    return total


def encoded(texts: Iterable[str], tokenizer: Path, workers: int) -> Iterator[np.ndarray]:
    """Ids of each text and <|endoftext|>, in order, by several processes."""
    if workers < 2:
        _load(tokenizer)
        yield from map(_encode, texts)
        return
    # spawned, not forked: a tokenizer that has used its threads does not survive a fork
    with multiprocessing.get_context("spawn").Pool(workers, _load, (tokenizer,)) as pool:
        yield from pool.imap(_encode, texts, chunksize=2)


def _load(tokenizer: Path) -> None:
    global _tokenizer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _tokenizer = AutoTokenizer.from_pretrained(tokenizer)


def _encode(text: str) -> np.ndarray:
    assert _tokenizer is not None
    ids = _tokenizer.backend_tokenizer.encode(text).ids
    return np.array([*ids, _tokenizer.eos_token_id], dtype="<u2")
