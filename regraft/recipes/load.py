"""From a name or a file, with overrides, to a validated recipe; and back to YAML."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from regraft.errors import UserError
from regraft.recipes.problems import describe, nearest
from regraft.recipes.schema import Recipe
from regraft.recipes.yaml12 import format_yaml, parse_yaml

S = TypeVar("S", bound=BaseModel)


def shipped() -> dict[str, Path]:
    """The recipes in this package: name (such as `demo`) to YAML file, sorted by name."""
    return {path.stem: path for path in sorted(Path(__file__).parent.glob("*.yaml"))}


def load_recipe(name_or_path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read, override and validate a recipe.

    Args:
        name_or_path: name of a shipped recipe, or a YAML file.
        overrides: `path=value` items such as `phases.0.lr=1e-3`, applied in order; the value is YAML, and an
            index one past the end of a list adds an item.

    Raises:
        UserError: no such recipe, not YAML, or anything in it that is unknown, missing or out of range; every
            problem is listed with its path and, for a wrong name, the nearest known one.
    """
    return parse_recipe(recipe_text(name_or_path), name_or_path, overrides)


def recipe_text(name_or_path: str | Path) -> str:
    """A recipe as it was written, with its comments.

    Raises:
        UserError: neither a shipped recipe nor a file, or not UTF-8.
    """
    path = shipped().get(str(name_or_path), Path(name_or_path))
    if not path.is_file():
        hint = nearest(name_or_path, shipped())
        raise UserError(name_or_path, "no such recipe or file.", f"{hint} (`regraft recipes ls`)")
    return read_text(path)


def read_text(path: Path) -> str:
    """The text of a UTF-8 file.

    Raises:
        UserError: it is not UTF-8.
    """
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(path, f"not UTF-8 text (byte {error.start}).", "save it as UTF-8.") from error


def parse_recipe(text: str, where: object, overrides: Sequence[str] = ()) -> Recipe:
    """Validate the text of a recipe; `where` names it in errors.

    Raises:
        UserError: as `load_recipe`.
    """
    return validated(
        Recipe, tree_of(text, where, overrides), where, "`regraft recipes schema` has every key."
    )


def tree_of(text: str, where: object, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The keys and values of a recipe's text after its overrides, not yet judged.

    Raises:
        UserError: not a YAML mapping, or an override that sets nothing.
    """
    tree = parse_yaml(text, where)
    if not isinstance(tree, dict):
        raise UserError(
            where, "a recipe is a mapping of keys to values.", "start from `regraft recipes copy`."
        )
    for item in overrides:
        _override(tree, item)
    return tree


def validated(schema: type[S], tree: dict[str, Any], where: object, fix: str) -> S:
    """The tree as a recipe of this schema.

    Raises:
        UserError: anything unknown, missing or out of range; every problem is listed with its path.
    """
    try:
        return schema.model_validate(tree)
    except ValidationError as error:
        lines = "".join(f"\n  {line}" for line in describe(error, schema))
        raise UserError(where, f"not a valid recipe:{lines}", fix) from error


def dump_recipe(recipe: BaseModel) -> str:
    """The recipe as YAML with every default written out; read again it gives an equal recipe."""
    return format_yaml(recipe.model_dump(mode="json"))


def _override(tree: dict[str, Any], item: str) -> None:
    """Set one `a.b.0.c=value` in a tree of dicts and lists; the schema judges the names afterwards."""
    path, equals, text = item.partition("=")
    *steps, last = path.split(".")
    where = f"--set {item}"
    if not equals or not all((*steps, last)):
        raise UserError(where, "is not path=value.", "write for example --set phases.0.lr=1e-3")
    node: Any = tree
    for step in steps:
        key = _key(node, step, where)
        if isinstance(node, dict) and node.get(key) is None:
            node[key] = {}  # a section that the file leaves at its default
        node = node[key]
    if isinstance(node, list) and last == str(len(node)):
        node.append(None)  # one more, such as a phase after the others
    node[_key(node, last, where)] = parse_yaml(text, where)


def _key(node: Any, step: str, where: str) -> str | int:
    """The key or list index that a step of an override's path means in this node.

    Raises:
        UserError: an index beyond the list or into something that is no list, a step into a plain value.
    """
    if isinstance(node, dict) and not step.isdecimal():
        return step
    if isinstance(node, list) and step.isdecimal() and int(step) < len(node):
        return int(step)
    if isinstance(node, list):
        raise UserError(where, f"the list has no item {step!r}.", f"use an index from 0 to {len(node) - 1}.")
    raise UserError(where, f"there is nothing to set {step!r} in.", "set the whole value, such as a=[1, 2].")
