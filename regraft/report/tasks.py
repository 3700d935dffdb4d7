"""Needle documents as lm-eval tasks, one per (task, length), and the scorer."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from datasets import Dataset

from regraft.assets.haystack import Haystack
from regraft.assets.needles import GENERATOR_VERSION, TASKS, NeedleDocument, make_document
from regraft.errors import UserError

Cell = tuple[str, int]  # (task, length)
Tick = Callable[[str, int, int], None]  # what is being done, how many are done, of how many


def found(value: str, completion: str) -> bool:
    """Whether `value` stands in `completion` as a run of its own, upper or lower case alike.

    6161 is not found in 16161, in 6161a or, for values that hold a dash themselves, in ab-6161.
    """
    return _run_of_its_own(value).search(completion) is not None


def complete(value: str, completion: str) -> bool:
    """Whether `value` is found and the text has gone on after it, so that no later token can spoil it."""
    return any(match.end() < len(completion) for match in _run_of_its_own(value).finditer(completion))


def _run_of_its_own(value: str) -> re.Pattern[str]:
    before, after = (r"(?<![0-9a-z]-)", r"(?!-[0-9a-z])") if "-" in value else ("", "")
    return re.compile(rf"(?<![0-9a-z]){before}{re.escape(value)}(?![0-9a-z]){after}", re.IGNORECASE)


def make_documents(
    tasks: list[str],
    lengths: list[int],
    samples: int,
    *,
    seed: int,
    tokenizer: Any,
    haystack: Haystack | None = None,
    progress: Tick | None = None,
) -> dict[Cell, list[NeedleDocument]]:
    """Documents 0 to `samples` - 1 of every (task, length), to be read by every model.

    Raises:
        UserError: an unknown task, a length too short for its needles, no samples, something listed twice.
    """
    for name, values in (("tasks", tasks), ("lengths", lengths)):
        if not values or len(set(values)) != len(values):
            raise UserError(name, f"{values} is empty or lists something twice", "list each once")
    if samples < 1:
        raise UserError(
            "samples", f"{samples} documents per cell", "give at least 1, better a multiple of 10"
        )
    if unknown := [task for task in tasks if task not in TASKS]:
        raise UserError("tasks", f"unknown needle tasks {unknown}", f"use some of {', '.join(TASKS)}")
    made: dict[Cell, list[NeedleDocument]] = {}
    for done, cell in enumerate((task, length) for task in tasks for length in lengths):
        if progress:
            progress("documents", done, len(tasks) * len(lengths))
        made[cell] = [
            make_document(*cell, index, seed=seed, tokenizer=tokenizer, haystack=haystack)
            for index in range(samples)
        ]
    if progress:
        progress("documents", len(made), len(made))
    return made


def task_name(cell: Cell) -> str:
    """Name of the lm-eval task that holds a (task, length)."""
    return f"{cell[0]}_{cell[1]}"


def task_config(documents: list[NeedleDocument]) -> dict[str, Any]:
    """One lm-eval task over documents of one (task, length), as a config for `simple_evaluate(tasks=[...])`.

    `until` is empty: generation ends with the end-of-text token or the budget `Task.new_tokens`, so that no
    answer is cut however it is worded ("1. 1234567", a list by lines). `NeedleLM` adds the one stop that can
    cut nothing right: every value is complete.
    """
    first = documents[0]
    rows = [document.to_dict() for document in documents]
    return {
        "task": task_name((first.task, first.length)),
        "custom_dataset": lambda **_: {"test": Dataset.from_list(rows)},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": lambda doc: doc["prompt"],
        "doc_to_target": lambda doc: doc["answers"],
        "gen_prefix": "answer_prefix",
        "target_delimiter": " ",
        "process_results": process_results,
        "metric_list": [{"metric": "score", "aggregation": "mean", "higher_is_better": True}],
        "generation_kwargs": {
            "do_sample": False,
            "temperature": 0.0,
            "max_gen_toks": TASKS[first.task].new_tokens,
            "until": [],
        },
        "metadata": {"version": GENERATOR_VERSION},
    }


def process_results(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Share of the asked values that the completion holds."""
    return {"score": sum(found(value, results[0]) for value in doc["answers"]) / len(doc["answers"])}
