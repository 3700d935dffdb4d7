"""Trains the embedded teacher: a small Gated DeltaNet that retrieves inside its training length.

    python scripts/train_teacher.py --text books_*.jsonl.xz --valid valid.jsonl.xz --out OUT --graph --compile

Public-domain books mixed with needle documents whose key words never occur in evaluation. A plain mixture
leaves retrieval on a plateau, so it grows in levels (see docs/teacher.md): each level holds one difficulty
more, former levels stay in the mixture, and the next one starts when answers on held-out words are 90 %
right per token. The last level is the real thing at 512 tokens (all six RULER forms, several questions a
document, books with full loss) and takes the rest of the time, its learning rate falling to 5 %.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import os
import random
import re
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from regraft.assets import austen, teacher_dir
from regraft.assets.haystack import Haystack
from regraft.assets.needles import TASKS, Split, answer_text, make_document, words
from regraft.errors import UserError
from regraft.layers import GatedDeltaNet, RegraftConfig, RegraftForCausalLM

LENGTH = 512  # the teacher's training length
LENGTHS = (96, 160, 192, 192, 192, 256, LENGTH)  # tokens of a row, by level
LAST_LEVEL = len(LENGTHS) - 1
FORMER_LEVELS = 0.4  # share of rows drawn from levels already passed
PASS = 0.9  # per-token answer accuracy on evaluation words that opens the next level
HAYSTACK_CHARS = 12_000_000
BACKGROUND = 0.02  # loss weight of everything in a needle row that is not an answer
REPORT_LENGTHS = (512, 1024, 2048, 4096)
VALID_TOKENS = 262_144
SHARED_FIELDS = (  # of a configuration: what flash-linear-attention and RegraftConfig name alike
    *("hidden_size", "expand_v", "use_gate", "conv_size", "head_dim", "num_heads", "num_v_heads"),
    *("max_position_embeddings", "hidden_ratio", "intermediate_size", "num_hidden_layers", "norm_eps"),
    *("tie_word_embeddings", "initializer_range", "vocab_size", "allow_neg_eigval"),
)

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


def level_row(m: Material, level: int, rng: random.Random) -> Row:
    """One row of a level below the last: pairs, then every pair asked for."""
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
        for key, value in rng.choices(pairs, k=LENGTHS[0] // 2 - len(pairs)):
            add(key, BACKGROUND)
            add(value, 1.0)
        return row
    for key, value in pairs:
        if level >= 5:
            add(
                " " + " ".join(m.haystack.sentences[_at(rng, m)] for _ in range(rng.randint(0, 1))),
                BACKGROUND,
            )
        add(f" One of the special magic numbers for {key} is: {value}.", BACKGROUND)
    for key, value in rng.sample(pairs, len(pairs)):
        gap = " mentioned in the provided text is" if level >= 2 else " is"
        add(f" The special magic number for {key}{gap}", BACKGROUND)
        add(f" {value}", 1.0)
        add(".", BACKGROUND)
    return row


def _at(rng: random.Random, m: Material) -> int:
    return rng.randrange(len(m.haystack.sentences))


def document_row(m: Material, task: str, length: int, index: int, seed: int) -> Row:
    """A RULER document with its answer, `length` tokens at most."""
    doc = make_document(
        task, length, index, seed=seed, tokenizer=m.tokenizer, haystack=m.haystack, split=m.split
    )
    prompt, answer = m.ids(doc.model_input), m.ids(answer_text(doc))
    return prompt + answer, [BACKGROUND] * len(prompt) + [1.0] * len(answer)


def random_document(m: Material, rng: random.Random) -> Row:
    """A training document of any task."""
    while True:
        task, length = rng.choice(list(TASKS)), rng.choice([384, 448, LENGTH, LENGTH, LENGTH])
        try:
            return document_row(m, task, length, rng.randrange(10**6), rng.randrange(2**31))
        except UserError:  # a short document that could not be filled to the last sentence
            continue


def dense_row(m: Material, rng: random.Random) -> Row:
    """Several needles in prose and every one asked for, in the wording of the evaluation: a denser signal."""
    uuids = rng.random() < 0.25
    n = rng.randint(2, 3 if uuids else 6)
    keys = m.keys(rng, n, words(m.split)[1])
    kind = "uuid" if uuids else "number"
    pairs = [
        (
            k,
            str(uuid.UUID(int=rng.getrandbits(128), version=4))
            if uuids
            else str(rng.randrange(10**6, 10**7)),
        )
        for k in keys
    ]
    needles = [f"One of the special magic {kind}s for {k} is: {v}." for k, v in pairs]
    questions = [
        f"\nWhat is the special magic {kind} for {k} mentioned in the provided text?"
        f" The special magic {kind} for {k} mentioned in the provided text is"
        for k, _ in pairs
    ]
    room = (
        LENGTH
        - sum(len(m.ids(q)) + (22 if uuids else 6) for q in questions)
        - sum(len(m.ids(t)) + 1 for t in needles)
        - 40
    )
    room = rng.randint(0, max(0, room))
    start = _at(rng, m)
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
    return ids[:LENGTH], weights[:LENGTH]


def book_row(m: Material, rng: random.Random, length: int) -> Row:
    start = rng.randrange(len(m.books) - length)
    return m.books[start : start + length].tolist(), [1.0] * length


class Rows(IterableDataset):
    """Endless batches of one level: `(ids [R,T], weights [R,T])`, books and needle rows side by side."""

    def __init__(self, m: Material, level: int, rows: int, seed: int) -> None:
        self.m, self.level, self.rows, self.seed = m, level, rows, seed

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        info = torch.utils.data.get_worker_info()
        rng = random.Random(f"{self.seed}-{self.level}-{info.id if info else 0}")
        while True:
            yield collate([self.row(rng) for _ in range(self.rows)], LENGTHS[self.level])

    def row(self, rng: random.Random) -> tuple[Row, bool]:
        if self.level < LAST_LEVEL:
            former = self.level > 0 and rng.random() < FORMER_LEVELS
            return level_row(self.m, rng.randrange(self.level) if former else self.level, rng), False
        kind = rng.random()
        if kind < 0.35:
            return book_row(self.m, rng, LENGTH), True
        if kind < 0.60:
            return dense_row(self.m, rng), False
        if kind < 0.92:
            return random_document(self.m, rng), False
        a, b = level_row(self.m, rng.randrange(LAST_LEVEL), rng), level_row(self.m, LAST_LEVEL - 1, rng)
        return (a[0] + b[0], a[1] + b[1]), False


def collate(rows: list[tuple[Row, bool]], length: int) -> tuple[Tensor, Tensor, Tensor]:
    ids = torch.zeros(len(rows), length, dtype=torch.long)
    weights = torch.zeros(len(rows), length)
    for i, ((row, weight), _) in enumerate(rows):
        n = min(length, len(row))
        ids[i, :n], weights[i, :n] = torch.tensor(row[:n]), torch.tensor(weight[:n])
    return ids, weights, torch.tensor([book for _, book in rows])


def loss_of(
    model: Callable[..., Any], ids: Tensor, weights: Tensor, is_book: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Weighted cross-entropy; needle rows and book rows are normalised apart and count the same."""
    logits = model(ids).logits[:, :-1].float()
    ce = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(ids.shape[0], -1)
    w = weights[:, 1:]
    book = is_book[:, None].float()
    parts = {}
    for name, mask in (("needle", 1 - book), ("book", book)):
        total = (w * mask).sum()
        parts[name] = (ce * w * mask).sum() / total.clamp(min=1)
    return parts["needle"] + parts["book"], {k: v.detach() for k, v in parts.items()}


@torch.no_grad()
@torch.compiler.set_stance("force_eager")  # one shape after the other: not worth compiling
def accuracy(
    model: torch.nn.Module, rows: list[Row], length: int, device: str, batch: int = 64
) -> tuple[float, float]:
    """Teacher-forced accuracy of the answers: share of tokens right, share of rows with every token right."""
    right = total = exact = 0
    for i in range(0, len(rows), batch):
        ids, weights, _ = collate([(r, False) for r in rows[i : i + batch]], length)
        ids, answer = ids.to(device), (weights[:, 1:] == 1.0).to(device)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            hit = (model(ids).logits[:, :-1].argmax(-1) == ids[:, 1:]) | ~answer
        right += int((hit & answer).sum())
        total += int(answer.sum())
        exact += int(hit.all(-1).sum())
    return right / max(1, total), exact / len(rows)


def read_texts(paths: list[Path], max_chars: int) -> Iterator[str]:
    done = 0
    for path in paths:
        with lzma.open(path, "rt", encoding="utf-8") as f:
            for line in f:
                book = json.loads(line)
                if "Austen" in str(book.get("author")):
                    continue  # the evaluation's haystack
                done += len(book["text"])
                yield book["text"]
                if done > max_chars:
                    return


def tokenised(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> np.ndarray:
    eos = tokenizer.eos_token_id
    parts: list[np.ndarray] = []
    for i in range(0, len(texts), 64):
        for ids in tokenizer(texts[i : i + 64], verbose=False)["input_ids"]:
            parts.append(np.array([*ids, eos], dtype=np.uint16))
    return np.concatenate(parts)


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


def report(model: RegraftForCausalLM, m: Material, args: argparse.Namespace) -> dict[str, dict[int, float]]:
    """Share of documents whose every answer token is right, by task and length."""
    cells = [(task, length) for task in TASKS for length in REPORT_LENGTHS]
    checks = [Checks(m, task, length, args.documents) for task, length in cells]
    rows = list(DataLoader(ConcatDataset(checks), batch_size=None, collate_fn=list, num_workers=args.workers))
    table: dict[str, dict[int, float]] = {task: {} for task in TASKS}
    for i, (task, length) in enumerate(cells):
        cell = rows[i * args.documents : (i + 1) * args.documents]
        exact = accuracy(model, cell, length, args.device, max(1, 16384 // length))[1]
        table[task][length] = round(exact, 3)
    return table


@torch.no_grad()
@torch.compiler.set_stance("force_eager")
def perplexity(model: RegraftForCausalLM, ids: np.ndarray, device: str) -> float:
    """Of held-out books, in rows of 512 tokens."""
    rows = torch.from_numpy(ids[: len(ids) // LENGTH * LENGTH].astype(np.int64)).view(-1, LENGTH)
    total = 0.0
    for batch in rows.split(64):
        batch = batch.to(device)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            logits = model(batch).logits[:, :-1].float()
        total += float(F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum"))
    return math.exp(total / (len(rows) * (LENGTH - 1)))


@torch.no_grad()
def spread_decays(model: RegraftForCausalLM) -> None:
    """Rates of forgetting from 0.001 to 0.3 a token over the heads of a layer, so that some keep a needle."""
    for mixer in (m for m in model.modules() if isinstance(m, GatedDeltaNet)):
        dt = torch.logspace(-3, -0.5, mixer.num_v_heads)
        mixer.A_log.zero_()
        mixer.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))


def keep_absent_tokens(embeddings: torch.nn.Embedding, ids: Tensor) -> None:
    """No gradient for tokens that a batch does not hold.

    The softmax pushes them all in one direction, and Adam makes full steps of it: rare words, those of the
    evaluation too, would end up with one and the same embedding and could not be told apart as keys.
    """
    assert embeddings.weight.grad is not None
    present = torch.zeros(len(embeddings.weight), 1, device=ids.device)
    embeddings.weight.grad.mul_(present.index_fill_(0, ids.flatten(), 1.0))


def new_model(args: argparse.Namespace, vocab_size: int) -> RegraftForCausalLM:
    config = RegraftConfig(
        vocab_size=vocab_size,
        hidden_size=args.hidden,
        num_hidden_layers=args.layers,
        num_heads=args.heads,
        head_dim=64,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=1,
    )
    model = RegraftForCausalLM(config)
    with torch.no_grad():
        embeddings = model.model.embeddings.weight
        embeddings.normal_(0, args.embedding_std)
        embeddings += args.embedding_mean * torch.randn(args.hidden)
    spread_decays(model)
    return model


def make_optimizer(model: RegraftForCausalLM, args: argparse.Namespace) -> torch.optim.AdamW:
    """AdamW; only matrices decay, embeddings do not."""
    embeddings = model.model.embeddings.weight
    decayed = [p for p in model.parameters() if p.dim() == 2 and p is not embeddings]
    others = [p for p in model.parameters() if p.dim() != 2 or p is embeddings]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    cuda = args.device == "cuda"
    lr = torch.tensor(args.lr, device=args.device) if cuda else args.lr  # a tensor, to change it in a graph
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=cuda, capturable=cuda)


class Step:
    """One optimizer step; with `graph` the fourth of each batch shape is recorded, later ones are replayed.

    A step of a small model is thousands of short kernels, and launching them takes longer than they do.
    """

    def __init__(self, model: RegraftForCausalLM, args: argparse.Namespace) -> None:
        self.model, self.args = model, args
        self.optimizer = make_optimizer(model, args)
        self.shape: tuple[int, ...] = ()
        self.calls = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.inputs: list[Tensor] = []
        self.parts: dict[str, Tensor] = {}

    def __call__(self, batch: Sequence[Tensor], lr: float) -> dict[str, Tensor]:
        """Losses of the parts of the batch."""
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
        if not self.args.graph:
            return self._run([x.to(self.args.device, non_blocking=True) for x in batch])
        if batch[0].shape != self.shape:
            self.shape, self.calls, self.graph = tuple(batch[0].shape), 0, None
            self.inputs = [x.to(self.args.device) for x in batch]
        for to, x in zip(self.inputs, batch, strict=True):
            to.copy_(x, non_blocking=True)
        self.calls += 1
        if self.calls <= 3:  # warm up outside the main stream, as recording demands
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self.parts = self._run(self.inputs)
            torch.cuda.current_stream().wait_stream(stream)
            return self.parts
        if self.graph is None:
            self.optimizer.zero_grad(set_to_none=True)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                self.parts = self._run(self.inputs)
        self.graph.replay()
        return self.parts

    def _run(self, batch: Sequence[Tensor]) -> dict[str, Tensor]:
        ids, weights, is_book = batch
        with torch.autocast(self.args.device, dtype=torch.bfloat16, enabled=self.args.device == "cuda"):
            loss, parts = loss_of(self.model, ids, weights, is_book)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if self.model.model.embeddings.weight.requires_grad:
            keep_absent_tokens(self.model.model.embeddings, ids)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return parts


class Curriculum:
    """Training state: the level, its batches and its evaluation rows."""

    def __init__(self, m: Material, held_out: Material, args: argparse.Namespace, level: int) -> None:
        self.m, self.held_out, self.args = m, held_out, args
        self.passed: dict[int, int] = {}  # level -> steps it took
        self.enter(level)

    def enter(self, level: int) -> None:
        """Start a level: new workers, its evaluation rows made once."""
        args = self.args
        self.level, self.steps, self.began = level, 0, time.time()
        last = level == LAST_LEVEL
        self.every, self.length = 400 if last else 50, LENGTHS[level]
        self.batches = iter(
            DataLoader(
                Rows(self.m, level, args.last_rows if last else args.rows, args.seed),
                batch_size=None,
                num_workers=args.workers,
                prefetch_factor=8 if args.workers else None,
            )
        )
        rng = random.Random(0)
        self.checks = (
            {
                task: [document_row(self.held_out, task, LENGTH, i, seed=0) for i in range(50)]
                for task in TASKS
            }
            if last
            else {"": [level_row(self.held_out, level, rng) for _ in range(128)]}
        )

    def learning_rate(self, step: int, deadline: float) -> float:
        """Warm-up over 100 steps; in the last level a cosine over its wall time, down to 5 %."""
        lr: float = self.args.lr * min(1.0, (step + 1) / 100)
        if self.level < LAST_LEVEL:
            return lr
        done = min(1.0, (time.time() - self.began) / max(1.0, deadline - self.began))
        return lr * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done)))

    def check(self, model: RegraftForCausalLM) -> dict[str, Any]:
        """Accuracy on evaluation words; enters the next level if it is good enough."""
        found: dict[str, Any] = {}
        token = 0.0
        for name, rows in self.checks.items():
            token, exact = accuracy(model, rows, self.length, self.args.device)
            suffix = name and f" {name}"
            found |= {f"token{suffix}": round(token, 3), f"exact{suffix}": round(exact, 3)}
        line = {"level": self.level, "level_step": self.steps, **found}
        if self.level < LAST_LEVEL and token > PASS:
            self.passed[self.level] = self.steps
            self.enter(self.level + 1)
        elif self.level < LAST_LEVEL and self.steps >= self.args.patience:
            raise SystemExit(f"level {self.level} stays on its plateau: {json.dumps(line)}")
        return line


def train(
    model: RegraftForCausalLM, curriculum: Curriculum, args: argparse.Namespace, log: TextIO
) -> dict[str, Any]:
    """Train for `args.minutes`; returns counts."""
    take_step = Step(model, args)
    step = tokens = 0
    start = time.time()
    deadline = start + 60 * args.minutes
    while time.time() < deadline:
        lr = curriculum.learning_rate(step, deadline)
        batch = next(curriculum.batches)
        if args.compile and curriculum.level == LAST_LEVEL and curriculum.steps == 0:
            for block in model.model.layers:  # one program serves all of them
                block.compile(dynamic=False)
        model.model.embeddings.weight.requires_grad_(curriculum.level == LAST_LEVEL or not args.frozen)
        parts = take_step(batch, lr)
        step, tokens, curriculum.steps = step + 1, tokens + batch[0].numel(), curriculum.steps + 1
        if curriculum.steps % curriculum.every == 0:
            counts = {
                "step": step,
                "tokens": tokens,
                "lr": round(lr, 6),
                "seconds": round(time.time() - start, 1),
            }
            losses = {name: round(float(value), 4) for name, value in parts.items()}
            line = json.dumps({**counts, **losses, **curriculum.check(model)})
            print(line, flush=True)
            log.write(line + "\n")
            log.flush()
            if curriculum.level == LAST_LEVEL:
                model.save_pretrained(args.out / "teacher", max_shard_size="12MB")
    return {
        "tokens": tokens,
        "steps": step,
        "seconds": round(time.time() - start, 1),
        "passed": curriculum.passed,
    }


def export(model: RegraftForCausalLM, folder: Path) -> None:
    """Write the model as flash-linear-attention would: its names and fields, bfloat16 except for rates."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: (x.float() if name.endswith(("A_log", "dt_bias")) else x.bfloat16()).cpu().contiguous()
        for name, x in model.state_dict().items()
        if name != "lm_head.weight"  # tied
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    c = model.config
    special = {"bos_token_id": c.bos_token_id, "eos_token_id": c.eos_token_id, "pad_token_id": c.pad_token_id}
    config = {
        "architectures": ["GatedDeltaNetForCausalLM"],
        "model_type": "gated_deltanet",
        "dtype": "bfloat16",
        "attn": None,
        "attn_mode": "chunk",
        "use_short_conv": True,
        "hidden_act": "swish",
        "use_cache": True,
        **{name: getattr(c, name) for name in SHARED_FIELDS},
        **special,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(special, indent=2) + "\n")


def arguments() -> argparse.Namespace:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--text", nargs="+", type=Path, required=True, help="books, .jsonl.xz: text, author")
    ap.add_argument("--valid", type=Path, required=True, help="held-out books, for the perplexity")
    ap.add_argument("--out", type=Path, required=True)
    ap.add_argument(
        "--minutes", type=float, default=8.0, help="wall time of training; 0 only evaluates --init"
    )
    ap.add_argument("--device", default="cuda")
    ap.add_argument("--rows", type=int, default=96, help="rows a step of the short levels")
    ap.add_argument("--last-rows", type=int, default=96, help="rows a step of the last level")
    ap.add_argument("--lr", type=float, default=2e-3)
    ap.add_argument("--layers", type=int, default=6)
    ap.add_argument("--hidden", type=int, default=192)
    ap.add_argument("--heads", type=int, default=3)
    ap.add_argument("--max-chars", type=int, default=10**9)
    ap.add_argument("--workers", type=int, default=12)
    ap.add_argument("--seed", type=int, default=0)
    ap.add_argument("--patience", type=int, default=3000, help="steps after which a level gives up")
    ap.add_argument("--documents", type=int, default=100, help="documents a cell of the final table")
    ap.add_argument("--init", type=Path, help="continue at the last level from this folder")
    ap.add_argument("--embedding-std", type=float, default=0.05)
    ap.add_argument("--embedding-mean", type=float, default=0.05, help="size of what all embeddings share")
    ap.add_argument("--frozen", action="store_true", help="random embeddings until the last level")
    ap.add_argument("--graph", action="store_true", help="record steps as CUDA graphs: much faster")
    ap.add_argument("--compile", action="store_true", help="compile the blocks")
    return ap.parse_args()


def main() -> None:
    args = arguments()
    torch.manual_seed(args.seed)
    torch.backends.cuda.matmul.allow_tf32 = False
    start = time.time()
    tokenizer = AutoTokenizer.from_pretrained(teacher_dir())
    texts = list(read_texts(args.text, args.max_chars))
    books = tokenised(tokenizer, texts)
    valid = tokenised(tokenizer, list(read_texts([args.valid], 4 * VALID_TOKENS)))[:VALID_TOKENS]
    joined = "\n".join(t[2000:] for t in texts)[: min(HAYSTACK_CHARS, args.max_chars)]
    m = Material.make(tokenizer, Haystack.from_text(joined), books, "train")
    held_out = Material.make(tokenizer, Haystack.from_text(austen()), books, "eval")
    for material in (m, held_out):
        material.haystack.take(0, 10, tokenizer)  # count its tokens once, before workers fork
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    print(
        f"{len(books):,} book tokens, {len(m.nouns)} single-token nouns, {time.time() - start:.0f} s",
        flush=True,
    )

    model = RegraftForCausalLM.from_pretrained(args.init) if args.init else new_model(args, len(tokenizer))
    model = model.float().to(args.device)
    print(f"{model.num_parameters():,} parameters", flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"args": {k: str(v) for k, v in vars(args).items()}}
    result |= {"torch": torch.__version__, "transformers": transformers.__version__}
    if args.device == "cuda":
        result["card"] = torch.cuda.get_device_name()
    if args.minutes > 0:
        curriculum = Curriculum(m, held_out, args, LAST_LEVEL if args.init else 0)
        with (args.out / "train_teacher.jsonl").open("w") as log:
            result |= train(model, curriculum, args, log)
        model.save_pretrained(args.out / "teacher", max_shard_size="12MB")
        export(model, args.out / "embedded")
    result["perplexity"] = round(perplexity(model, valid, args.device), 2)
    result["exact_match"] = report(model, held_out, args)
    result["all_seconds"] = round(time.time() - start, 1)
    (args.out / "train_teacher.json").write_text(json.dumps(result, indent=1))
    print(f"perplexity {result['perplexity']}, {result['all_seconds']} s in all")
    for task, row in result["exact_match"].items():
        print(task, *(f"{length}: {value}" for length, value in row.items()))


if __name__ == "__main__":
    main()
