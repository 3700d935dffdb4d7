"""What a layer is converted to: names a user knows, the mixers they stand for, and a choice per layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from regraft.errors import UserError
from regraft.layers import RegraftConfig
from regraft.layers.attention import Attention
from regraft.recipes.selector import resolve_layers

TARGETS: dict[str, dict[str, Any]] = {
    "bayesian": {"kind": "bayesian"},
    "kdn-diagonal": {"kind": "bayesian", "covariance": "diagonal"},
    "kdn-isotropic": {"kind": "bayesian", "covariance": "isotropic"},
    "covariance-reset": {"kind": "covariance_reset"},
}


def choose_mixers(
    teacher: RegraftConfig,
    layers: str | Sequence[int],
    *,
    to: str = "bayesian",
    targets: Mapping[int, str] | None = None,
    noise_groups: int = 1,
) -> dict[int, dict[str, Any]]:
    """The new mixer of each layer that is converted, as entries of `RegraftConfig.mixers`.

    Args:
        teacher: configuration of the model that is converted.
        layers: indices, `every:N` or `last:N`.
        to: target of these layers.
        targets: layers among them that get another target.
        noise_groups: groups of value columns with a noise of their own.

    Raises:
        UserError: a layer that does not exist, is not chosen or cannot be converted; an unknown target; or
            groups that do not divide the value width.
    """
    targets = targets or {}
    chosen = resolve_layers(layers, teacher.num_hidden_layers)
    for layer in targets:
        if layer not in chosen:
            reason = f"layer {layer} is not among the converted layers {', '.join(map(str, chosen))}."
            raise UserError("targets", reason, "add it to --layers, or leave it out.")
    for name in (to, *targets.values()):
        if name not in TARGETS:
            raise UserError("target", f"{name!r} is unknown.", f"choose one of {', '.join(TARGETS)}.")
    attention = [str(i) for i in chosen if teacher.mixers[i]["kind"] == Attention.kind]
    if attention:
        which = f"layer{'s' * (len(attention) > 1)} {', '.join(attention)}"
        others = ", ".join(str(i) for i, m in enumerate(teacher.mixers) if m["kind"] != Attention.kind)
        reason = "softmax attention (`attn` in config.json), which is kept as it is."
        raise UserError(which, reason, f"choose among {others}.")
    if teacher.allow_neg_eigval:
        which = f"layer {chosen[0]}" if len(chosen) == 1 else f"layers {', '.join(map(str, chosen))}"
        reason = "has write strengths up to 2 (allow_neg_eigval), which no Kalman gain reaches."
        raise UserError(which, reason, "convert another teacher.")
    V = teacher.value_dim
    if V % noise_groups:
        reason = f"{noise_groups} groups do not divide the value width {V}."
        raise UserError("noise_groups", reason, f"choose a divisor of {V}.")
    groups = {"noise_groups": noise_groups}
    return {layer: {**TARGETS[targets.get(layer, to)], **groups} for layer in chosen}


def parse_targets(words: Sequence[str]) -> dict[int, str]:
    """`["5=kdn-diagonal", "11=covariance-reset"]` as a mapping.

    Raises:
        UserError: a word of another form, or a layer named twice.
    """
    targets: dict[int, str] = {}
    for word in words:
        layer, equals, name = word.partition("=")
        if not equals or not layer.strip().isdecimal():
            raise UserError(f"--target {word}", "is not LAYER=TARGET.", "write --target 5=kdn-diagonal.")
        if int(layer) in targets:
            raise UserError(f"--target {word}", f"names layer {layer} again.", "name each layer once.")
        targets[int(layer)] = name.strip()
    return targets


def with_mixers(teacher: RegraftConfig, mixers: Mapping[int, dict[str, Any]]) -> RegraftConfig:
    """The teacher's configuration with these mixers in place of its own."""
    fields = teacher.to_dict()
    fields["mixers"] = [mixers.get(i, m) for i, m in enumerate(teacher.mixers)]
    return RegraftConfig(**fields)
