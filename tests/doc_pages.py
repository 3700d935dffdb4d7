"""README and docs as tests see them: code blocks, commands, links, anchors, inline code."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
LANGUAGES = ("sh", "python", "yaml", "text")
_MARKDOWN = MarkdownIt().enable("table")
_SETTING = re.compile(r"[A-Z_]+=\S+")


@dataclass(frozen=True)
class Block:
    """A block of code: where it stands, its language (empty: indented or unnamed) and its text."""

    page: Path
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        """Page and line, as error messages have them."""
        return f"{name_of(self.page)}:{self.line}"

    def commands(self) -> list[list[str]]:
        """The words of each command line; comments, settings of the environment and `chrt` left out."""
        joined = self.text.replace("\\\n", " ")
        lines = [shlex.split(line, comments=True) for line in joined.splitlines()]
        return [words for line in lines if (words := _bare(line))]


def name_of(page: Path) -> str:
    """A page's path from the repository's root."""
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> list[Block]:
    """Every block of code of a page, fenced or indented, also inside lists."""
    return [
        Block(page, token.map[0] + 1 if token.map else 0, token.info.strip(), token.content)
        for token in _MARKDOWN.parse(page.read_text(encoding="utf-8"))
        if token.type in ("fence", "code_block")
    ]


def all_blocks(language: str) -> list[Block]:
    """The blocks of one language on all pages."""
    return [block for page in PAGES for block in blocks(page) if block.language == language]


def all_commands() -> list[tuple[Block, list[str]]]:
    """Every command on every page."""
    return [(block, words) for block in all_blocks("sh") for words in block.commands()]


def inline_code(page: Path) -> list[str]:
    """What stands between single backticks."""
    return [token.content for token in _inline(page) if token.type == "code_inline"]


def links(page: Path) -> list[str]:
    """Targets of links and images."""
    found = [token.attrs.get("href") or token.attrs.get("src") for token in _inline(page)]
    return [str(target) for target in found if target]


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as the site and GitHub both make them."""
    tokens = _MARKDOWN.parse(page.read_text(encoding="utf-8"))
    titles = [tokens[i + 1].content for i, token in enumerate(tokens) if token.type == "heading_open"]
    return {slug(re.sub(r"[`*]", "", title)) for title in titles}


def slug(title: str) -> str:
    """A heading's anchor."""
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower())


def _inline(page: Path) -> Iterator[Token]:
    for token in _MARKDOWN.parse(page.read_text(encoding="utf-8")):
        yield from token.children or ()


def _bare(words: list[str]) -> list[str]:
    while words and _SETTING.fullmatch(words[0]):
        words = words[1:]
    return words[words.index("-r") + 2 :] if words[:1] == ["chrt"] else words
