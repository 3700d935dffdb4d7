"""Needle documents as lm-eval tasks, one per (task, length), and the scorer."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from transformers import PreTrainedTokenizerFast

from regraft.assets.haystack import Haystack
from regraft.assets.needles import ALL_TASKS, GENERATOR_VERSION, NeedleDocument, make_document
from regraft.errors import UserError
from regraft.files import user_cache
from regraft.report.shelf import Shelf

Cell = tuple[str, int]  # (task, length)
TASK_DIR = Path(__file__).parent / "lm_eval_tasks"  # for `lm_eval run --include_path`
Tick = Callable[[str, int, int], None]  # what is being done, how many are done, of how many


def found(value: str, completion: str) -> bool:
    """Whether `value` stands in `completion` as a run of its own, upper or lower case alike.

    6161 is not found in 16161, in 6161a or, for values that hold a dash themselves, in ab-6161.
    """
    return _mentioned(value, completion) and _run_of_its_own(value).search(completion) is not None


def complete(value: str, completion: str) -> bool:
    """Whether `value` is found and the text has gone on after it, so that no later token can spoil it."""
    return _mentioned(value, completion) and any(
        match.end() < len(completion) for match in _run_of_its_own(value).finditer(completion)
    )


def _mentioned(value: str, completion: str) -> bool:
    """Whether the value stands there at all: spares a pattern of its own for every row and token."""
    return value.lower() in completion.lower()


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
    shelf: Shelf | None = None,
) -> dict[Cell, list[NeedleDocument]]:
    """Documents 0 to `samples` - 1 of every (task, length), to be read by every model.

    Args:
        tasks, lengths, samples, seed, tokenizer, haystack: as in `niah.evaluate`.
        progress: called after each cell.
        shelf: where finished documents are kept and found again.

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
    if unknown := [task for task in tasks if task not in ALL_TASKS]:
        raise UserError("tasks", f"unknown needle tasks {unknown}", f"use some of {', '.join(ALL_TASKS)}")
    cells = [(task, length) for task in tasks for length in lengths]
    made: dict[Cell, list[NeedleDocument]] = {}
    for cell in cells:
        if progress:
            progress("documents", len(made), len(cells))
        key = document_key(cell, seed, describe(tokenizer), haystack)
        kept = [NeedleDocument.from_dict(item) for item in shelf.get(key)] if shelf else []
        for index in range(len(kept), samples):
            kept.append(make_document(*cell, index, seed=seed, tokenizer=tokenizer, haystack=haystack))
            if index == samples - 1 and shelf:
                shelf.put(key, [document.to_dict() for document in kept])
        made[cell] = kept[:samples]
    if progress:
        progress("documents", len(made), len(cells))
    return made


def document_key(
    cell: Cell, seed: int, header: dict[str, Any], haystack: Haystack | None = None
) -> dict[str, Any]:
    """All that the documents of a (task, length) depend on but their number, which only adds to the end."""
    name = haystack.fingerprint if haystack is not None else "built-in"
    return {"task": cell[0], "length": cell[1], "seed": seed, "haystack": name, **header}


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


def task_name(cell: Cell) -> str:
    """Name of the lm-eval task that holds a (task, length)."""
    return f"{cell[0]}_{cell[1]}"


def task_config(documents: list[NeedleDocument]) -> dict[str, Any]:
    """One lm-eval task over documents of one (task, length), as a config for `simple_evaluate(tasks=[...])`.

    It is the shipped YAML with these documents in the place of those it would make itself. `until` is empty:
    generation ends with the end-of-text token or the budget `Task.new_tokens`, so that no answer is cut
    however it is worded ("1. 1234567", a list by lines). `NeedleLM` adds the one stop that can cut nothing
    right: every value is complete.
    """
    from datasets import Dataset  # seconds, and only lm-eval wants it

    first = documents[0]
    rows = [document.to_dict() for document in documents]
    own = _read_yaml(f"{first.task}.yaml")
    return (
        _read_yaml(own.pop("include"))
        | own
        | {
            "task": task_name((first.task, first.length)),
            "custom_dataset": lambda **_: {"test": Dataset.from_list(rows)},
            "metadata": {"version": GENERATOR_VERSION},
        }
    )


def _read_yaml(name: str) -> dict[str, Any]:
    """A shipped task file, its functions found in this module."""

    class Loader(yaml.SafeLoader):
        pass

    Loader.add_constructor("!function", lambda _, node: globals()[node.value.rpartition(".")[2]])
    return yaml.load((TASK_DIR / name).read_text(encoding="utf-8"), Loader)  # safe: a SafeLoader


def dataset(
    *,
    task: str,
    length: int = 4096,
    samples: int = 100,
    seed: int = 0,
    pretrained: str | None = None,
    tokenizer: str | None = None,
    max_length: int | None = None,
    **_: Any,
) -> dict[str, Any]:
    """Documents of one shipped lm-eval task, called by lm-eval with the task's and the command's metadata.

    Args:
        task: name in `ALL_TASKS`, from the YAML.
        length, samples, seed: from `--metadata`.
        pretrained, tokenizer, max_length: the model's arguments, which lm-eval passes along.

    Raises:
        UserError: no tokenizer is named, or the model would be given less of a prompt than there is.
    """
    from datasets import Dataset
    from transformers import AutoConfig, AutoTokenizer

    name = tokenizer or pretrained
    if name is None:
        fix = 'name a tokenizer: --metadata \'{"tokenizer": "DIR", "length": 4096}\'.'
        raise UserError("tokenizer", "documents are measured in the model's tokens.", fix)
    if max_length is None and pretrained is not None:
        config = AutoConfig.from_pretrained(pretrained)
        fields = ("n_positions", "max_position_embeddings", "n_ctx")  # lm-eval's order
        max_length = next((getattr(config, field) for field in fields if hasattr(config, field)), 2048)
    if max_length is not None and max_length < length:
        reason = f"prompts of {length} tokens would be cut to {max_length}, from the left and without a word."
        fix = f"pass max_length={length} in --model_args, or a smaller length in --metadata."
        raise UserError("length", reason, fix)
    shelf = Shelf(user_cache() / "needles")
    made = make_documents(
        [task], [length], samples, seed=seed, tokenizer=AutoTokenizer.from_pretrained(name), shelf=shelf
    )
    return {"test": Dataset.from_list([document.to_dict() for document in made[task, length]])}


def process_results(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Share of the asked values that the completion holds."""
    return {"score": sum(found(value, results[0]) for value in doc["answers"]) / len(doc["answers"])}
