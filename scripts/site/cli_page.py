"""The reference of the command line, read off the Typer app, so that it cannot differ from `--help`."""

from __future__ import annotations

import html
import inspect
from collections.abc import Iterator
from typing import Any

import typer

from regraft.cli import app

HEAD = """# Command line

What `regraft VERB --help` says, for every verb. Exit codes: 0 done, 1 unexpected, 2 a mistake that you can
mend (with its place, the reason and the fix), 3 a verification that failed, 130 interrupted.
"""


def cli_page() -> str:
    """Markdown of the whole command line: a section for each verb."""
    root: Any = typer.main.get_command(app)
    parts = [HEAD, _options("regraft", root)]
    for path, command in verbs(root):
        parts.append(_section(path, command))
    return "\n".join(parts)


def verbs(command: Any, path: tuple[str, ...] = ("regraft",)) -> Iterator[tuple[str, Any]]:
    """Every verb below a command with its full name, groups left out."""
    for name, child in command.commands.items():
        full = (*path, name)
        if hasattr(child, "commands"):
            yield from verbs(child, full)
        else:
            yield " ".join(full), child


def _section(path: str, command: Any) -> str:
    lines = [f"## {path}\n", inspect.cleandoc(command.help or ""), ""]
    if command.epilog:
        example = command.epilog.removeprefix("Example: ")
        lines += ["```sh", example, "```", ""]
    return "\n".join([*lines, _options(path, command)])


def _options(path: str, command: Any) -> str:
    """The arguments and options of one command as a table, in the panels of its help."""
    context = typer.Context(command, info_name=path)
    rows = []
    for panel, parameters in _panels(command).items():
        if panel:
            rows.append(f"| **{panel}** | |")
        rows += [_row(parameter, context) for parameter in parameters]
    return "\n".join(["| option | what |", "|---|---|", *rows, ""])


def _panels(command: Any) -> dict[str, list[Any]]:
    panels: dict[str, list[Any]] = {"": []}
    for parameter in command.params:
        if getattr(parameter, "hidden", False):
            continue
        panels.setdefault(getattr(parameter, "rich_help_panel", None) or "", []).append(parameter)
    return panels


def _row(parameter: Any, context: typer.Context) -> str:
    """Name and help as `--help` has them; a default stands in the help's brackets."""
    name, text = (" ".join(part.split()) for part in parameter.get_help_record(context))
    code = html.escape(name).replace("|", "&#124;")  # a backslash would show inside code
    return f"| <code>{code}</code> | {text.replace('|', chr(92) + '|')} |"
