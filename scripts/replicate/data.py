"""Token files of distillation, held-out books and needle documents, made before they are needed."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from regraft.assets import teacher_dir
from regraft.assets.haystack import Haystack
from regraft.assets.needles import TASKS, answer_text, make_document
from regraft.errors import UserError
from regraft.files import user_cache
from regraft.report.shelf import Shelf
from regraft.report.tasks import make_documents
from scripts.replicate.plan import Work
from scripts.teacher.corpus import Corpus, corpus, read_texts
from scripts.teacher.train import arguments as teacher_arguments

T = TypeVar("T")
CHARS_A_TOKEN = 6  # no prose has more on average
HAYSTACK_CHARS = 3_000_000  # of the training books, enough for documents that are seen once
_tokenizer: PreTrainedTokenizerFast
_haystack: Haystack


def prepare_tokens(work: Work, corpus: Corpus, seed: int, workers: int) -> None:
    """Write `books-T.bin` and `needles-T.bin` for every row length T: documents of one row each.

    A book's piece is T - 1 tokens long and ends with the end-of-text token, as the teacher read them; a
    needle document has its answer and the same end.
    """
    share = work.plan.needles
    for length in work.row_lengths():
        wanted = {"books": 1 - share, "needles": share}
        rows = {kind: round(work.plan.data_tokens * part / length) for kind, part in wanted.items()}
        books = work.tokens("books", length)
        if rows["books"] and not books.is_file():
            _write(books, list(_pieces(corpus.books, length, rows["books"], seed)))
        needles = work.tokens("needles", length)
        if rows["needles"] and not needles.is_file():
            make, prose = partial(_needle_row, length, seed), corpus.haystack[:HAYSTACK_CHARS]
            _write(needles, _mapped(make, range(rows["needles"]), workers, prose))


def prepare_heldout(work: Work, texts: Sequence[Path]) -> None:
    """Write the beginning of each held-out book, long enough for one stretch of the longest length."""
    if work.heldout.is_file():
        return
    length = max(work.plan.evaluation.lengths)
    tokenizer = AutoTokenizer.from_pretrained(teacher_dir())
    lines: list[str] = []
    for text in read_texts(texts, 10**10):
        text = text[len(text) // 4 :]  # past title and contents
        offsets = tokenizer(text[: CHARS_A_TOKEN * length], return_offsets_mapping=True)["offset_mapping"]
        if len(offsets) > length and len(lines) < work.plan.evaluation.books:
            lines.append(json.dumps({"text": text[: offsets[length][1]]}) + "\n")
    _write_bytes(work.heldout, "".join(lines).encode())


def prepare_documents(work: Work, workers: int) -> None:
    """Make the needle documents of the evaluation, which `niah.evaluate` then finds in the cache."""
    cells = [(task, length) for task in TASKS for length in work.plan.evaluation.lengths]
    cells.sort(key=lambda cell: -cell[1])
    _mapped(partial(_cell, work.plan.evaluation.samples), cells, workers)


def _mapped(
    work: Callable[[Any], T], items: Sequence[Any], workers: int, haystack: str | None = None
) -> list[T]:
    """Results in order; by several processes, each with tokenizer and haystack of its own."""
    if workers < 2:
        _load(haystack)
        return [work(item) for item in items]
    with multiprocessing.get_context("spawn").Pool(workers, _load, (haystack,)) as pool:
        return list(pool.imap(work, items))


def _load(haystack: str | None) -> None:
    global _tokenizer, _haystack
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _tokenizer = AutoTokenizer.from_pretrained(teacher_dir())
    if haystack is not None:
        _haystack = Haystack.from_text(haystack)


def _cell(samples: int, cell: tuple[str, int]) -> None:
    shelf = Shelf(user_cache() / "needles")
    make_documents([cell[0]], [cell[1]], samples, seed=0, tokenizer=_tokenizer, shelf=shelf)


def _needle_row(length: int, seed: int, index: int) -> np.ndarray:
    """Training document number `index`: the next that fits, where one does not."""
    tasks = list(TASKS)
    while True:
        try:
            document = make_document(
                tasks[index % len(tasks)], length - 1, index, seed=seed + 1, tokenizer=_tokenizer,
                haystack=_haystack, split="train",
            )  # fmt: skip
        except UserError:
            index += 10**6
            continue
        ids = _tokenizer(document.model_input + answer_text(document))["input_ids"]
        return np.array([*ids[: length - 1], _tokenizer.eos_token_id], "<u2")


def _pieces(books: np.ndarray, length: int, rows: int, seed: int) -> Iterator[np.ndarray]:
    """Windows of books, drawn without end-of-text tokens inside."""
    eos = AutoTokenizer.from_pretrained(teacher_dir()).eos_token_id
    rng = np.random.default_rng(seed)
    while rows:
        start = int(rng.integers(len(books) - length))
        piece = books[start : start + length - 1]
        if not (piece == eos).any():
            rows -= 1
            yield np.append(piece, np.array(eos, "<u2"))


def _write(path: Path, documents: Sequence[np.ndarray]) -> None:
    _write_bytes(path, np.concatenate(documents).astype("<u2").tobytes())


def _write_bytes(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(data)
    os.replace(temporary, path)


def main() -> None:
    ap = argparse.ArgumentParser(prog="python -m scripts.replicate.data", description=__doc__)
    ap.add_argument("what", choices=["corpus", "data"])
    ap.add_argument("--plan", required=True)
    ap.add_argument("--work", type=Path, required=True)
    ap.add_argument("--text", action="append", type=Path, default=[])
    ap.add_argument("--valid", action="append", type=Path, default=[])
    ap.add_argument("--test", action="append", type=Path, default=[])
    ap.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    args = ap.parse_args()
    work = Work(args.plan, args.work)
    train = teacher_arguments([*work.plan.teacher.train, "--out", str(work.folder / "teacher")])
    found = corpus(
        work.folder / "corpus", args.text, args.valid[0] if args.valid else None, teacher_dir(),
        workers=args.workers, max_chars=train.max_chars,
    )  # fmt: skip
    if args.what == "corpus":
        return
    prepare_heldout(work, [*args.valid, *args.test])
    prepare_tokens(work, found, seed=0, workers=args.workers)
    prepare_documents(work, args.workers)
    (work.folder / "data" / "ready").touch()


if __name__ == "__main__":
    main()
