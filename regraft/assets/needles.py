"""RULER needle documents: one generator per document, exact length, needle depths measured in tokens.

The wording is NVIDIA RULER's (`niah_*`); what differs is where documents come from. Each document depends on
(seed, task, length, index) alone, fills its length, and knows the token position of every needle.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import random
import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from typing import Any, Literal, TypeAlias

from transformers import BatchEncoding, PreTrainedTokenizerFast

from regraft.assets.haystack import Haystack, default_haystack, filler_haystack, place, token_span, weave
from regraft.errors import UserError

GENERATOR_VERSION = 1  # part of every document's seed: raise it whenever a document would come out different
OFFSETS = 16  # haystack offsets tried until the asked needles lie in the tenths they are wanted in
MIN_FILL = 0.98  # prompt + generated tokens fill at least this share of the length

_HEAD = (
    "{some} special magic {type} {are} hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {type} afterwards.\n"
)
_QUESTION = "\nWhat {are_all} the special magic {type} for {query} mentioned in the provided text?"
_PREFIX = "The special magic {type} for {query} mentioned in the provided text {are}"
_NEEDLE = "One of the special magic {type} for {key} is: {value}."

Split = Literal["train", "eval"]
Tokenizer: TypeAlias = PreTrainedTokenizerFast


@dataclass(frozen=True)
class Task:
    """One RULER needle task; `new_tokens` is the generation budget that its documents leave free."""

    name: str
    haystack: Literal["filler", "essay", "needles"]
    n_keys: int
    n_values: int
    n_asked: int
    value_type: Literal["numbers", "uuids"]
    new_tokens: int
    key_type: Literal["words", "uuids"] = "words"


# A 7-digit number takes at most 8 tokens, a uuid at most 37, four numbers with their commas about 40.
TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task("niah_single_1", "filler", 1, 1, 1, "numbers", 32),
        Task("niah_single_2", "essay", 1, 1, 1, "numbers", 32),
        Task("niah_single_3", "essay", 1, 1, 1, "uuids", 64),
        Task("niah_multikey_1", "essay", 4, 1, 1, "numbers", 32),
        Task("niah_multiquery", "essay", 4, 1, 4, "numbers", 96),
        Task("niah_multivalue", "essay", 1, 4, 1, "numbers", 96),
    )
}
# The two whose haystack is needles itself: beyond small models, so nothing asks for them by itself.
ALL_TASKS: dict[str, Task] = TASKS | {
    "niah_multikey_2": Task("niah_multikey_2", "needles", 1, 1, 1, "numbers", 32),
    "niah_multikey_3": Task("niah_multikey_3", "needles", 1, 1, 1, "uuids", 64, key_type="uuids"),
}


@dataclass(frozen=True)
class Needle:
    """A needle in its document; depths run from 0 (first thing in the context) to 1 (last).

    `depth` is tokens of context before the needle over all tokens of context that are not the needle,
    measured on the finished text; `start_token` is the needle's first token in the model's input, from 0, BOS
    included.
    """

    key: str
    value: str
    asked: bool
    requested_depth: float
    depth: float
    start_token: int

    @property
    def decile(self) -> int:
        """Tenth of the context the needle really lies in, 0 to 9."""
        return min(9, int(self.depth * 10))


@dataclass(frozen=True)
class NeedleDocument:
    """One document; the model reads `model_input`, `n_tokens` tokens long, and should write `answer_text`."""

    task: str
    length: int
    index: int
    seed: int
    prompt: str
    answer_prefix: str
    answers: tuple[str, ...]
    needles: tuple[Needle, ...]
    n_tokens: int

    @property
    def model_input(self) -> str:
        """Prompt and answer prefix as the model reads them (the answer prefix is for base models too)."""
        return f"{self.prompt} {self.answer_prefix}"

    def to_dict(self) -> dict[str, Any]:
        """Plain types only, the inverse of `from_dict`."""
        return asdict(self) | {"answers": list(self.answers), "needles": [asdict(n) for n in self.needles]}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> NeedleDocument:
        """Rebuild a document from `to_dict` (also after a round trip through JSON)."""
        needles = tuple(Needle(**needle) for needle in data["needles"])
        return cls(**{**data, "answers": tuple(data["answers"]), "needles": needles})


def answer_text(document: NeedleDocument) -> str:
    """What a perfect model writes after the answer prefix: ` 12.` or ` 1, 2, 3, and 4.`."""
    return f" {_listing(document.answers)}."


def _listing(items: Sequence[str]) -> str:
    return ", ".join(items[:-1]) + ", and " + items[-1] if len(items) > 1 else items[0]


@lru_cache(maxsize=2)
def words(split: Split) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Adjectives and nouns of one half of the wonderwords lists; the halves share no word.

    A word's half is the parity of its SHA-256, so keys asked in evaluation never occur in training.
    """
    parity = {"train": 0, "eval": 1}[split]

    def half(name: str) -> tuple[str, ...]:
        text = (importlib.resources.files("wonderwords") / "assets" / name).read_text(encoding="utf-8")
        entries = {entry for entry in text.splitlines() if re.fullmatch("[a-z]+", entry)}
        return tuple(sorted(w for w in entries if hashlib.sha256(w.encode()).digest()[-1] % 2 == parity))

    return half("adjectivelist.txt"), half("nounlist.txt")


def _generator(*parts: object) -> random.Random:
    text = "|".join(map(str, (*parts, GENERATOR_VERSION)))
    return random.Random(int.from_bytes(hashlib.sha256(text.encode()).digest(), "big"))


def _decile(seed: int, task: Task, length: int, index: int, slot: int) -> int:
    """Tenth that the asked needle `slot` is wanted in.

    Every ten documents one permutation of the tenths, rotated per needle: any prefix of the indices is
    balanced to within one, and the needles of one document are never wanted in the same tenth.
    """
    rng = _generator(seed, task.name, length, "deciles", index // 10)
    order, shifts = (sorted(range(10), key=lambda _: rng.random()) for _ in range(2))
    return order[(index + shifts[slot]) % 10]


def _key(task: Task, vocabulary: tuple[tuple[str, ...], ...], rng: random.Random) -> str:
    if task.key_type == "uuids":
        return _uuid(rng)
    return "-".join(part[rng.randrange(len(part))] for part in vocabulary)


def _value(task: Task, rng: random.Random) -> str:
    return _uuid(rng) if task.value_type == "uuids" else str(rng.randrange(10**6, 10**7))


def _uuid(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def _draw_needles(
    task: Task, length: int, index: int, seed: int, split: Split, rng: random.Random
) -> list[Needle]:
    """Needles with distinct keys and values and the depths they are wanted at; the first keys are asked."""
    keys = _distinct(partial(_key, task, words(split), rng), task.n_keys)
    values = _distinct(partial(_value, task, rng), task.n_keys * task.n_values)
    needles = []
    for slot, text in enumerate(values):
        asked = slot // task.n_values < task.n_asked
        tenth = _decile(seed, task, length, index, slot) if asked else rng.randrange(10)
        wanted = (tenth + rng.random()) / 10
        needles.append(Needle(keys[slot // task.n_values], text, asked, wanted, wanted, 0))
    return needles


def _needle_haystack(
    task: Task, length: int, needles: list[Needle], split: Split, tokenizer: Tokenizer, rng: random.Random
) -> Haystack:
    """Needles nobody asks for, enough for `length` tokens, with other keys and values than the real ones."""
    key, value = partial(_key, task, words(split), rng), partial(_value, task, rng)
    cost = len(tokenizer(_needle_text(task, key(), value()), add_special_tokens=False)["input_ids"])
    n = 2 * length // cost + 2  # the cost of one is only about that of the next
    taken = {needle.key for needle in needles}, {needle.value for needle in needles}
    keys, values = (
        [new for new in _distinct(draw, n + len(needles)) if new not in old][:n]
        for draw, old in zip((key, value), taken, strict=True)
    )
    sentences = [_needle_text(task, *pair) for pair in zip(keys, values, strict=True)]
    return Haystack(sentences, separator="\n", longest_word=4)


def _needle_text(task: Task, key: str, value: str) -> str:
    return _NEEDLE.format(type=task.value_type, key=key, value=value)


def _asked_keys(needles: list[Needle]) -> list[str]:
    return list(dict.fromkeys(needle.key for needle in needles if needle.asked))


def _distinct(draw: Callable[[], str], n: int) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < n:
        found[draw()] = None
    return list(found)


def _wordings(task: Task, query: str) -> tuple[str, str, str]:
    """RULER's head, question and answer prefix, in the singular when one value is asked for."""
    one = task.n_asked * task.n_values == 1
    forms = {
        "some": "A" if one else "Some",
        "type": task.value_type.removesuffix("s") if one else task.value_type,
        "are": "is" if one else "are",
        "are_all": "is" if one else "are all",
        "query": query,
    }
    return _HEAD.format(**forms), _QUESTION.format(**forms), _PREFIX.format(**forms)


def _measure(
    encoded: BatchEncoding, context: tuple[int, int], needles: list[Needle], spans: list[tuple[int, int]]
) -> tuple[Needle, ...]:
    """Needles with the depth and first token they really have; spans are characters of the model's input."""
    first, end = token_span(encoded, context)
    measured = []
    for needle, span in zip(needles, spans, strict=True):
        begin, stop = token_span(encoded, span)
        rest = max(1, (end - first) - (stop - begin))
        measured.append(replace(needle, depth=(begin - first) / rest, start_token=begin))
    return tuple(measured)


def _fit(
    spec: Task, length: int, hay: Haystack, needles: list[Needle], tokenizer: Tokenizer, rng: random.Random
) -> tuple[str, str, tuple[Needle, ...], int]:
    """Prompt, answer prefix, needles as they lie and token count of a document that fills `length`."""
    head, question, prefix = _wordings(spec, _listing(_asked_keys(needles)))
    needles = sorted(needles, key=lambda needle: needle.requested_depth)
    texts = [_needle_text(spec, n.key, n.value) for n in needles]
    costs = [len(ids) for ids in tokenizer([f" {t}" for t in texts], add_special_tokens=False)["input_ids"]]
    room = length - spec.new_tokens
    budget = room - len(tokenizer(f"{head}{question} {prefix}")["input_ids"]) - sum(costs)
    start = _offset(hay, budget, needles, costs, tokenizer, rng)
    for _ in range(8):  # counts of pieces add up only nearly: correct by the exact count until the text fits
        if budget < 0:
            break
        sentences, counts = hay.take(start, budget, tokenizer)
        boundaries, _ = place(counts, [(n.requested_depth, c) for n, c in zip(needles, costs, strict=True)])
        context, starts = weave(sentences, texts, boundaries, hay.separator)
        encoded = tokenizer(f"{head}{context}{question} {prefix}", verbose=False)
        n_tokens = len(encoded["input_ids"])
        if MIN_FILL * length <= n_tokens + spec.new_tokens <= length:
            spans = [(len(head) + s, len(head) + s + len(t)) for s, t in zip(starts, texts, strict=True)]
            measured = _measure(encoded, (len(head), len(head) + len(context)), needles, spans)
            return f"{head}{context}{question}", prefix, measured, n_tokens
        budget += room - n_tokens
    reason = f"{spec.name} does not fit {length} tokens with {spec.new_tokens} to generate"
    raise UserError("length", reason, "use a longer one")


def _offset(
    hay: Haystack,
    budget: int,
    needles: list[Needle],
    costs: list[int],
    tokenizer: Tokenizer,
    rng: random.Random,
) -> int:
    """A random first sentence, one where the asked needles lie in their tenths if `OFFSETS` draws find one.

    A tenth of a short document may be narrower than a sentence and hold no boundary.
    """
    wanted = [(needle.requested_depth, cost) for needle, cost in zip(needles, costs, strict=True)]
    start = rng.randrange(len(hay.sentences))
    for _ in range(OFFSETS if len(hay.sentences) > 1 else 0):
        _, depths = place(hay.take(start, budget, tokenizer)[1], wanted)
        lie = (replace(needle, depth=depth) for needle, depth in zip(needles, depths, strict=True))
        if all(needle.decile == int(needle.requested_depth * 10) for needle in lie if needle.asked):
            break
        start = rng.randrange(len(hay.sentences))
    return start


def make_document(
    task: str,
    length: int,
    index: int,
    *,
    seed: int,
    tokenizer: Tokenizer,
    haystack: Haystack | None = None,
    split: Split = "eval",
) -> NeedleDocument:
    """Document number `index` of a task: a function of its arguments alone, whatever was made before.

    Args:
        task: a name in `ALL_TASKS`.
        length: tokens of prompt and generated answer together; filled to 98 % at least, never exceeded.
        index: from 0; any prefix of the indices has the asked needles' wanted tenths balanced to within one.
        seed: one seed for the whole document set; 0 is a seed like any other.
        tokenizer: a fast tokenizer; the special tokens it adds by itself are counted.
        haystack: text of the essay tasks, Jane Austen by default; the other tasks ignore it.
        split: which half of the key words to draw from.

    Raises:
        UserError: unknown task, or a length too short for the needles.
    """
    if task not in ALL_TASKS:
        raise UserError("task", f"unknown needle task {task!r}", f"use one of {', '.join(ALL_TASKS)}")
    spec = ALL_TASKS[task]
    rng = _generator(seed, task, length, index)
    needles = _draw_needles(spec, length, index, seed, split, rng)
    if spec.haystack == "essay":
        hay = haystack or default_haystack()
    elif spec.haystack == "filler":
        hay = filler_haystack()
    else:
        hay = _needle_haystack(spec, length, needles, split, tokenizer, rng)
    prompt, prefix, placed, n_tokens = _fit(spec, length, hay, needles, tokenizer, rng)
    asked = sorted((n for n in placed if n.asked), key=lambda n: _asked_keys(needles).index(n.key))
    answers = tuple(needle.value for needle in asked)  # by the question's order of keys, then the document's
    return NeedleDocument(task, length, index, seed, prompt, prefix, answers, placed, n_tokens)
