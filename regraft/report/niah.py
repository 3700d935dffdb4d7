"""Needles in a haystack: the same documents through every model, one compact record per (model, document)."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedTokenizerFast

from regraft.assets.haystack import Haystack
from regraft.assets.needles import GENERATOR_VERSION, TASKS, NeedleDocument
from regraft.errors import UserError
from regraft.report.tasks import Cell, Tick, found, make_documents, task_config, task_name

Record = dict[str, Any]


def evaluate(
    models: Mapping[str, tuple[Any, PreTrainedTokenizerFast]],
    *,
    tasks: Sequence[str] = tuple(TASKS),
    lengths: Sequence[int],
    samples: int,
    seed: int = 0,
    batch_size: int = 8,
    progress: Tick | None = None,
    haystack: Haystack | None = None,
) -> list[Record]:
    """Greedy needle retrieval of every model on the same documents.

    Args:
        models: (model, tokenizer) by name; a model is a transformers causal LM whose `forward` takes an
            attention mask with left padding, or a ready `lm_eval.api.model.LM`. One tokenizer for all.
        tasks: names in `regraft.assets.needles.TASKS`.
        lengths: tokens of prompt and generated answer together.
        samples: documents per (task, length), the first of a fixed sequence.
        seed: of the document set.
        batch_size: documents generated at once; completions do not depend on it.
        progress: called as (what, done, total), see `progress_bar`.
        haystack: text of the essay tasks, Jane Austen by default.

    Returns:
        Records by model, task, length, index: model, task, length, index, seed, needles (key, value, asked,
        depths, start_token, decile, and for asked ones `hit`), score, completion, prompt_sha256, n_tokens,
        new_tokens (the generation budget), and what makes runs comparable: tokenizer, bos, generator.

    Raises:
        UserError: models of different tokenizers, unknown tasks, lengths too short.
    """
    if not models:
        raise UserError("models", "none given", "name at least one")
    tokenizer = next(iter(models.values()))[1]
    header = describe(tokenizer)
    for name, (_, other) in models.items():
        if other is not tokenizer and describe(other) != header:
            raise UserError(f"models.{name}", "its tokenizer is another", "compare models of one tokenizer")
    documents = make_documents(
        list(tasks),
        list(lengths),
        samples,
        seed=seed,
        tokenizer=tokenizer,
        haystack=haystack,
        progress=progress,
    )
    records = []
    for name, (model, own_tokenizer) in models.items():
        tick = functools.partial(_named, progress, name) if progress else None
        completions = _complete(model, own_tokenizer, documents, batch_size, tick)
        for cell, cell_documents in documents.items():
            for document, text in zip(cell_documents, completions[cell], strict=True):
                records.append({"model": name, **_record(document, text), **header})
    return records


def _named(progress: Tick, model: str, what: str, done: int, total: int) -> None:
    progress(f"{model}: {what}", done, total)


def describe(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """What makes two runs comparable: tokenizer hash, the BOS policy, the generator's version.

    `bos` is what the tokenizer puts before a text by itself, an empty string for nothing; nothing is added or
    removed beyond that.

    Raises:
        UserError: the tokenizer appends a token to a text, which no answer can follow.
    """
    ids, plain = tokenizer("a")["input_ids"], tokenizer("a", add_special_tokens=False)["input_ids"]
    before = len(ids) - len(plain)
    if ids[before:] != plain:
        added = tokenizer.decode(ids[-1:])
        raise UserError("tokenizer", f"it appends {added!r} to prompts", "switch its EOS off")
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state.update(padding=None, truncation=None)  # set and unset by calls, no part of what a text becomes
    return {
        "tokenizer": hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()[:16],
        "bos": tokenizer.decode(ids[:before]),
        "generator": GENERATOR_VERSION,
    }


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
        "prompt_sha256": hashlib.sha256(document.model_input.encode()).hexdigest(),
        "n_tokens": document.n_tokens,
        "new_tokens": TASKS[document.task].new_tokens,
    }


def _complete(
    model: Any,
    tokenizer: PreTrainedTokenizerFast,
    documents: dict[Cell, list[NeedleDocument]],
    batch_size: int,
    progress: Tick | None,
) -> dict[Cell, list[str]]:
    """Completions of one model per cell, in the order of the documents, through lm-eval's own loop."""
    # imported here: lm-eval takes seconds to import, which no other verb should pay
    from lm_eval.api.model import LM
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    from regraft.report.lm import NeedleLM

    flat = [document for cell in documents.values() for document in cell]
    with _guest():
        lm = model if isinstance(model, LM) else NeedleLM(
            model,
            tokenizer,
            max_length=max(document.length for document in flat),
            answers={document.model_input: list(document.answers) for document in flat},
            batch_size=batch_size,
            progress=progress,
        )  # fmt: skip
        results = simple_evaluate(
            lm,
            tasks=[task_config(cell) for cell in documents.values()],
            task_manager=TaskManager(include_defaults=False),
            log_samples=True,
            bootstrap_iters=0,  # intervals are ours, by document
            random_seed=None,  # generation is greedy: nothing to seed
            numpy_random_seed=None,
            torch_random_seed=None,
        )
    logged = {
        cell: sorted(results["samples"][task_name(cell)], key=lambda sample: sample["doc_id"])
        for cell in documents
    }
    for cell, samples in logged.items():
        sent = [sample["arguments"][0][0] for sample in samples]
        if sent != [document.model_input for document in documents[cell]]:
            raise RuntimeError(f"lm-eval sent other prompts than the documents of {cell}")
    return {cell: [sample["resps"][0][0] for sample in samples] for cell, samples in logged.items()}


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
    """A rich bar on standard error, one line per thing being done, as the callback `evaluate` takes."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True)) as bar:
        lines: dict[str, Any] = {}

        def tick(what: str, done: int, total: int) -> None:
            if what not in lines:
                lines[what] = bar.add_task(what, total=total)
            bar.update(lines[what], completed=done, total=total)

        yield tick
