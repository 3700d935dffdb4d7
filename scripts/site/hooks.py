"""Hooks of mkdocs (`hooks:` in mkdocs.yml): the generated reference pages, and formulas without a script."""

from __future__ import annotations

from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from scripts.site.cli_page import cli_page
from scripts.site.formulas import with_mathml
from scripts.site.recipe_page import recipe_page

PAGES = {"reference/cli.md": cli_page, "reference/recipe.md": recipe_page}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are read off the command line and the recipe's schema."""
    for name, page in PAGES.items():
        files.append(File.generated(config, name, content=page()))
    return files


def on_page_content(html: str, **_: Any) -> str:
    """Turn formulas into MathML, which browsers draw by themselves; one colon before a block of a docstring."""
    return with_mathml(html).replace("::</p>", ":</p>")
