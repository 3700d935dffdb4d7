"""Rows of training and evaluation: pairs, needle documents with their answers, windows of books."""

from __future__ import annotations

import random
import re
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset
from transformers import PreTrainedTokenizerFast

from regraft.assets.haystack import Haystack
from regraft.assets.needles import TASKS, Split, answer_text, make_document, words
from regraft.errors import UserError
from scripts.teacher.levels import SHORT, Level

BACKGROUND = 0.02  # loss weight of everything in a needle row that is not an answer

Row = tuple[list[int], list[float]]  # token ids and the loss weight of each


@dataclass
class Material:
    """Everything rows are made of.

    Training keys are key words of the training half and, half of the time, other letters of the vocabulary
    (`pieces`): a model that has seen only a few hundred keys learns those keys and not how to look one up.
    """

    tokenizer: PreTrainedTokenizerFast
    haystack: Haystack
    books: np.ndarray  # uint16 token ids, documents separated by <|endoftext|>
    split: Split
    adjectives: list[str]
    nouns: list[str]  # those of a single token
    pieces: list[str]  # tokens of small letters that are no key word of the evaluation

    @classmethod
    def make(
        cls, tokenizer: PreTrainedTokenizerFast, haystack: Haystack, books: np.ndarray, split: Split
    ) -> Material:
        adjectives, nouns = words(split)
        single = [n for n in nouns if len(tokenizer.encode(n)) == 1]
        kept = {word for words_of_kind in words("eval") for word in words_of_kind} | set(single)
        pieces = sorted(t for t in tokenizer.get_vocab() if re.fullmatch("[a-z]+", t) and t not in kept)
        pieces = [t for t in pieces if len(tokenizer.encode(t)) == 1]
        haystack.take(0, 10, tokenizer)  # counts its tokens once, before workers fork
        return cls(tokenizer, haystack, books, split, list(adjectives), single, pieces)

    def ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.backend_tokenizer.encode(text).ids
        return ids

    def word(self, rng: random.Random, words: Sequence[str]) -> str:
        """One of these words; in training half of the time any letters."""
        return rng.choice(self.pieces if self.split == "train" and rng.random() < 0.5 else words)

    def keys(self, rng: random.Random, n: int, nouns: Sequence[str], two_words: bool = True) -> list[str]:
        """Up to n different keys."""
        return list(
            dict.fromkeys(
                f"{self.word(rng, self.adjectives)}-{self.word(rng, nouns)}"
                if two_words
                else self.word(rng, nouns)
                for _ in range(n)
            )
        )

    def sentence(self, rng: random.Random) -> int:
        """Number of a sentence of the haystack."""
        return rng.randrange(len(self.haystack.sentences))


def level_row(m: Material, level: int, rng: random.Random) -> Row:
    """One row of a short level: pairs, then every pair asked for."""
    n = rng.randint(2, 24) if level == 0 else rng.randint(2, 5)
    keys = m.keys(rng, n, m.nouns, two_words=level >= 3)
    values = [str(rng.randrange(10**6, 10**7)) if level >= 4 else f"{rng.randrange(1000):03d}" for _ in keys]
    pairs = list(zip(keys, values, strict=True))
    row: Row = ([], [])

    def add(text: str, weight: float) -> None:
        ids = m.ids(text)
        row[0].extend(ids)
        row[1].extend([weight] * len(ids))

    if level == 0:
        # Neighbouring single tokens: the bare skill of recalling the value that followed a key.
        for key, value in pairs:
            add(key, BACKGROUND)
            add(value, BACKGROUND)
        for key, value in rng.choices(pairs, k=SHORT[0] // 2 - len(pairs)):
            add(key, BACKGROUND)
            add(value, 1.0)
        return row
    for key, value in pairs:
        if level >= 5:
            prose = (m.haystack.sentences[m.sentence(rng)] for _ in range(rng.randint(0, 1)))
            add(" " + " ".join(prose), BACKGROUND)
        add(f" One of the special magic numbers for {key} is: {value}.", BACKGROUND)
    for key, value in rng.sample(pairs, len(pairs)):
        gap = " mentioned in the provided text is" if level >= 2 else " is"
        add(f" The special magic number for {key}{gap}", BACKGROUND)
        add(f" {value}", 1.0)
        add(".", BACKGROUND)
    return row


def document_row(m: Material, task: str, length: int, index: int, seed: int) -> Row:
    """A RULER document with its answer, `length` tokens at most."""
    doc = make_document(
        task, length, index, seed=seed, tokenizer=m.tokenizer, haystack=m.haystack, split=m.split
    )
    prompt, answer = m.ids(doc.model_input), m.ids(answer_text(doc))
    return prompt + answer, [BACKGROUND] * len(prompt) + [1.0] * len(answer)


def random_document(m: Material, length: int, rng: random.Random) -> Row:
    """A training document of any task, three quarters of `length` long at least."""
    while True:
        task = rng.choice(list(TASKS))
        tokens = rng.choice([length * 3 // 4, length * 7 // 8, length, length, length])
        try:
            return document_row(m, task, tokens, rng.randrange(10**6), rng.randrange(2**31))
        except UserError:  # a short document that could not be filled to the last sentence
            continue


def dense_row(m: Material, length: int, rng: random.Random) -> Row:
    """Several needles in prose and every one asked for, in the wording of the evaluation: a denser signal."""
    uuids = rng.random() < 0.25
    n = rng.randint(2, 3 if uuids else 6)
    keys = m.keys(rng, n, words(m.split)[1])
    kind = "uuid" if uuids else "number"
    pairs = [(key, _value(rng, uuids)) for key in keys]
    needles = [f"One of the special magic {kind}s for {k} is: {v}." for k, v in pairs]
    questions = [
        f"\nWhat is the special magic {kind} for {k} mentioned in the provided text?"
        f" The special magic {kind} for {k} mentioned in the provided text is"
        for k, _ in pairs
    ]
    answers = sum(len(m.ids(q)) + (22 if uuids else 6) for q in questions)
    room = length - answers - sum(len(m.ids(t)) + 1 for t in needles) - 40
    room = rng.randint(0, max(0, room))
    start = m.sentence(rng)
    sentences = m.haystack.take(start, room, m.tokenizer)[0] if room else []
    for text in needles:
        sentences.insert(rng.randint(0, len(sentences)), text)
    head = (
        f"Some special magic {kind}s are hidden within the following text. Make sure to memorize it. "
        f"I will quiz you about the {kind}s afterwards.\n"
    )
    ids = m.ids(head + " ".join(sentences))
    weights = [BACKGROUND] * len(ids)
    for (_, value), question in rng.sample(list(zip(pairs, questions, strict=True)), len(pairs)):
        q, a = m.ids(question), m.ids(f" {value}.")
        ids, weights = ids + q + a, weights + [BACKGROUND] * len(q) + [1.0] * len(a)
    return ids[:length], weights[:length]


def _value(rng: random.Random, uuids: bool) -> str:
    if uuids:
        return str(uuid.UUID(int=rng.getrandbits(128), version=4))
    return str(rng.randrange(10**6, 10**7))


def book_row(m: Material, length: int, rng: random.Random) -> Row:
    """A window of a book, ended as the pieces are that a student is distilled on."""
    start = rng.randrange(len(m.books) - length)
    eos = m.tokenizer.eos_token_id
    return [*m.books[start : start + length - 1].tolist(), eos], [1.0] * length


class Rows(IterableDataset):
    """Endless batches of one level: `(ids [R,T], weights [R,T], is_book [R])`.

    Args:
        m: what rows are made of.
        level: which rows.
        seed: text; other seeds give other rows.
    """

    def __init__(self, m: Material, level: Level, seed: str) -> None:
        self.m, self.level, self.seed = m, level, seed

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        info = torch.utils.data.get_worker_info()
        rng = random.Random(f"{self.seed}-{info.id if info else 0}")
        kinds, shares = list(self.level.mixture), list(self.level.mixture.values())
        while True:
            drawn = rng.choices(kinds, shares, k=self.level.rows)
            yield collate([(self.row(kind, rng), kind == "book") for kind in drawn], self.level.length)

    def row(self, kind: str, rng: random.Random) -> Row:
        length = self.level.length
        match kind:
            case "book":
                return book_row(self.m, length, rng)
            case "dense":
                return dense_row(self.m, length, rng)
            case "ruler":
                return random_document(self.m, length, rng)
            case "former":
                last = len(SHORT) - 1
                numbers = (rng.randrange(last + 1), last)
                (a, x), (b, y) = (level_row(self.m, number, rng) for number in numbers)
                return a + b, x + y
            case _:
                return level_row(self.m, int(kind), rng)


def collate(rows: list[tuple[Row, bool]], length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows as `ids [R,length]`, `weights [R,length]`, `is_book [R]`, the rest filled with ids of weight 0."""
    ids = torch.zeros(len(rows), length, dtype=torch.long)
    weights = torch.zeros(len(rows), length)
    for i, ((row, weight), _) in enumerate(rows):
        n = min(length, len(row))
        ids[i, :n], weights[i, :n] = torch.tensor(row[:n]), torch.tensor(weight[:n])
    return ids, weights, torch.tensor([book for _, book in rows])


class Checks(Dataset[Row]):
    """Evaluation documents of one task and length, depths balanced, words that training never asks for."""

    def __init__(self, m: Material, task: str, length: int, n: int) -> None:
        self.m, self.task, self.length, self.n = m, task, length, n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Row:
        if index >= self.n:
            raise IndexError(index)
        return document_row(self.m, self.task, self.length, index, seed=0)

    def rows(self) -> list[Row]:
        """All of them."""
        return [self[index] for index in range(self.n)]
