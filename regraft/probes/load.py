"""Recipes of probes by name or file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from regraft.errors import UserError
from regraft.probes.schema import SCHEMAS
from regraft.recipes.load import read_text, tree_of, validated
from regraft.recipes.problems import nearest
from regraft.recipes.schema import Section


def shipped(verb: str) -> dict[str, Path]:
    """Recipes in this package for one verb, by the name that follows the verb (`small`)."""
    files = sorted((Path(__file__).parent / "recipes").glob(f"{verb}.*.yaml"))
    return {file.name.split(".")[1]: file for file in files}


def load(verb: str, name_or_path: str | Path, overrides: Sequence[str] = ()) -> Section:
    """Read, override and validate a probe's recipe.

    Args:
        verb: of `regraft probe`.
        name_or_path: of a shipped recipe for this verb, or a YAML file.
        overrides: `path=value` items.

    Raises:
        UserError: no such recipe, one of another verb, or anything in it unknown, missing or out of range.
    """
    path = shipped(verb).get(str(name_or_path), Path(name_or_path))
    if not path.is_file():
        hint = nearest(name_or_path, shipped(verb))
        raise UserError(name_or_path, "no such recipe or file.", hint)
    tree = tree_of(read_text(path), path, overrides)
    known = VERBS[verb]
    if tree.get("probe") not in known:
        wanted = " or ".join(f"`probe: {name}`" for name in known)
        raise UserError(path, f"is no recipe of `regraft probe {verb}`.", f"begin it with {wanted}.")
    return validated(SCHEMAS[tree["probe"]], tree, path, "docs/probes.md shows recipes.")


# What the recipes of a verb may begin with.
VERBS: dict[str, tuple[str, ...]] = {
    "collision": ("collision",),
    "belief": ("bandits", "kernel"),
    "recall": ("recall",),
    "mqar": ("mqar",),
}
