"""Text to hide needles in: sentences with their token counts, so that fitting a length is a binary search."""

from __future__ import annotations

import hashlib
import re
import textwrap
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from weakref import WeakKeyDictionary

from transformers import BatchEncoding, PreTrainedTokenizerFast

from regraft.assets import austen
from regraft.errors import UserError

PIECE_CHARS = 240  # a longer "sentence" (or text without full stops) is split at words

_FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_SENTENCE_END = re.compile(
    r"(?<=[.!?])(?<!Mr\.)(?<!Mrs\.)(?<!Dr\.)(?<!St\.)(?<!Messrs\.)\s+"
    r"|(?<=[.!?][\"'\u201d\u2019)\]])\s+"  # the sentence ends inside a quotation or a bracket
)
_Counts = tuple[list[int], list[int]]


class Haystack:
    """Sentences to hide needles between, read in a circle, with their token counts per tokenizer.

    Args:
        sentences: pieces of text, none empty; needles go between them.
        separator: what joins them, a space or a newline.
        longest_word: the last sentence is cut after a word, or inside a longer one after so many letters.
    """

    def __init__(self, sentences: list[str], separator: str = " ", longest_word: int = 16) -> None:
        if not sentences:
            raise UserError("haystack", "it holds no text", "give a text with at least one word")
        self.sentences = sentences
        self.separator = separator
        self._word = re.compile(rf"\s*\S{{1,{longest_word}}}")
        self._counts: WeakKeyDictionary[PreTrainedTokenizerFast, _Counts] = WeakKeyDictionary()

    @classmethod
    def from_text(cls, text: str) -> Haystack:
        """Split a text at sentence ends; white space becomes single spaces, no piece exceeds 240 letters."""
        flat = (" ".join(sentence.split()) for sentence in _SENTENCE_END.split(text))
        return cls([p for s in flat for p in textwrap.wrap(s, PIECE_CHARS, break_on_hyphens=False)])

    @property
    def fingerprint(self) -> str:
        """Hash of the text, which with a tokenizer decides every document."""
        text = "\0".join([self.separator, *self.sentences])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def _measured(self, tokenizer: PreTrainedTokenizerFast) -> tuple[list[int], list[int]]:
        """Tokens of each sentence with its separator, and their running sum; encoded once per tokenizer."""
        if tokenizer not in self._counts:
            batch = [f"{self.separator}{sentence}" for sentence in self.sentences]
            ids = tokenizer(batch, add_special_tokens=False, return_attention_mask=False)["input_ids"]
            counts = [len(row) for row in ids]
            self._counts[tokenizer] = counts, list(accumulate(counts))
        return self._counts[tokenizer]

    def take(
        self, start: int, budget: int, tokenizer: PreTrainedTokenizerFast
    ) -> tuple[list[str], list[int]]:
        """Sentences from number `start` on that fill `budget` tokens, and their counts; the last is cut."""
        counts, ends = self._measured(tokenizer)
        n, before = len(counts), ends[start] - counts[start]
        rounds, rest = divmod(before + max(0, budget), ends[-1])
        stop = rounds * n + bisect_right(ends, rest)
        left = before + budget - rounds * ends[-1] - (ends[stop % n] - counts[stop % n])
        text, count = _cut(f"{self.separator}{self.sentences[stop % n]}", left, tokenizer, self._word)
        order = [i % n for i in range(start, stop)]
        tail = ([text], [count]) if text else ([], [])
        return [self.sentences[i] for i in order] + tail[0], [counts[i] for i in order] + tail[1]


def _cut(
    text: str, budget: int, tokenizer: PreTrainedTokenizerFast, words: re.Pattern[str]
) -> tuple[str, int]:
    """Longest beginning of `text` in whole words and at most `budget` tokens, with its token count."""
    encoded = tokenizer(text, add_special_tokens=False)
    best = "", 0
    for word in words.finditer(text):
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


def place(counts: Sequence[int], needles: Sequence[tuple[float, int]]) -> tuple[list[int], list[float]]:
    """Sentence boundary of each needle (wanted depth, tokens), and the depth it comes to lie at.

    The needles come by rising depth; several may share a boundary. `counts` are tokens per sentence.
    """
    ends = [0, *accumulate(counts)]
    total = ends[-1] + sum(cost for _, cost in needles)
    boundaries, depths = [], []
    done = before = 0
    for depth, cost in needles:
        rest = max(1, total - cost)
        done = max(done, _nearest_boundary(depth, ends, before, rest))
        boundaries.append(done)
        depths.append((ends[done] + before) / rest)
        before += cost
    return boundaries, depths


def weave(
    sentences: Sequence[str], needles: Sequence[str], boundaries: Sequence[int], separator: str
) -> tuple[str, list[int]]:
    """Text with each needle put at its boundary (rising), and the character each begins at."""
    pieces: list[str] = []
    starts = []
    for text, begin, end in zip(needles, [0, *boundaries], boundaries, strict=False):
        pieces += sentences[begin:end]
        starts.append(sum(map(len, pieces)) + len(separator) * len(pieces))
        pieces.append(text)
    return separator.join([*pieces, *sentences[boundaries[-1] :]]), starts


def token_span(encoded: BatchEncoding, span: tuple[int, int]) -> tuple[int, int]:
    """First token and the one after the last of a stretch of characters, by the tokenizer's offsets."""
    begin, last = span[0], span[1] - 1
    while encoded.char_to_token(begin) is None:  # white space that belongs to no token
        begin += 1
    while encoded.char_to_token(last) is None:
        last -= 1
    return encoded.char_to_token(begin), encoded.char_to_token(last) + 1
