"""Needles in a haystack: the same documents through every model, one compact record per (model, document)."""

from __future__ import annotations

import functools
import hashlib
import logging
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerFast

from regraft.assets.haystack import Haystack
from regraft.assets.needles import ALL_TASKS, TASKS, NeedleDocument
from regraft.errors import UserError
from regraft.report.shelf import Shelf
from regraft.report.tasks import (
    Cell,
    Tick,
    describe,
    document_key,
    found,
    make_documents,
    task_config,
    task_name,
)

Record = dict[str, Any]


class Entrant(NamedTuple):
    """A model to evaluate.

    `model` is a transformers causal LM whose `forward` takes an attention mask with left padding, a ready
    `lm_eval.api.model.LM`, or a function without arguments that loads either when it is needed.

    `identity` is a hash of what decides its answers; without one nothing of it is stored.
    """

    model: Any
    tokenizer: PreTrainedTokenizerFast
    identity: str = ""

    def load(self) -> Any:
        """The model itself."""
        from lm_eval.api.model import LM
        from torch import nn

        return self.model if isinstance(self.model, LM | nn.Module) else self.model()


def evaluate(
    models: Mapping[str, Entrant | tuple[Any, PreTrainedTokenizerFast]],
    *,
    tasks: Sequence[str] = tuple(TASKS),
    lengths: Sequence[int],
    samples: int,
    seed: int = 0,
    batch_size: int = 64,
    progress: Tick | None = None,
    say: Callable[[str], None] | None = None,
    haystack: Haystack | None = None,
    documents: Shelf | None = None,
    finished: Shelf | None = None,
) -> list[Record]:
    """Greedy needle retrieval of every model on the same documents.

    Args:
        models: `Entrant`, or (model, tokenizer), by name. One tokenizer for all.
        tasks: names in `regraft.assets.needles.ALL_TASKS`.
        lengths: tokens of prompt and generated answer together.
        samples: documents per (task, length), the first of a fixed sequence.
        seed: of the document set.
        batch_size: documents generated at once; completions do not depend on it.
        progress: called as (what, done, total) in tokens read, see `progress_bar`.
        say: called with one line per model: documents, seconds, documents per second.
        haystack: text of the essay tasks, Jane Austen by default.
        documents: where document sets are kept.
        finished: where finished cells are kept; what is there is not run again.

    Returns:
        Records by model, task, length, index: model, task, length, index, seed, needles (key, value, asked,
        depths, start_token, decile, and for asked ones `hit`), score, completion, prompt_sha256, n_tokens,
        new_tokens (the generation budget), and what makes runs comparable: tokenizer, bos, generator.

    Raises:
        UserError: models of different tokenizers, unknown tasks, lengths too short or beyond a model.
    """
    if not models:
        raise UserError("models", "none given", "name at least one")
    entrants = {name: Entrant(*model) for name, model in models.items()}
    tokenizer = next(iter(entrants.values())).tokenizer
    header = describe(tokenizer)
    for name, entrant in entrants.items():
        if entrant.tokenizer is not tokenizer and describe(entrant.tokenizer) != header:
            raise UserError(f"models.{name}", "its tokenizer is another", "compare models of one tokenizer")
    made = make_documents(
        list(tasks),
        list(lengths),
        samples,
        seed=seed,
        tokenizer=tokenizer,
        haystack=haystack,
        progress=progress,
        shelf=documents,
    )
    records = []
    for name, entrant in entrants.items():
        keys = {
            cell: {"model": entrant.identity, **document_key(cell, seed, header, haystack)} for cell in made
        }
        run = _Run(name, entrant, header, batch_size, progress, say)
        for cell_records in run.cells(made, keys, finished if entrant.identity else None).values():
            records += [{"model": name, **record} for record in cell_records]
    return records


class _Run:
    """One model through all cells."""

    def __init__(
        self,
        name: str,
        entrant: Entrant,
        header: Record,
        batch_size: int,
        progress: Tick | None,
        say: Callable[[str], None] | None,
    ) -> None:
        self.name, self.entrant, self.header, self.batch_size = name, entrant, header, batch_size
        self.progress, self.say = progress, say
        self.total = self.done = 0  # tokens
        self._lm: Any = None

    def cells(
        self, made: dict[Cell, list[NeedleDocument]], keys: dict[Cell, Record], shelf: Shelf | None
    ) -> dict[Cell, list[Record]]:
        """Records of every cell; what the shelf has is taken from it, what it lacks is put there."""
        kept = {cell: shelf.get(keys[cell])[: len(made[cell])] if shelf else [] for cell in made}
        todo = {cell: documents[len(kept[cell]) :] for cell, documents in made.items()}
        self.total = sum(document.n_tokens for documents in todo.values() for document in documents)
        count = sum(map(len, todo.values()))
        begin = time.perf_counter()
        for portion in _portions(todo, self.batch_size):
            for cell, records in self._answered({cell: todo[cell] for cell in portion}).items():
                kept[cell] += records
                if shelf:
                    shelf.put(keys[cell], kept[cell])
        if self.say:
            seconds = time.perf_counter() - begin
            self.say(_speed(self.name, count, self.total, seconds, sum(map(len, kept.values())) - count))
        return kept

    def _answered(self, made: dict[Cell, list[NeedleDocument]]) -> dict[Cell, list[Record]]:
        cells = list(made)
        what = f"{self.name}: {cells[0][0]} at {cells[0][1]:,}" + (" and on" if len(cells) > 1 else "")
        end = self.done + sum(document.n_tokens for documents in made.values() for document in documents)

        def tick(tokens: int) -> None:
            self.done = min(end, self.done + tokens)
            if self.progress:
                self.progress(what, self.done, self.total)

        tick(0)
        with _guest():
            completions = _complete(self._model(made, tick), made)
        tick(end - self.done)
        return {
            cell: [
                _record(document, text) | self.header
                for document, text in zip(documents, completions[cell], strict=True)
            ]
            for cell, documents in made.items()
        }

    def _model(self, made: dict[Cell, list[NeedleDocument]], tick: Callable[[int], None]) -> Any:
        """The model as lm-eval takes it, loaded once."""
        from lm_eval.api.model import LM

        from regraft.report.lm import NeedleLM  # imported here: lm-eval takes seconds to import

        if self._lm is None:
            model = self.entrant.load()
            own = isinstance(model, LM)
            self._lm = model if own else NeedleLM(
                model, self.entrant.tokenizer, answers={}, batch_size=self.batch_size
            )  # fmt: skip
        if isinstance(self._lm, NeedleLM):
            flat = (document for documents in made.values() for document in documents)
            self._lm.answers = {document.model_input: list(document.answers) for document in flat}
            self._lm.progress = tick
        return self._lm


def _speed(name: str, documents: int, tokens: int, seconds: float, stored: int) -> str:
    parts = [f"{stored} documents were finished before"] if stored else []
    if documents:
        rates = f"{documents / seconds:.2f} documents/s, {tokens / seconds:,.0f} tokens/s"
        parts.insert(0, f"{documents} documents in {seconds:.1f} s, {rates}")
    return f"{name}: {'; '.join(parts)}"


def prompt_hash(document: NeedleDocument) -> str:
    """`prompt_sha256` of a document's records."""
    return hashlib.sha256(document.model_input.encode()).hexdigest()


def _record(document: NeedleDocument, completion: str) -> Record:
    needles = [
        needle | {"decile": original.decile}
        for needle, original in zip(document.to_dict()["needles"], document.needles, strict=True)
    ]
    for needle in needles:
        if needle["asked"]:
            needle["hit"] = found(needle["value"], completion)
    hits = [needle["hit"] for needle in needles if needle["asked"]]
    return {
        "task": document.task,
        "length": document.length,
        "index": document.index,
        "seed": document.seed,
        "score": sum(hits) / len(hits),
        "needles": needles,
        "completion": completion,
        "prompt_sha256": prompt_hash(document),
        "n_tokens": document.n_tokens,
        "new_tokens": ALL_TASKS[document.task].new_tokens,
    }


def _portions(todo: dict[Cell, list[NeedleDocument]], batch_size: int) -> list[list[Cell]]:
    """Cells with something to do, small ones together: a batch is filled, yet little is lost when stopped."""
    portions: list[list[Cell]] = []
    room = 0
    for cell, documents in todo.items():
        if not documents:
            continue
        if len(documents) > room:
            portions.append([])
            room = batch_size
        portions[-1].append(cell)
        room -= len(documents)
    return portions


def _complete(lm: Any, made: dict[Cell, list[NeedleDocument]]) -> dict[Cell, list[str]]:
    """Completions of some cells, in the order of the documents, through lm-eval's own loop."""
    from lm_eval.evaluator import evaluate as run  # simple_evaluate lists all pip packages at every call
    from lm_eval.tasks import TaskManager

    tasks = TaskManager(include_defaults=False).load([task_config(documents) for documents in made.values()])
    results = run(lm, tasks, log_samples=True, bootstrap_iters=0)  # intervals are ours, by document
    completions = {}
    for cell, documents in made.items():
        samples = sorted(results["samples"][task_name(cell)], key=lambda sample: sample["doc_id"])
        sent = [sample["arguments"][0][0] for sample in samples]
        if sent != [document.model_input for document in documents]:
            raise RuntimeError(f"lm-eval sent other prompts than the documents of {cell}")
        completions[cell] = [sample["resps"][0][0] for sample in samples]
    return completions


@contextmanager
def _guest() -> Iterator[None]:
    """Leave the process as it was: lm-eval's log and bar are silenced, Python's random state is put back."""
    import lm_eval.api.task as task_module

    logger, bar, state = logging.getLogger("lm_eval"), task_module.tqdm, random.getstate()
    level = logger.level
    logger.setLevel(logging.ERROR)
    task_module.tqdm = functools.partial(bar, disable=True)
    try:
        yield
    finally:
        logger.setLevel(level)
        task_module.tqdm = bar
        random.setstate(state)


@contextmanager
def progress_bar() -> Iterator[Tick]:
    """A rich bar on standard error with the time left, as the callback `evaluate` takes."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True)) as bar:
        lines: dict[str, Any] = {}

        def tick(what: str, done: int, total: int) -> None:
            owner = what.partition(":")[0]  # one line a model, which says what it is at
            if owner not in lines:
                lines[owner] = bar.add_task(what, total=total)
            bar.update(lines[owner], completed=done, total=total, description=what)

        yield tick
