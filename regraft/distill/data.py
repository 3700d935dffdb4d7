"""Training rows: documents in an order that the seed alone decides, cut into rows of token ids.

Documents that share a row do not see each other: every state starts anew where one begins.
A token is one id of a document, the end-of-text token included. It is trained once it stands in a row of a
step, whether or not a token before predicts it; padding is no token.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from regraft.distill.sources import open_source
from regraft.recipes.schema import Data

MIN_TOKENS = 2  # fewer predict nothing


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

    def share(self, rank: int, of: int) -> Rows:
        """Part `rank` of `of`, all of one size: every `of`-th row, rows of padding where one is missing."""
        missing = -len(self.ids) % of
        ids, real = (F.pad(t, (0, 0, 0, missing)) for t in (self.ids, self.real))
        first = F.pad(self.first, (0, 0, 0, missing))
        first[:, 0] = True
        return Rows(ids[rank::of], real[rank::of], first[rank::of])

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

    With `pack`, rows are filled with several documents; one that fits a row whole is never cut, but at the
    end of a budget. Without it, a document has rows of its own.

    Args:
        data: the recipe's data section.
        tokenizer: the teacher's.

    Attributes:
        ledger: tokens read, trained and dropped by cause; padding; and of every source the documents, tokens
            and passes (0 where it never repeats). Read = trained + dropped + the rest of the open document.

    Raises:
        UserError: a file is missing, empty or malformed, or a data set cannot be read.
    """

    def __init__(self, data: Data, tokenizer: PreTrainedTokenizerFast) -> None:
        self.seq_len, self.pack = data.seq_len, data.pack
        self._source = open_source(data.source, f"{data.seed}", tokenizer, data.seq_len)
        self._ids: list[int] = []
        self._opened = self._used = 0
        self.begin_ledger()

    def take(self, rows: int, tokens: int | None = None) -> Rows:
        """The next rows.

        Args:
            rows: how many at most.
            tokens: how many at most; the last document is cut there, its rest begins the next rows.
        """
        limit = rows * self.seq_len if tokens is None else tokens
        taken: list[list[tuple[int, list[int]]]] = []
        while len(taken) < rows and limit:
            row = list(self._row(limit))
            limit -= sum(len(piece) for _, piece in row)
            taken.append(row)
        ids = torch.zeros(len(taken), self.seq_len, dtype=torch.long)
        real, first = torch.zeros_like(ids, dtype=torch.bool), torch.zeros_like(ids, dtype=torch.bool)
        first[:, 0] = True
        for i, row in enumerate(taken):
            for start, piece in row:
                ids[i, start : start + len(piece)] = torch.tensor(piece)
                real[i, start : start + len(piece)] = True
                first[i, start] = True
        found = Rows(ids, real, first)
        self.ledger["trained"] += found.tokens
        self.ledger["padding"] += real.numel() - found.tokens
        self._check()
        return found

    @property
    def tokens_per_pass(self) -> int | None:
        """Tokens of the whole data set, where it is one that ends and is no mixture."""
        return self._source.tokens

    def state(self) -> dict[str, int]:
        """Position in the data: documents opened, and tokens used of the last one."""
        return {"documents": self._opened, "used": self._used}

    def restore(self, state: dict[str, int], ledger: dict[str, Any] | None = None) -> None:
        """Go to a position that `state` gave, with the ledger of then or a new one."""
        self._opened, self._used = state["documents"], state["used"]
        self._ids = self._source.document(self._opened - 1).ids if self._opened else []
        self.begin_ledger()
        self.ledger.update(copy.deepcopy(ledger or {}))

    def begin_ledger(self) -> None:
        """Count from here on; what is left of the open document is read now."""
        rest = len(self._ids) - self._used
        self.ledger: dict[str, Any] = {
            "read": rest, "trained": 0, "dropped": {"single": 0}, "padding": 0, "sources": {}
        }  # fmt: skip

    def closed_ledger(self) -> dict[str, Any]:
        """The ledger at the end of a run: the rest of the open document counts as dropped."""
        ledger = copy.deepcopy(self.ledger)
        ledger["dropped"]["after_the_budget"] = len(self._ids) - self._used
        return ledger

    def _row(self, limit: int) -> Iterator[tuple[int, list[int]]]:
        """Pieces of one row and where in it they start, `limit` tokens at most."""
        filled, end = 0, min(self.seq_len, limit)
        while filled < end:
            if len(self._ids) - self._used < MIN_TOKENS:
                self._next_document()
                continue
            if filled and (not self.pack or filled + len(self._ids) > self.seq_len >= len(self._ids)):
                return
            if 0 < self.seq_len - filled < MIN_TOKENS:
                return
            piece = self._ids[self._used : self._used + end - filled]
            yield filled, piece
            self._used += len(piece)
            filled += len(piece)

    def _next_document(self) -> None:
        self.ledger["dropped"]["single"] += len(self._ids) - self._used
        document = self._source.document(self._opened)
        self._ids, self._opened, self._used = document.ids, self._opened + 1, 0
        self.ledger["read"] += len(self._ids)
        of = self.ledger["sources"].setdefault(document.source, {"documents": 0, "tokens": 0, "passes": 0})
        of["documents"] += 1
        of["tokens"] += len(self._ids)
        of["passes"] = max(of["passes"], document.passes)

    def _check(self) -> None:
        ledger = self.ledger
        rest = len(self._ids) - self._used
        if ledger["read"] != ledger["trained"] + sum(ledger["dropped"].values()) + rest:
            raise AssertionError(f"the token ledger does not add up: {ledger}, {rest} left")
