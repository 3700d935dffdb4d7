"""Trains the embedded teacher: a small Gated DeltaNet that retrieves inside its training length.

    python scripts/train_teacher.py --text books_*.jsonl.xz --out OUT --minutes 8 [--device cuda]

Public-domain books mixed with needle documents whose key words never occur in evaluation. A plain mixture leaves
retrieval on a plateau, so it grows in levels (see docs/teacher.md): each level holds one difficulty more, former
levels stay in the mixture, and the next one starts when answers on held-out words are 90 % right per token.
The last level is the real thing at 512 tokens (all six RULER forms, several questions a document, books with full
loss) and takes the rest of the time, its learning rate falling to 5 %.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from regraft.assets import austen, teacher_dir
from regraft.assets.haystack import Haystack
from regraft.assets.needles import TASKS, answer_text, make_document, words
from regraft.layers import RegraftConfig, RegraftForCausalLM

LENGTH = 512  # the teacher's training length
SHORT = 192  # rows of the levels before the last
LAST_LEVEL = 6
FORMER_LEVELS = 0.4  # share of rows drawn from levels already passed
PASS = 0.9  # per-token answer accuracy on evaluation words that opens the next level
HAYSTACK_CHARS = 12_000_000

Row = tuple[list[int], list[float]]  # token ids and the loss weight of each


@dataclass
class Material:
    """Everything rows are made of; `keys` and `values` are single tokens."""

    tokenizer: PreTrainedTokenizerFast
    haystack: Haystack
    books: np.ndarray  # uint16 token ids, documents separated by <|endoftext|>
    split: str
    adjectives: list[str]
    nouns: list[str]

    @classmethod
    def make(cls, tokenizer: PreTrainedTokenizerFast, haystack: Haystack, books: np.ndarray, split: Any) -> Material:
        adjectives, nouns = words(split)
        single = [n for n in nouns if len(tokenizer.encode(n)) == 1]
        return cls(tokenizer, haystack, books, split, list(adjectives), single)

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)


def level_row(m: Material, level: int, rng: random.Random) -> Row:
    """One row of a level below the last: pairs, then every pair asked for."""
    n = rng.randint(4, 24) if level == 0 else rng.randint(2, 5)
    two_words = level >= 3
    keys = [f"{rng.choice(m.adjectives)}-{rng.choice(m.nouns)}" if two_words else rng.choice(m.nouns) for _ in range(n)]
    keys = list(dict.fromkeys(keys))
    values = [str(rng.randrange(10**6, 10**7)) if level >= 4 else f"{rng.randrange(1000):03d}" for _ in keys]
    pairs = list(zip(keys, values, strict=True))
    row: Row = ([], [])

    def add(text: str, weight: float) -> None:
        ids = m.ids(text)
        row[0].extend(ids)
        row[1].extend([weight] * len(ids))

    background = 0.02
    if level == 0:
        # Neighbouring single tokens: the bare skill of recalling the value that followed a key.
        for key, value in pairs:
            add(key, background), add(value, background)
        for key, value in rng.sample(pairs, len(pairs)):
            add(key, background), add(value, 1.0)
        return row
    for key, value in pairs:
        if level >= 5:
            add(" " + " ".join(m.haystack.sentences[_at(rng, m)] for _ in range(rng.randint(0, 1))), background)
        add(f" One of the special magic numbers for {key} is: {value}.", background)
    for key, value in rng.sample(pairs, len(pairs)):
        gap = " mentioned in the provided text is" if level >= 2 else " is"
        add(f" The special magic number for {key}{gap}", background)
        add(f" {value}", 1.0), add(".", background)
    return row


def _at(rng: random.Random, m: Material) -> int:
    return rng.randrange(len(m.haystack.sentences))


def document_row(m: Material, rng: random.Random, tasks: tuple[str, ...] | None = None, length: int = 0) -> Row:
    """A RULER document of up to 512 tokens and its answer."""
    name = rng.choice(tasks or tuple(TASKS))
    length = length or rng.choice([256, 384, LENGTH, LENGTH, LENGTH])
    doc = make_document(
        name, length, rng.randrange(10**6), seed=rng.randrange(2**31), tokenizer=m.tokenizer, haystack=m.haystack,
        split=m.split,  # type: ignore[arg-type]
    )
    prompt, answer = m.ids(doc.model_input), m.ids(answer_text(doc))
    return prompt + answer, [0.02] * len(prompt) + [1.0] * len(answer)


def dense_row(m: Material, rng: random.Random) -> Row:
    """Several needles in prose and every one asked for, in the wording of the evaluation: a denser signal."""
    adjectives, nouns = m.adjectives, words(m.split)[1]  # type: ignore[arg-type]
    n = rng.randint(2, 6)
    keys = list(dict.fromkeys(f"{rng.choice(adjectives)}-{rng.choice(nouns)}" for _ in range(n)))
    pairs = [(k, str(rng.randrange(10**6, 10**7))) for k in keys]
    needles = [f"One of the special magic numbers for {k} is: {v}." for k, v in pairs]
    questions = [
        f"\nWhat is the special magic number for {k} mentioned in the provided text?"
        f" The special magic number for {k} mentioned in the provided text is"
        for k, _ in pairs
    ]
    room = LENGTH - sum(len(m.ids(q)) + 6 for q in questions) - sum(len(m.ids(t)) + 1 for t in needles) - 40
    room = rng.randint(0, max(0, room))
    start = _at(rng, m)
    sentences = m.haystack.take(start, room, m.tokenizer)[0] if room else []
    for text in needles:
        sentences.insert(rng.randint(0, len(sentences)), text)
    head = (
        "Some special magic numbers are hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the numbers afterwards.\n"
    )
    ids = m.ids(head + " ".join(sentences))
    weights = [0.02] * len(ids)
    for (_, value), question in rng.sample(list(zip(pairs, questions, strict=True)), len(pairs)):
        q, a = m.ids(question), m.ids(f" {value}.")
        ids, weights = ids + q + a, weights + [0.02] * len(q) + [1.0] * len(a)
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
            yield collate([self.row(rng) for _ in range(self.rows)], LENGTH if self.level == LAST_LEVEL else SHORT)

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
            return document_row(self.m, rng), False
        a, b = level_row(self.m, rng.randrange(LAST_LEVEL), rng), level_row(self.m, LAST_LEVEL - 1, rng)
        return (a[0] + b[0], a[1] + b[1]), False


def collate(rows: list[tuple[Row, bool]], length: int) -> tuple[Tensor, Tensor, Tensor]:
    ids = torch.zeros(len(rows), length, dtype=torch.long)
    weights = torch.zeros(len(rows), length)
    for i, ((row, weight), _) in enumerate(rows):
        n = min(length, len(row))
        ids[i, :n], weights[i, :n] = torch.tensor(row[:n]), torch.tensor(weight[:n])
    return ids, weights, torch.tensor([book for _, book in rows])


def loss_of(model: torch.nn.Module, ids: Tensor, weights: Tensor, is_book: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
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
def accuracy(model: torch.nn.Module, rows: list[Row], length: int, device: str, batch: int = 64) -> tuple[float, float]:
    """Per-token accuracy of the answers under teacher forcing, and the share of rows with every token right."""
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


def report(model: torch.nn.Module, m: Material, device: str, n: int, lengths: tuple[int, ...]) -> dict[str, float]:
    table = {}
    for task in TASKS:
        for length in lengths:
            rng = random.Random(f"check-{task}-{length}")
            rows = [document_row(m, rng, (task,), length) for _ in range(n)]
            table[f"{task}@{length}"] = round(accuracy(model, rows, length, device, max(1, 16384 // length))[1], 3)
    return table


@torch.no_grad()
def spread_decays(model: RegraftForCausalLM) -> None:
    """Rates of forgetting from 0.001 to 0.3 a token over the heads of each layer, so that some can keep a needle."""
    for block in model.model.layers:
        dt = torch.logspace(-3, -0.5, block.attn.num_v_heads)
        block.attn.A_log.zero_()
        block.attn.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--text", nargs="+", type=Path, required=True, help="books, .jsonl.xz with fields text, author")
    ap.add_argument("--out", type=Path, required=True)
    ap.add_argument("--minutes", type=float, default=8.0, help="wall time of training")
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
    ap.add_argument("--init", type=Path, help="continue at the last level from this folder")
    ap.add_argument("--compile", action="store_true")
    args = ap.parse_args()
    torch.manual_seed(args.seed)
    torch.backends.cuda.matmul.allow_tf32 = False
    start = time.time()

    tokenizer = AutoTokenizer.from_pretrained(teacher_dir())
    texts = list(read_texts(args.text, args.max_chars))
    books = tokenised(tokenizer, texts)
    joined = "\n".join(t[2000:] for t in texts)[: min(HAYSTACK_CHARS, args.max_chars)]
    haystack = Haystack.from_text(joined)
    m = Material.make(tokenizer, haystack, books, "train")
    held_out = Material.make(tokenizer, Haystack.from_text(austen()), books, "eval")
    for material in (m, held_out):
        material.haystack.take(0, 10, tokenizer)  # count its tokens once, before workers fork
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    print(f"{len(books):,} book tokens, {len(m.nouns)} single-token nouns, {time.time() - start:.0f} s", flush=True)

    config = RegraftConfig(
        vocab_size=len(tokenizer), hidden_size=args.hidden, num_hidden_layers=args.layers, num_heads=args.heads,
        head_dim=64, max_position_embeddings=LENGTH, tie_word_embeddings=True,
        bos_token_id=0, eos_token_id=0, pad_token_id=1,
    )
    model = RegraftForCausalLM(config) if args.init is None else RegraftForCausalLM.from_pretrained(args.init)
    if args.init is None:
        spread_decays(model)
    model = model.float().to(args.device)
    print(f"{model.num_parameters():,} parameters", flush=True)
    named = list(model.named_parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for _, p in named if p.dim() == 2], "weight_decay": 0.1},
            {"params": [p for _, p in named if p.dim() != 2], "weight_decay": 0.0},
        ],
        lr=args.lr, betas=(0.9, 0.95), fused=args.device == "cuda",
    )
    step_model = torch.compile(model) if args.compile else model
    args.out.mkdir(parents=True, exist_ok=True)
    log = (args.out / "train_teacher.jsonl").open("w")
    level, step, level_step, tokens = (0 if args.init is None else LAST_LEVEL), 0, 0, 0
    deadline = time.time() + 60 * args.minutes
    last_began = time.time()
    batches: Any = None
    while time.time() < deadline:
        if batches is None:
            rows = args.last_rows if level == LAST_LEVEL else args.rows
            loader = DataLoader(Rows(m, level, rows, args.seed), batch_size=None, num_workers=args.workers,
                                prefetch_factor=8 if args.workers else None, pin_memory=args.device == "cuda")
            batches, level_step, last_began = iter(loader), 0, time.time()
        lr = args.lr * min(1.0, (step + 1) / 100)
        if level == LAST_LEVEL:
            done = min(1.0, (time.time() - last_began) / max(1.0, deadline - last_began))
            lr *= 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done))
        for group in optimizer.param_groups:
            group["lr"] = lr
        ids, weights, is_book = (x.to(args.device, non_blocking=True) for x in next(batches))
        with torch.autocast(args.device, dtype=torch.bfloat16, enabled=args.device == "cuda"):
            loss, parts = loss_of(step_model, ids, weights, is_book)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step, level_step, tokens = step + 1, level_step + 1, tokens + ids.numel()
        every = 50 if level < LAST_LEVEL else 200
        if level_step % every == 0:
            rng = random.Random(0)
            if level < LAST_LEVEL:
                check = [level_row(held_out, level, rng) for _ in range(128)]
                token, exact = accuracy(model, check, SHORT, args.device)
            else:
                check = [document_row(held_out, rng, ("niah_single_2", "niah_multikey_1"), LENGTH) for _ in range(64)]
                token, exact = accuracy(model, check, LENGTH, args.device)
            line = {"level": level, "step": step, "level_step": level_step, "tokens": tokens, "lr": lr,
                    "seconds": round(time.time() - start, 1), "answer_token": round(token, 4), "exact": round(exact, 4),
                    **{k: round(float(v), 4) for k, v in parts.items()}}
            print(json.dumps(line), flush=True)
            log.write(json.dumps(line) + "\n")
            log.flush()
            if level < LAST_LEVEL and token > PASS:
                level, batches = level + 1, None
            elif level == LAST_LEVEL and level_step % 1000 == 0:
                model.save_pretrained(args.out / "teacher")
    model.save_pretrained(args.out / "teacher")
    table = report(model, held_out, args.device, 100, (512, 1024, 2048, 4096))
    (args.out / "train_teacher.json").write_text(json.dumps({
        "tokens": tokens, "steps": step, "seconds": time.time() - start, "exact_match": table, "torch": torch.__version__,
        "args": {k: str(v) for k, v in vars(args).items()},
    }, indent=1))
    for task in TASKS:
        print(task, *(f"{length}: {table[f'{task}@{length}']}" for length in (512, 1024, 2048, 4096)))


if __name__ == "__main__":
    main()
