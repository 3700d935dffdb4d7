"""Trains a Gated DeltaNet that retrieves inside its training length and writes it as a folder that loads.

    python -m scripts.teacher --text books_*.jsonl.xz --valid valid.jsonl.xz --out OUT --graph --compile
    python -m scripts.teacher --preset replication --text ... --valid ... --out OUT --graph --compile

Public-domain books mixed with needle documents whose key words never occur in evaluation. A plain mixture
leaves retrieval on a plateau, so it grows in levels (see docs/teacher.md): each level holds one difficulty
more, former levels stay in the mixture, and the next one starts when answers on held-out words are 90 %
right per token. What follows is the real thing at full length (all six RULER forms, several questions a
document, books with full loss); it takes the rest of the time, its learning rate falling to 5 %.
The same command goes on where a run was stopped.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

import torch
import transformers
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoTokenizer

from regraft.assets import austen, teacher_dir
from regraft.assets.haystack import Haystack
from regraft.assets.needles import TASKS
from regraft.distill import checkpoint
from regraft.files import sha256_file, write_json
from regraft.layers import RegraftForCausalLM
from scripts.teacher.corpus import corpus
from scripts.teacher.levels import SHORT, Level, embedded_levels, replication_levels
from scripts.teacher.measure import accuracy, perplexity, retrieval
from scripts.teacher.model import export, new_model
from scripts.teacher.rows import Checks, Material, Row, Rows, level_row
from scripts.teacher.step import Step, choose_kernels

ATTEMPTS = 3  # with another seed and a lower rate, where a short level stays on its plateau
PASS = 0.9  # per-token answer accuracy on evaluation words that opens the next level
PRESETS: dict[str, dict[str, Any]] = {
    "embedded": {"layers": 6, "hidden": 192, "heads": 3, "head_dim": 64, "length": 512, "lr": 2e-3},
    "replication": {
        "layers": 12, "hidden": 384, "heads": 3, "head_dim": 128, "length": 1024, "lr": 1.5e-3,
        "last_rows": 64, "minutes": 9.0, "patience": 1000,
    },
}  # fmt: skip
COURSES = {"embedded": embedded_levels, "replication": replication_levels}


class Plateau(Exception):
    """A short level that its patience did not bring to an end."""


@dataclass
class Progress:
    """Where a training is; saved with every checkpoint."""

    step: int = 0
    tokens: int = 0
    book_tokens: int = 0
    seconds: float = 0.0
    level: int = 0
    level_step: int = 0
    whole_began: float | None = None  # seconds at which rows got their full length
    passed: dict[str, int] = field(default_factory=dict)  # level -> steps it took


class Trainer:
    """A model, its levels and its state; `run` trains until the time is over."""

    def __init__(
        self, model: RegraftForCausalLM, m: Material, held_out: Material, args: argparse.Namespace
    ) -> None:
        self.model, self.m, self.held_out, self.args = model, m, held_out, args
        self.levels = COURSES[args.preset](args.length, args.rows, args.last_rows)
        self.at = Progress(level=min(args.first_level, len(self.levels) - 1))
        self.take_step = Step(model, args)
        self.folder = args.out / "checkpoints"
        self.batches: Iterator[tuple[Tensor, Tensor, Tensor]] = iter(())
        self.checks: dict[str, list[Row]] = {}
        self._origin = time.time()

    @property
    def level(self) -> Level:
        return self.levels[self.at.level]

    @property
    def last(self) -> bool:
        return self.at.level == len(self.levels) - 1

    def run(self, log: TextIO) -> None:
        """Train for the minutes that are left."""
        self._resume()
        self._origin = time.time() - self.at.seconds
        self._enter()
        saved = self.now()
        while (now := self.now()) < 60 * self.args.minutes:
            lr = self.learning_rate(now)
            batch = next(self.batches)
            parts = self.take_step(batch, lr)
            self.at.step, self.at.level_step = self.at.step + 1, self.at.level_step + 1
            self.at.tokens += batch[0].numel()
            self.at.book_tokens += int(batch[2].sum()) * self.level.length
            every = self.args.check_every if self.level.whole else 50
            if self.at.level_step % every == 0:
                losses = {name: round(float(value), 4) for name, value in parts.items()}
                line = json.dumps({**self._counts(lr), **losses, **self._check()})
                print(line, flush=True)
                log.write(line + "\n")
                log.flush()
            elif self.level.most is not None and now > self.level.most * 60 * self.args.minutes:
                self._next_level()
            if now - saved > self.args.save_seconds:
                self._save()
                saved = now
        self.at.seconds = self.now()

    def learning_rate(self, now: float) -> float:
        """Warm-up over 100 steps; from the first rows of full length on a cosine over time, down to 5 %."""
        lr: float = self.args.lr * min(1.0, (self.at.step + 1) / 100)
        began = self.at.whole_began
        if began is None:
            return lr
        done = min(1.0, (now - began) / max(1.0, 60 * self.args.minutes - began))
        return lr * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done)))

    def now(self) -> float:
        """Seconds trained, those before a stop included."""
        return time.time() - self._origin

    def _counts(self, lr: float) -> dict[str, Any]:
        at = self.at
        return {"step": at.step, "tokens": at.tokens, "lr": round(lr, 6), "seconds": round(self.now(), 1)}

    def _enter(self) -> None:
        """Start or go on with a level: new workers, its evaluation rows made once."""
        args, level = self.args, self.level
        rows = Rows(self.m, level, f"{args.seed}-{self.at.level}-{self.at.step}")
        prefetch = 8 if args.workers else None
        self.batches = iter(
            DataLoader(rows, batch_size=None, num_workers=args.workers, prefetch_factor=prefetch)
        )
        if not level.whole:
            rng = random.Random(0)
            self.checks = {"": [level_row(self.held_out, self.at.level, rng) for _ in range(128)]}
            return
        if self.at.whole_began is None:
            self.at.whole_began = self.now()
        if not self.checks or "" in self.checks:
            self.checks = {
                task: Checks(self.held_out, task, level.length, args.check_documents).rows() for task in TASKS
            }
            if args.compile:
                self.take_step.compile()

    def _next_level(self) -> None:
        self.at.passed[str(self.at.level)] = self.at.level_step
        self.at.level, self.at.level_step = self.at.level + 1, 0
        self._enter()

    def _check(self) -> dict[str, Any]:
        """Accuracy on evaluation words; enters the next level if it is good enough."""
        found: dict[str, Any] = {}
        tokens = []
        for name, rows in self.checks.items():
            token, exact = accuracy(self.model, rows, self.level.length, self.args.device)
            tokens.append(token)
            suffix = name and f" {name}"
            found |= {f"token{suffix}": round(token, 3), f"exact{suffix}": round(exact, 3)}
        line = {"level": self.at.level, "level_step": self.at.level_step, **found}
        if not self.last and sum(tokens) / len(tokens) > PASS:
            self._next_level()
        elif not self.level.whole and self.at.level_step >= self.args.patience:
            raise Plateau(f"level {self.at.level} stays on its plateau: {json.dumps(line)}")
        return line

    def _save(self) -> None:
        self.at.seconds = self.now()
        checkpoint.save(
            self.folder,
            self.at.step,
            parameters={n: p.detach() for n, p in self.model.named_parameters()},
            moments=checkpoint.moments(self.take_step.optimizer),
            state={"at": asdict(self.at)},
            keep=1,
        )

    def _resume(self) -> None:
        found = checkpoint.existing(self.folder)
        if not found:
            return
        self.at = Progress(**checkpoint.read_state(found[-1])["at"])
        checkpoint.restore_parameters(found[-1], self.model)
        optimizer = self.take_step.optimizer
        checkpoint.restore_optimizer(found[-1], optimizer)
        for state in optimizer.state.values():
            state["step"] = state["step"].to(self.args.device)  # a recorded step counts on the card
        print(f"goes on after step {self.at.step}, {self.at.seconds:.0f} s", flush=True)


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    ap = argparse.ArgumentParser(
        prog="python -m scripts.teacher", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    ap.add_argument("--preset", choices=list(PRESETS), default="embedded", help="shape and levels")
    ap.add_argument("--text", nargs="*", type=Path, default=[], help="books, .jsonl.xz: text, author")
    ap.add_argument("--valid", type=Path, help="held-out books, for the perplexity")
    ap.add_argument("--out", type=Path, required=True)
    ap.add_argument("--corpus", type=Path, help="folder of the token ids, made if missing (OUT/corpus)")
    ap.add_argument("--minutes", type=float, default=8.0, help="time of training; 0 only evaluates --init")
    ap.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    ap.add_argument("--kernels", choices=["torch", "triton"], default="torch", help="form of the filter")
    ap.add_argument("--rows", type=int, default=96, help="rows a step of the short levels")
    ap.add_argument("--last-rows", type=int, default=96, help="rows a step at full length")
    for name in ("layers", "hidden", "heads", "head-dim", "length"):
        ap.add_argument(f"--{name}", type=int, help="as the preset unless given")
    ap.add_argument("--lr", type=float)
    ap.add_argument("--max-chars", type=int, default=10**9)
    ap.add_argument("--workers", type=int, default=min(12, os.cpu_count() or 1))
    ap.add_argument("--seed", type=int, default=0)
    ap.add_argument("--patience", type=int, default=3000, help="steps after which a short level gives up")
    ap.add_argument("--documents", type=int, default=100, help="documents a cell of the final table")
    ap.add_argument("--check-documents", type=int, default=50, help="documents a task while training")
    ap.add_argument("--check-every", type=int, default=400, help="steps between looks at full length")
    ap.add_argument("--save-seconds", type=float, default=120.0, help="between checkpoints")
    ap.add_argument("--init", type=Path, help="begin with this model at full length")
    ap.add_argument("--first-level", type=int, default=0)
    ap.add_argument("--embedding-std", type=float, default=0.05)
    ap.add_argument("--embedding-mean", type=float, default=0.05, help="size of what all embeddings share")
    ap.add_argument("--graph", action="store_true", help="record steps as CUDA graphs: much faster")
    ap.add_argument("--compile", action="store_true", help="compile the blocks")
    preset = ap.parse_known_args(given)[0].preset
    ap.set_defaults(**PRESETS[preset])
    args = ap.parse_args(given)
    if args.init:
        args.first_level = max(args.first_level, len(SHORT))
    args.corpus = args.corpus or args.out / "corpus"
    return args


def start_model(args: argparse.Namespace, vocab_size: int) -> RegraftForCausalLM:
    """Random weights, or those of `--init`, on the device."""
    torch.manual_seed(args.seed)
    model = RegraftForCausalLM.from_pretrained(args.init) if args.init else new_model(args, vocab_size)
    model = model.float().to(args.device)
    choose_kernels(model, args.kernels)
    return model


def trained_model(
    m: Material, held_out: Material, args: argparse.Namespace
) -> tuple[RegraftForCausalLM, dict[str, Any]]:
    """A model after all its levels, and what its training came to.

    Whether recall forms is a matter of luck too: where a short level stays on its plateau all begins anew,
    within the same minutes.
    """
    stuck = 0.0
    for attempt in range(ATTEMPTS):
        model = start_model(args, len(m.tokenizer))
        print(f"{model.num_parameters():,} parameters, seed {args.seed}, lr {args.lr:.2g}", flush=True)
        if args.minutes <= 0:
            return model, {}
        trainer = Trainer(model, m, held_out, args)
        try:
            with (args.out / "train.jsonl").open("a") as log:
                trainer.run(log)
            return model, {
                **asdict(trainer.at),
                "seed": args.seed,
                "lr": args.lr,
                "seconds_lost": round(stuck, 1),
            }
        except Plateau as plateau:
            if attempt == ATTEMPTS - 1:
                raise SystemExit(str(plateau)) from plateau
            print(plateau, flush=True)
            seconds = trainer.now()
            stuck += seconds
            args.seed, args.lr, args.minutes = args.seed + 1, args.lr * 0.7, args.minutes - seconds / 60
            shutil.rmtree(trainer.folder, ignore_errors=True)
    raise AssertionError("unreachable")


def main(given: list[str] | None = None) -> None:
    args = arguments(given)
    torch.backends.cuda.matmul.allow_tf32 = False
    start = time.time()
    tokenizer = AutoTokenizer.from_pretrained(teacher_dir())
    books = corpus(
        args.corpus, args.text, args.valid, teacher_dir(), workers=args.workers, max_chars=args.max_chars
    )
    m = Material.make(tokenizer, Haystack.from_text(books.haystack), books.books, "train")
    held_out = Material.make(tokenizer, Haystack.from_text(austen()), books.books, "eval")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    print(f"{len(books.books):,} book tokens, {time.time() - start:.0f} s", flush=True)

    args.out.mkdir(parents=True, exist_ok=True)
    model, trained = trained_model(m, held_out, args)
    result: dict[str, Any] = {"args": {k: str(v) for k, v in vars(args).items()}}
    result |= {"torch": torch.__version__, "transformers": transformers.__version__}
    result |= {"parameters": model.num_parameters()}
    if args.device == "cuda":
        result["card"] = torch.cuda.get_device_name()
    result |= trained
    export(model, args.out / "teacher", teacher_dir())
    result["sha256"] = sha256_file(args.out / "teacher" / "model.safetensors")
    result["perplexity"] = round(perplexity(model, books.valid, args.length, args.device), 2)
    if args.documents:
        result["exact_match"] = retrieval(model, held_out, args)
    result["all_seconds"] = round(time.time() - start, 1)
    write_json(args.out / "teacher.json", result)
    print(f"perplexity {result['perplexity']}, {result['all_seconds']} s in all")
    for task, row in result.get("exact_match", {}).items():
        print(task, *(f"{length}: {value}" for length, value in row.items()))


if __name__ == "__main__":
    main()
