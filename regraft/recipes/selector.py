"""Which layers a conversion replaces: a list of indices, `every:6`, `last:4`, or `scan:4`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from regraft.errors import UserError

SELECTOR = r"(every|last|scan):[1-9][0-9]*"
SELECTOR_OR_LIST = rf"^({SELECTOR}|[0-9]+(\s*,\s*[0-9]+)*)$"


def resolve_layers(selector: Sequence[int] | str, n_layers: int) -> tuple[int, ...]:
    """Turn a layer selector into sorted layer indices of a model with `n_layers` layers.

    Args:
        selector: indices (`[1, 3]`), the same as text (`"1,3"`), `"every:N"` (the last layer of each N:
            every:6 of 24 is 5, 11, 17, 23) or `"last:N"` (the last N layers).
        n_layers: number of layers of the model, at least 1.

    Raises:
        UserError: nothing selected, or an index that is out of range, negative or given twice.
    """
    written = repr(selector) if isinstance(selector, str) else ", ".join(map(str, selector))
    where, valid = f"layers {written}", f"choose from 0 to {n_layers - 1}."
    parts = _expand(selector, n_layers) if isinstance(selector, str) else selector
    layers = [_integer(part, where) for part in parts]
    if not layers:
        raise UserError(where, "selects no layer.", valid)
    for layer in layers:
        if not 0 <= layer < n_layers:
            raise UserError(where, f"layer {layer} does not exist.", valid)
        if layers.count(layer) > 1:
            raise UserError(where, f"layer {layer} is given twice.", "name each layer once.")
    return tuple(sorted(layers))


def _expand(selector: str, n_layers: int) -> Sequence[int | str]:
    """What a textual selector names, not yet checked."""
    text = selector.strip()
    if not re.fullmatch(SELECTOR, text):
        return text.split(",") if text else []
    kind, count = text.split(":")[0], int(text.split(":")[1])
    if kind == "scan":
        fix = "run `regraft scan` and give the layers it names."
        raise UserError(f"layers {text!r}", "have to be measured on the model's weights first.", fix)
    if kind == "every":
        return range(count - 1, n_layers, count)
    return range(n_layers - count, n_layers)  # negative beyond the first layer, which the caller refuses


def _integer(part: int | str, where: str) -> int:
    if isinstance(part, bool) or not re.fullmatch(r"\s*-?[0-9]+\s*", str(part)):
        raise UserError(where, f"{part!r} is not a layer.", "write indices (1,3), every:N, last:N or scan:N.")
    return int(part)
