"""Text to hide needles in: sentences with their token counts, so that fitting a length is a binary search."""

from __future__ import annotations

import re
import textwrap
from bisect import bisect_left, bisect_right
from functools import lru_cache
from itertools import accumulate
from weakref import WeakKeyDictionary

from transformers import PreTrainedTokenizerFast

from regraft.assets import austen
from regraft.errors import UserError

PIECE_CHARS = 240  # a longer "sentence" (or text without full stops) is split at words

_FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_SENTENCE_END = re.compile(
    r"(?<=[.!?])(?<!Mr\.)(?<!Mrs\.)(?<!Dr\.)(?<!St\.)(?<!Messrs\.)\s+"
    r"|(?<=[.!?][\"'\u201d\u2019)\]])\s+"  # the sentence ends inside a quotation or a bracket
)
_WORD = re.compile(r"\s*\S{1,16}")  # the last sentence is cut after a word, or inside an endless one
_Counts = tuple[list[int], list[int]]


class Haystack:
    """Sentences to hide needles between, read in a circle, with their token counts per tokenizer.

    Args:
        sentences: pieces of text, none empty; needles go between them.
        separator: what joins them, a space or a newline.
    """

    def __init__(self, sentences: list[str], separator: str = " ") -> None:
        if not sentences:
            raise UserError("haystack", "it holds no text", "give a text with at least one word")
        self.sentences = sentences
        self.separator = separator
        self._counts: WeakKeyDictionary[PreTrainedTokenizerFast, _Counts] = WeakKeyDictionary()

    @classmethod
    def from_text(cls, text: str) -> Haystack:
        """Split a text at sentence ends; white space becomes single spaces, no piece exceeds 240 letters."""
        flat = (" ".join(sentence.split()) for sentence in _SENTENCE_END.split(text))
        return cls([p for s in flat for p in textwrap.wrap(s, PIECE_CHARS, break_on_hyphens=False)])

    def _measured(self, tokenizer: PreTrainedTokenizerFast) -> tuple[list[int], list[int]]:
        """Tokens of each sentence with its separator, and their running sum; encoded once per tokenizer."""
        if tokenizer not in self._counts:
            batch = [f"{self.separator}{sentence}" for sentence in self.sentences]
            ids = tokenizer(batch, add_special_tokens=False, return_attention_mask=False)["input_ids"]
            counts = [len(row) for row in ids]
            self._counts[tokenizer] = counts, list(accumulate(counts))
        return self._counts[tokenizer]

    def take(self, start: int, budget: int, tokenizer: PreTrainedTokenizerFast) -> list[tuple[str, int]]:
        """Sentences from number `start` on that fill `budget` tokens, with their counts; the last is cut."""
        counts, ends = self._measured(tokenizer)
        n, before = len(counts), ends[start] - counts[start]
        rounds, rest = divmod(before + max(0, budget), ends[-1])
        stop = rounds * n + bisect_right(ends, rest)
        taken = [(self.sentences[i % n], counts[i % n]) for i in range(start, stop)]
        left = before + budget - rounds * ends[-1] - (ends[stop % n] - counts[stop % n])
        tail = _cut(f"{self.separator}{self.sentences[stop % n]}", left, tokenizer)
        return [*taken, tail] if tail[0] else taken


def _cut(text: str, budget: int, tokenizer: PreTrainedTokenizerFast) -> tuple[str, int]:
    """Longest beginning of `text` in whole words and at most `budget` tokens, with its token count."""
    encoded = tokenizer(text, add_special_tokens=False)
    best = "", 0
    for word in _WORD.finditer(text):
        token = encoded.char_to_token(word.end() - 1)
        if token is None:  # a character the tokenizer drops
            continue
        if token >= budget:
            break
        best = text[: word.end()].strip(), token + 1
    return best


@lru_cache(maxsize=1)
def default_haystack() -> Haystack:
    """The built-in Jane Austen text, split into sentences once per process."""
    return Haystack.from_text(austen())


@lru_cache(maxsize=1)
def filler_haystack() -> Haystack:
    """RULER's repeated noise, five short sentences a line."""
    return Haystack([_FILLER], separator="\n")


def _nearest_boundary(depth: float, ends: list[int], before: int, rest: int) -> int:
    """Number of the sentence boundary nearest to `depth`, one in the wanted tenth if its neighbour is not.

    `ends` are haystack tokens before each boundary, `before` tokens of earlier needles, `rest` all tokens of
    the context that are not this needle.
    """
    target = depth * rest - before
    above = min(bisect_left(ends, target), len(ends) - 1)

    def cost(boundary: int) -> tuple[bool, float]:
        tenth = min(9, int((ends[boundary] + before) / rest * 10))
        return tenth != int(depth * 10), abs(ends[boundary] - target)

    return min((max(above - 1, 0), above), key=cost)


def weave(
    hay: list[tuple[str, int]], needles: list[tuple[str, float, int]], separator: str
) -> tuple[str, list[int]]:
    """Context with needles (text, wanted depth, tokens) between sentences, and their character offsets.

    The needles come by rising depth; several may share a boundary.
    """
    ends = [0, *accumulate(count for _, count in hay)]
    total = ends[-1] + sum(cost for _, _, cost in needles)
    pieces, starts = [], []
    done = before = 0
    for text, depth, cost in needles:
        boundary = max(done, _nearest_boundary(depth, ends, before, max(1, total - cost)))
        pieces += [sentence for sentence, _ in hay[done:boundary]]
        starts.append(sum(map(len, pieces)) + len(separator) * len(pieces))
        pieces.append(text)
        done, before = boundary, before + cost
    return separator.join([*pieces, *(sentence for sentence, _ in hay[done:])]), starts
