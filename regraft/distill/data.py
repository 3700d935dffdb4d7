"""Training text: documents in an order that the seed alone decides, cut into rows of token ids.

Documents that share a row do not see each other: every state starts anew where one begins.
"""

from __future__ import annotations

import gzip
import json
import lzma
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import IO, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from regraft.assets import austen
from regraft.assets.needles import answer_text, make_document
from regraft.errors import UserError
from regraft.recipes.schema import (
    BuiltinSource,
    Data,
    HubSource,
    JsonlSource,
    MixSource,
    NeedleSource,
    TextSource,
)

PIECE_CHARS = 8000  # a text file is a long document: shuffled in pieces of whole paragraphs about this long
MIN_TOKENS = 2  # fewer predict nothing
_OPENERS: dict[str, Callable[..., IO[str]]] = {".gz": gzip.open, ".xz": lzma.open}


@dataclass(frozen=True)
class Rows:
    """Token ids `[R,T]` int64 with two bool masks `[R,T]`.

    real: not padding, which stands at the end of a row. first: the first token of a document, or of its
    piece in this row. cu_seqlens: `[N+1]`, where states start anew if R = 1 and documents share the row.
    """

    ids: Tensor
    real: Tensor
    first: Tensor
    cu_seqlens: Tensor | None = None

    def split(self, rows: int) -> list[Rows]:
        """Micro-batches of at most `rows` rows."""
        parts = (self.ids.split(rows), self.real.split(rows), self.first.split(rows))
        return [Rows(*part) for part in zip(*parts, strict=True)]

    def to(self, device: torch.device) -> Rows:
        """On another device, and as one long row with boundaries if documents share a row."""
        moved = [t.to(device) for t in (self.ids, self.real, self.first)]
        if not bool(self.first[:, 1:].any()):
            return Rows(*moved)
        ids, real, first = (t.reshape(1, -1) for t in moved)
        starts = first[0].nonzero().squeeze(-1)
        return Rows(ids, real, first, torch.cat([starts, starts.new_tensor([ids.shape[1]])]))

    @property
    def predicted(self) -> Tensor:
        """`[R,T-1]`: whether the token after each is predicted, being real and of the same document."""
        return self.real[:, 1:] & ~self.first[:, 1:]

    @property
    def predicting(self) -> Tensor:
        """`[N]`: places, in the rows laid end to end, whose next token is predicted."""
        return F.pad(self.predicted, (0, 1)).flatten().nonzero().squeeze(-1)

    @property
    def tokens(self) -> int:
        """Tokens that are not padding."""
        return int(self.real.sum())

    @property
    def targets(self) -> int:
        """Tokens that some token before predicts."""
        return int(self.predicted.sum())


class RowStream:
    """Endless rows of a recipe's data; its position is two numbers, so a run resumes exactly.

    With `pack`, rows are filled with several documents; one that fits a row whole is never cut. Without it,
    a document has rows of its own.

    Args:
        data: the recipe's data section.
        tokenizer: the teacher's; it adds no special tokens, the end-of-text token follows each document.

    Raises:
        UserError: a file is missing, empty or malformed, or a data set cannot be read.
    """

    def __init__(self, data: Data, tokenizer: PreTrainedTokenizerFast) -> None:
        self.seq_len, self.pack, self.tokenizer = data.seq_len, data.pack, tokenizer
        self._open = partial(documents, data.source, f"{data.seed}", tokenizer, data.seq_len)
        self.restore({"documents": 0, "used": 0})

    def take(self, rows: int) -> Rows:
        """The next rows."""
        ids = torch.zeros(rows, self.seq_len, dtype=torch.long)
        real, first = torch.zeros_like(ids, dtype=torch.bool), torch.zeros_like(ids, dtype=torch.bool)
        first[:, 0] = True
        for i in range(rows):
            for start, piece in self._row():
                ids[i, start : start + len(piece)] = torch.tensor(piece)
                real[i, start : start + len(piece)] = True
                first[i, start] = True
        return Rows(ids, real, first)

    def state(self) -> dict[str, int]:
        """Position in the data: documents opened, and tokens used of the last one."""
        return {"documents": self._opened, "used": self._used}

    def restore(self, state: dict[str, int]) -> None:
        """Go to a position that `state` gave."""
        self._documents = self._open()
        self._ids: list[int] = []
        self._opened = self._used = 0
        if state["documents"]:
            self._opened = state["documents"] - 1
            for _ in islice(self._documents, self._opened):
                pass
            self._next_document()
            self._used = state["used"]

    def _row(self) -> Iterator[tuple[int, list[int]]]:
        """Pieces of one row and where in it they start."""
        filled = 0
        while filled + MIN_TOKENS <= self.seq_len:
            if len(self._ids) - self._used < MIN_TOKENS:
                self._next_document()
                continue
            if filled and (not self.pack or filled + len(self._ids) > self.seq_len >= len(self._ids)):
                return
            piece = self._ids[self._used : self._used + self.seq_len - filled]
            yield filled, piece
            self._used += len(piece)
            filled += len(piece)

    def _next_document(self) -> None:
        self._ids = self.tokenizer.encode(next(self._documents), add_special_tokens=False)
        if self.tokenizer.eos_token_id is not None:
            self._ids.append(self.tokenizer.eos_token_id)
        self._opened, self._used = self._opened + 1, 0


def documents(source: Any, seed: str, tokenizer: PreTrainedTokenizerFast, seq_len: int) -> Iterator[str]:
    """Endless documents of a source; a finite one starts over in a new order.

    Raises:
        UserError: a file is missing, empty or malformed.
    """
    match source:
        case BuiltinSource():
            return _shuffled(paragraphs(austen()), seed)
        case TextSource():
            return _shuffled(_some(paragraphs(_read_text(source.path)), source.path), seed)
        case JsonlSource():
            return _shuffled(_some(_json_lines(source.path, source.field), source.path), seed)
        case NeedleSource():
            return _needles(source, seed, tokenizer, seq_len)
        case MixSource():
            return _mixed(source, seed, tokenizer, seq_len)
        case HubSource():
            return _hub(source, seed)
    raise TypeError(f"no such source: {source!r}")


def paragraphs(text: str) -> list[str]:
    """A long text in pieces of whole paragraphs, each up to about 8000 characters."""
    pieces: list[str] = []
    piece: list[str] = []
    size = 0
    for paragraph in text.replace("\r\n", "\n").split("\n\n"):
        if size and size + len(paragraph) > PIECE_CHARS:
            pieces.append("\n\n".join(piece))
            piece, size = [], 0
        piece.append(paragraph)
        size += len(paragraph)
    pieces.append("\n\n".join(piece))
    return [p for p in pieces if p.strip()]


def _shuffled(texts: Sequence[str], seed: str) -> Iterator[str]:
    for epoch in count():
        order = list(range(len(texts)))
        random.Random(f"{seed}:{epoch}").shuffle(order)
        yield from (texts[i] for i in order)


def _mixed(source: MixSource, seed: str, tokenizer: PreTrainedTokenizerFast, seq_len: int) -> Iterator[str]:
    rng = random.Random(f"{seed}:mix")
    parts = [documents(p.source, f"{seed}.{i}", tokenizer, seq_len) for i, p in enumerate(source.parts)]
    weights = [p.weight for p in source.parts]
    while True:
        yield next(rng.choices(parts, weights)[0])


def _needles(
    source: NeedleSource, seed: str, tokenizer: PreTrainedTokenizerFast, seq_len: int
) -> Iterator[str]:
    rng = random.Random(f"{seed}:needles")
    number = rng.randrange(2**31)
    for i in count():
        # One token less than a row: the end-of-text token follows the answer.
        document = make_document(
            rng.choice(source.tasks), seq_len - 1, i, seed=number, tokenizer=tokenizer, split="train"
        )
        yield document.model_input + answer_text(document)


def _hub(source: HubSource, seed: str) -> Iterator[str]:
    from datasets import load_dataset

    try:
        loaded = load_dataset(source.name, source.config, split=source.split, streaming=source.streaming)
    except Exception as error:  # datasets raises many kinds; all mean that the set cannot be read
        raise UserError(
            source.name, f"cannot be read: {error}.", "check the name and the network."
        ) from error
    number = random.Random(seed).randrange(2**31)
    shuffled = loaded.shuffle(seed=number, **({"buffer_size": 10_000} if source.streaming else {}))
    for epoch in count():
        if source.streaming:
            shuffled.set_epoch(epoch)
        for row in shuffled:
            if source.field not in row:
                fix = f"name one of {', '.join(row)}."
                raise UserError(source.name, f"has no column {source.field!r}.", fix)
            yield row[source.field]


def _read_text(path: str) -> str:
    file = Path(path)
    try:
        with _OPENERS.get(file.suffix, open)(file, "rt", encoding="utf-8") as handle:
            return handle.read()
    except UnicodeDecodeError as error:
        raise UserError(path, f"is not UTF-8: {error}.", "convert it to UTF-8.") from error
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise UserError(path, f"cannot be read: {error}.", "check the path and the file.") from error


def _json_lines(path: str, field: str) -> list[str]:
    texts = []
    for number, line in enumerate(_read_text(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)[field]
        except (ValueError, KeyError, TypeError) as error:
            reason = f"is not a JSON object with the field {field!r}."
            raise UserError(f"{path}, line {number}", reason, "mend the line, or name the field.") from error
        if not isinstance(text, str):
            raise UserError(f"{path}, line {number}", f"{field!r} is not text.", "name another field.")
        if text.strip():
            texts.append(text)
    return texts


def _some(texts: list[str], path: str) -> list[str]:
    if not texts:
        raise UserError(path, "holds no text.", "give a file with at least one document.")
    return texts
