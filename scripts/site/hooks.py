"""Hooks of mkdocs (`hooks:` in mkdocs.yml): pages read off the code, and formulas without a script."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from scripts.site.cli_page import cli_page
from scripts.site.formulas import with_mathml
from scripts.site.recipe_page import recipe_page
from scripts.site.versions_page import versions_page

ROOT = Path(__file__).parents[2]
PAGES = {
    "reference/cli.md": cli_page,
    "reference/recipe.md": recipe_page,
    "reference/versions.md": versions_page,
    "contributing.md": (ROOT / "CONTRIBUTING.md").read_text,
    "changelog.md": (ROOT / "CHANGELOG.md").read_text,
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that lie elsewhere or are read off the code."""
    for name, page in PAGES.items():
        files.append(File.generated(config, name, content=page()))
    return files


def on_page_content(html: str, **_: Any) -> str:
    """Turn formulas into MathML, which browsers draw; leave one colon before a block of a docstring."""
    return with_mathml(html).replace("::</p>", ":</p>")
