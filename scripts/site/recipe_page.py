"""The reference of the recipe's keys, read off its JSON Schema."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from regraft.recipes.schema import json_schema

HEAD = """# Recipe keys

Every key of a recipe with its type, default and meaning, as `regraft recipes schema` has them. Keys without a
default are required. Unknown keys are errors. `K`, `M` and `B` mean thousand, million and billion.
"""
BOUNDS = {"minimum": "≥ {}", "exclusiveMinimum": "> {}", "maximum": "≤ {}", "exclusiveMaximum": "< {}"}


def recipe_page() -> str:
    """Markdown of all sections of a recipe, in the order in which they are met."""
    schema = json_schema()
    parts = [HEAD]
    for name in _order(schema):
        part = schema if name == "Recipe" else schema["$defs"][name]
        parts.append(_section(name, part))
    return "\n".join(parts)


def _order(schema: dict[str, Any]) -> list[str]:
    """Names of the sections, each after the first that mentions it."""
    found = ["Recipe"]
    for name in found:  # grows while it is walked
        part = schema if name == "Recipe" else schema["$defs"][name]
        found += [reference for reference in dict.fromkeys(_references(part)) if reference not in found]
    return found


def _references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if "$ref" in node:
            yield node["$ref"].rpartition("/")[2]
        for key, value in node.items():
            if key != "$defs":
                yield from _references(value)
    elif isinstance(node, list):
        for item in node:
            yield from _references(item)


def _section(name: str, part: dict[str, Any]) -> str:
    lines = [f"## {name}\n", part.get("description", ""), ""]
    lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
    required = part.get("required", ())
    for key, value in part["properties"].items():
        cells = (f"`{key}`", _type(value), _default(value, key in required), value.get("description", ""))
        lines.append("| " + " | ".join(_cell(cell) for cell in cells) + " |")
    return "\n".join([*lines, ""])


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", r"\|")


def _type(value: dict[str, Any]) -> str:
    """A key's type in words, with links to the sections that it may hold."""
    if "$ref" in value:
        name = value["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    for union in ("anyOf", "oneOf"):
        if union in value:
            return " or ".join(dict.fromkeys(_type(item) for item in value[union]))
    if "enum" in value or "const" in value:
        return ", ".join(f"`{item}`" for item in value.get("enum", [value.get("const")]))
    if value["type"] == "array":
        item = value.get("items") or value["prefixItems"][0]
        return f"list of {_type(item)}"
    bounds = [text.format(value[key]) for key, text in BOUNDS.items() if key in value]
    return " ".join([value["type"], *bounds])


def _default(value: dict[str, Any], required: bool) -> str:
    if required:
        return ""
    default = value.get("default")
    if isinstance(default, dict):
        return "its own defaults"
    return f"`{json.dumps(default)}`"
