"""Texts to measure perplexity on: the built-in one, local files, and the usual sets through `datasets`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from regraft.assets import austen
from regraft.distill.text_files import json_texts, read_text, unpacked_suffix
from regraft.errors import UserError

TEXT_FILES, JSON_FILES = (".txt", ".md"), (".jsonl", ".json")
_TITLE = re.compile(r"^ = [^=].*[^=] = \s*$")  # of a Wikitext article; sections have more equals signs


class HubSet(NamedTuple):
    """A data set of the Hub: arguments of `load_dataset` and the column that holds text."""

    name: str
    config: str | None
    split: str
    field: str = "text"


HUB_SETS = {
    "wikitext103": HubSet("Salesforce/wikitext", "wikitext-103-raw-v1", "test"),
    "pg19": HubSet("emozilla/pg19", None, "test"),
    "slimpajama": HubSet("cerebras/SlimPajama-627B", None, "validation"),
}


def texts(name: str, characters: int | None = None) -> Iterator[str]:
    """Documents of a text set, in its own order.

    Args:
        name: `austen`, a name in `HUB_SETS`, or a .txt, .md, .jsonl file, also as .gz, .xz or .zst; a text
            file is one document, a JSONL file has one a line under `text`.
        characters: a text file is read so far and no further, by default to its end.

    Raises:
        UserError: unknown name, or what it names cannot be read.
    """
    if name == "austen":
        return iter([austen()])
    if name in HUB_SETS:
        return _hub(name)
    path = Path(name)
    if unpacked_suffix(path) in JSON_FILES:
        return (text for text in json_texts(path, "text") if text.strip())
    if unpacked_suffix(path) in TEXT_FILES:
        return iter([read_text(path, characters)])
    known = ", ".join(["austen", *HUB_SETS])
    raise UserError(name, "is no known text set.", f"use {known}, or a .txt or .jsonl file.")


def check_sets(names: Iterable[str]) -> None:
    """Begin to read the sets that lie here, before needles take their time; the Hub's are not fetched.

    Raises:
        UserError: as `texts`.
    """
    for name in names:
        if name not in HUB_SETS:
            next(texts(name, 1), None)


def _hub(name: str) -> Iterator[str]:
    from datasets import load_dataset

    source = HUB_SETS[name]
    try:
        rows: Iterable[Any] = load_dataset(source.name, source.config, split=source.split, streaming=True)
        lines = (row[source.field] for row in rows)
        yield from articles(lines) if name == "wikitext103" else lines
    except Exception as error:  # datasets raises many kinds; all mean that the set cannot be read
        raise UserError(source.name, f"cannot be read: {error}.", "check the network.") from error


def articles(lines: Iterable[str]) -> Iterator[str]:
    """Wikitext's lines put together again: an article begins at its title."""
    article: list[str] = []
    for line in lines:
        if _TITLE.match(line):
            yield "".join(article)  # before the first title stands an empty line: no text has no tokens
            article = []
        article.append(line)
    yield "".join(article)
