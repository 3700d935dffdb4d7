"""What is wrong with a recipe, in the recipe's own words: path, reason, nearest known name.

Pydantic reports class names and union tags inside its paths; walking the models again along such a path
drops both, and knows which names would have been right.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any, get_args, get_origin

from pydantic import BaseModel, Discriminator, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails


def describe(error: ValidationError, root: type[BaseModel]) -> list[str]:
    """One line `path: reason` for each problem, paths written as `--set` takes them (`phases.0.lr`)."""
    return [_line(detail, root) for detail in error.errors(include_url=False)]


def nearest(name: object, known: Iterable[str]) -> str:
    """The hint after an unknown name: the closest known one, or else all of them."""
    names = list(known)
    close = get_close_matches(str(name), names, n=1)
    return f"did you mean `{close[0]}`?" if close else f"known here: {', '.join(names)}"


def _line(detail: ErrorDetails, root: type[BaseModel]) -> str:
    path, model, field = _walk(detail["loc"], root)
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    if kind == "extra_forbidden" and model is not None:
        name = str(detail["loc"][-1])
        homes = _homes(name, root)[:3]
        hint = f"it belongs to {' or '.join(homes)}" if homes else nearest(name, model.model_fields)
        reason = f"unknown key; {hint}"
    elif kind == "union_tag_invalid":
        path.append("kind")
        kinds = [tag.strip(" '") for tag in context["expected_tags"].split(",")]
        reason = f"{context['tag']!r} does not exist; {nearest(context['tag'], kinds)}"
    elif kind == "string_pattern_mismatch" and field is not None:
        reason = f"{value!r} does not fit. {field.description}"
    else:
        reason = _PLAIN.get(kind) or _without_pydantic(detail["msg"], kind, value)
    return f"{'.'.join(path)}: {reason}" if path else reason  # a check of the whole recipe names its own path


_PLAIN = {
    "missing": "is missing",
    "model_type": "should be a mapping of keys to values",
    "tuple_type": "should be a list",
    "union_tag_not_found": "needs a `kind`",
    "model_attributes_type": "should be a mapping with a `kind`",
    "invalid_key": "keys should be text",
}


def _without_pydantic(message: str, kind: str, value: object) -> str:
    if kind == "value_error":
        return message.removeprefix("Value error, ")
    reason = message.removeprefix("Input ")
    return reason if isinstance(value, dict | list) else f"{reason}, not {value!r}"


def _walk(
    loc: tuple[int | str, ...], root: type[BaseModel]
) -> tuple[list[str], type[BaseModel] | None, FieldInfo | None]:
    """Follow a pydantic location: its path without tags, the model it ends in, the last field on it."""
    path: list[str] = []
    models: list[type[BaseModel]] = [root]
    field: FieldInfo | None = None
    tag_next = False  # a union told apart by a function puts its tag next, which nobody wrote
    for step in loc:
        if tag_next:
            tag_next = False
        elif isinstance(step, int):
            path.append(str(step))
        elif len(models) > 1:  # a tagged union: this step names the member
            models = [m for m in models if step in get_args(m.model_fields["kind"].annotation)]
        elif models:
            path.append(step)
            field = models[0].model_fields.get(step)
            models = models_in(field.annotation, field.metadata) if field else models
            tag_next = field is not None and any(
                isinstance(m, Discriminator) and callable(m.discriminator) for m in field.metadata
            )
    return path, models[0] if models else None, field


def models_in(*annotations: Any) -> list[type[BaseModel]]:
    """The models an annotation is made of."""
    found: list[type[BaseModel]] = []
    for annotation in annotations:
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            found.append(annotation)
        else:
            found += models_in(*get_args(annotation))
    return found


def _homes(name: str, model: type[BaseModel], path: str = "", seen: tuple[type, ...] = ()) -> list[str]:
    """Paths at which a key is known, for a key that was put in the wrong place."""
    found = [f"{path}{name}"] if name in model.model_fields else []
    for key, field in model.model_fields.items():
        step = f"{path}{key}.N." if get_origin(field.annotation) is tuple else f"{path}{key}."
        for inner in models_in(field.annotation):
            if inner not in seen:  # a mixture may hold mixtures
                found += _homes(name, inner, step, (*seen, inner))
    return list(dict.fromkeys(found))
