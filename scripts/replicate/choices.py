"""Which of four similar needles a model names where one is asked for: the documents of `niah_multikey_1`.

    python -m scripts.replicate.choices docs/replication/results.jsonl.xz --lengths 1024 8192

Makes them again; needs no GPU and no model. Prints a Markdown table for every length: how often a model wrote
the value asked for, that of another needle or none, and the places of both in the document, from the top.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from regraft.assets.needles import NeedleDocument
from regraft.convert import load_tokenizer
from regraft.errors import UserError
from regraft.report.niah import prompt_hash
from regraft.report.statistics import Row
from regraft.report.tasks import found, make_documents
from scripts.replicate.results import unpack

TASK = "niah_multikey_1"


@dataclass
class Choices:
    """What a model wrote over documents of one length; places are counted from the top, from 0."""

    asked: Counter[int] = field(default_factory=Counter)
    right: Counter[int] = field(default_factory=Counter)
    wrong: Counter[int] = field(default_factory=Counter)
    none: int = 0

    @property
    def documents(self) -> int:
        return self.asked.total()


def choices(records: Iterable[Row], documents: Mapping[int, NeedleDocument]) -> dict[str, Choices]:
    """By model; an answer with several values counts as the one asked for, else as the first in the document.

    Args:
        records: of one length, of `niah.evaluate`.
        documents: those that the records are of, by index.

    Raises:
        UserError: a record is of another document.
    """
    found_by: dict[str, Choices] = {}
    for record in records:
        document = documents[record["index"]]
        if prompt_hash(document) != record["prompt_sha256"]:
            reason = f"document {record['index']} is another than the one that was read."
            raise UserError("--tokenizer", reason, "name the tokenizer of these models.")
        needles = sorted(document.needles, key=lambda needle: needle.start_token)
        (asked,) = (place for place, needle in enumerate(needles) if needle.asked)
        named = [place for place, needle in enumerate(needles) if found(needle.value, record["completion"])]
        own = found_by.setdefault(record["model"], Choices())
        own.asked[asked] += 1
        if asked in named:
            own.right[asked] += 1
        elif named:
            own.wrong[named[0]] += 1
        else:
            own.none += 1
    return found_by


def markdown(models: Mapping[str, Choices]) -> str:
    """One line a model."""
    places = range(1 + max(place for own in models.values() for place in own.asked))
    head = ["model", "right, %", "another's, %", "none, %", "right, by place, %", "another's, by place, %"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name, own in models.items():
        shares = (own.right.total(), own.wrong.total(), own.none)
        right = ", ".join(f"{100 * own.right[p] / max(1, own.asked[p]):.0f}" for p in places)
        wrong = ", ".join(f"{100 * own.wrong[p] / max(1, own.wrong.total()):.0f}" for p in places)
        cells = (name, *(f"{100 * n / own.documents:.0f}" for n in shares), right, wrong)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(given: list[str] | None = None) -> None:
    ap = argparse.ArgumentParser(
        prog="python -m scripts.replicate.choices",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    ap.add_argument("results", type=Path)
    ap.add_argument("--tokenizer", default="embedded", help="model whose tokenizer made the documents")
    ap.add_argument("--lengths", type=int, nargs="+", help="some of the lengths, all by default")
    args = ap.parse_args(given)
    records = [record for record in unpack(args.results).records if record["task"] == TASK]
    lengths = args.lengths or sorted({record["length"] for record in records})
    try:
        tokenizer = load_tokenizer(args.tokenizer)
        for length in lengths:
            own = [record for record in records if record["length"] == length]
            if not own:
                raise UserError("--lengths", f"no {TASK} of {length} tokens.", "leave it out for all.")
            samples = 1 + max(record["index"] for record in own)
            made = make_documents([TASK], [length], samples, seed=own[0]["seed"], tokenizer=tokenizer)
            documents = {document.index: document for document in made[TASK, length]}
            print(f"{length:,} tokens\n\n{markdown(choices(own, documents))}\n", flush=True)
    except UserError as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
