"""Where documents come from: endless sequences whose order the seed alone decides, each open at any place."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from transformers import PreTrainedTokenizerFast

from regraft.assets import austen
from regraft.assets.needles import answer_text, make_document
from regraft.distill.text_files import files, json_texts, paragraphs, parquet_texts, text_pieces
from regraft.distill.token_store import (
    Documents,
    Framing,
    TokenStore,
    file_content,
    stored,
    token_file,
)
from regraft.errors import UserError
from regraft.recipes.schema import (
    BuiltinSource,
    HubSource,
    JsonlSource,
    MixSource,
    NeedleSource,
    ParquetSource,
    TextSource,
    TokenSource,
)

_SHUFFLED = 10_000  # documents of a stream that are shuffled among each other


class Document(NamedTuple):
    """Token ids, the name of their source, and the pass over it (from 1; 0 where it never repeats)."""

    ids: list[int]
    source: str
    passes: int


class Source(Protocol):
    """An endless sequence of documents; number i is a function of i and the seed."""

    def document(self, index: int) -> Document:
        """Document number `index`, from 0; fastest in ascending order."""

    @property
    def tokens(self) -> int | None:
        """Tokens of one pass; None where that is not known."""


def open_source(source: Any, seed: str, tokenizer: PreTrainedTokenizerFast, seq_len: int) -> Source:
    """The documents of a recipe's source.

    Raises:
        UserError: it cannot be read, or holds no text.
    """
    framing = Framing(tokenizer)
    match source:
        case NeedleSource():
            return _Needles(source, seed, framing, seq_len)
        case MixSource():
            parts = [
                open_source(part.source, f"{seed}.{i}", tokenizer, seq_len)
                for i, part in enumerate(source.parts)
            ]
            return _Mix(parts, [part.weight for part in source.parts], seed)
        case HubSource(streaming=True):
            return _HubStream(source, seed, framing)
    name, documents = _finite(source, framing)
    if not any(len(documents[i]) > 1 for i in range(len(documents))):
        raise UserError(name, "holds no text.", "give at least one document of two tokens.")
    return _Shuffled(name, documents, seed)


def _finite(source: Any, framing: Framing) -> tuple[str, Documents]:
    """Name and documents of a source that ends."""
    match source:
        case BuiltinSource():
            text = austen()
            content = ["text", hashlib.sha256(text.encode()).hexdigest()]
            lines = partial(text.splitlines, keepends=True)
            return source.name, stored(content, lambda: paragraphs(lines()), framing)
        case HubSource():
            rows = _load_hub(source)
            texts = partial(_hub_texts, source, rows)
            return source.name, stored(["hub", rows._fingerprint, source.field], texts, framing)
    found = files(source.path)
    match source:
        case TextSource():
            texts = partial(_chained, text_pieces, found)
            return source.path, stored(["text", *file_content(found)], texts, framing)
        case JsonlSource():
            texts = partial(_chained, partial(json_texts, field=source.field), found)
            return source.path, stored(["jsonl", source.field, *file_content(found)], texts, framing)
        case ParquetSource():
            texts = partial(_chained, partial(parquet_texts, field=source.field), found)
            return source.path, stored(["parquet", source.field, *file_content(found)], texts, framing)
        case TokenSource():
            return source.path, _Joined([token_file(path, source.dtype, framing) for path in found])
    raise TypeError(f"no such source: {source!r}")


def _chained(read: Any, paths: Iterable[Path]) -> Iterator[str]:
    return chain.from_iterable(read(path) for path in paths)


class _Joined:
    """The documents of several stores as one sequence."""

    def __init__(self, stores: list[TokenStore]) -> None:
        self.stores = stores
        self.ends = np.cumsum([len(store) for store in stores])

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, index: int) -> list[int]:
        part = int(np.searchsorted(self.ends, index, side="right"))
        return self.stores[part][index - (int(self.ends[part - 1]) if part else 0)]

    @property
    def tokens(self) -> int:
        return sum(store.tokens for store in self.stores)


class _Shuffled:
    """A finite source over and over, in a new order at each pass."""

    def __init__(self, name: str, documents: Documents, seed: str) -> None:
        self.name, self.documents, self.seed = name, documents, seed
        self._pass, self._order = -1, np.zeros(0, np.int64)
        self.tokens = documents.tokens

    def document(self, index: int) -> Document:
        passes, place = divmod(index, len(self.documents))
        if passes != self._pass:
            self._pass, self._order = passes, _permutation(f"{self.seed}:{passes}", len(self.documents))
        return Document(list(self.documents[int(self._order[place])]), self.name, passes + 1)


class _Mix:
    """Sources drawn at random in the shares of their weights."""

    tokens = None

    def __init__(self, parts: list[Source], weights: list[float], seed: str) -> None:
        self.parts, self.weights, self.seed = parts, weights, seed
        self._restart()

    def document(self, index: int) -> Document:
        if index < self._next:
            self._restart()
        while True:
            part = self._random.choices(range(len(self.parts)), self.weights)[0]
            place = self._drawn[part]
            self._drawn[part] += 1
            self._next += 1
            if self._next > index:
                return self.parts[part].document(place)

    def _restart(self) -> None:
        self._random = random.Random(f"{self.seed}:mix")
        self._next, self._drawn = 0, [0] * len(self.parts)


class _Needles:
    """Needle documents made on the fly."""

    tokens = None

    def __init__(self, source: NeedleSource, seed: str, framing: Framing, seq_len: int) -> None:
        self.source, self.seed, self.framing, self.seq_len = source, seed, framing, seq_len
        self.number = random.Random(f"{seed}:needles").randrange(2**31)

    def document(self, index: int) -> Document:
        task = random.Random(f"{self.seed}:needles:{index}").choice(self.source.tasks)
        # One token less than a row: the end-of-text token follows the answer.
        made = make_document(
            task, self.seq_len - 1, index, seed=self.number, tokenizer=self.framing.tokenizer, split="train"
        )
        return Document(self.framing([made.model_input + answer_text(made)])[0], "needles", 0)


class _HubStream:
    """A data set read while training; to go to a place, what stands before it is read and passed over."""

    tokens = None

    def __init__(self, source: HubSource, seed: str, framing: Framing) -> None:
        self.source, self.framing = source, framing
        number = random.Random(seed).randrange(2**31)
        self._rows = _load_hub(source).shuffle(seed=number, buffer_size=_SHUFFLED)
        self._restart()

    def document(self, index: int) -> Document:
        if index < self._next:
            self._restart()
        while True:
            text = next(self._texts)
            self._next += 1
            if self._next > index:
                return Document(self.framing([text])[0], self.source.name, self._passes)

    def _restart(self) -> None:
        self._next, self._passes, self._texts = 0, 0, self._endless()

    def _endless(self) -> Iterator[str]:
        while True:
            self._rows.set_epoch(self._passes)
            self._passes += 1
            some = False
            for text in _hub_texts(self.source, self._rows):
                some = some or bool(text.strip())
                yield text
            if not some:
                raise UserError(self.source.name, "holds no text.", "name another split, or another field.")


def _load_hub(source: HubSource) -> Any:
    from datasets import load_dataset

    try:
        return load_dataset(source.name, source.config, split=source.split, streaming=source.streaming)
    except Exception as error:  # datasets raises many kinds; all mean that the set cannot be read
        fix = "check the name and the network."
        raise UserError(source.name, f"cannot be read: {error}.", fix) from error


def _hub_texts(source: HubSource, rows: Any) -> Iterator[str]:
    for row in rows:
        if source.field not in row:
            fix = f"name one of {', '.join(row)}."
            raise UserError(source.name, f"has no column {source.field!r}.", fix)
        text = row[source.field]
        if not isinstance(text, str | None):
            raise UserError(source.name, f"column {source.field!r} is not text.", "name another column.")
        yield text or ""


def _permutation(seed: str, n: int) -> np.ndarray:
    """An order of n things; RandomState's is the same in every version of numpy."""
    words = np.frombuffer(hashlib.sha256(seed.encode()).digest(), "<u4")
    return np.random.RandomState(words).permutation(n)
