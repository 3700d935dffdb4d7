"""Reading and writing recipes as YAML 1.2 core: `1e-4` is a number, `no` is text, a key may stand once.

Plain PyYAML follows YAML 1.1, where `1e-4` is text and `no` is false: both have silently changed runs.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

import yaml

from regraft.errors import UserError

_CORE = {  # tag: (what a plain scalar of it looks like, the characters it can start with)
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "int": (r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
}


class _Loader(yaml.SafeLoader):
    """SafeLoader with the scalars of YAML 1.2 core and without duplicate keys."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - none of the scalars of YAML 1.1

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: list[object] = []
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                problem = f"the key {key!r} stands twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            seen.append(key)
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        text = self.construct_scalar(node)
        return int(text, 0) if text[:2] in ("0o", "0x") else int(text)  # 010 is ten, not eight


class _Dumper(yaml.SafeDumper):
    """SafeDumper that also quotes text which only YAML 1.2 would read as a number."""


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
for _tag, (_pattern, _first) in _CORE.items():
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), _first)


def parse_yaml(text: str, where: object) -> Any:
    """The value that a YAML text holds.

    Raises:
        UserError: the text is not YAML, or a key stands twice; names `where`, the line and the column.
    """
    try:
        return _unshared(yaml.load(text, Loader=_Loader))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        at = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        raise UserError(where, f"not valid YAML: {error.problem or error.context}{at}.") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(where, f"not valid YAML: {str(error).splitlines()[0]}.") from error


def _unshared(value: Any) -> Any:
    """A copy in which `*alias` is a value of its own, so that an override changes one place only."""
    if isinstance(value, dict):
        return {key: _unshared(item) for key, item in value.items()}
    return [_unshared(item) for item in value] if isinstance(value, list) else value


def format_yaml(value: object) -> str:
    """YAML text of a value, keys in their own order; `parse_yaml` gives the same value back."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)
