"""Any mixer by name: those of regraft, and classes by their import path."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from regraft.errors import UserError
from regraft.layers import Mixer, RegraftConfig
from regraft.layers.mixers import build_mixer
from regraft.probes.schema import MixerSpec


def mixer_config(spec: MixerSpec, width: int, heads: int, conv: int, **more: Any) -> RegraftConfig:
    """A decoder's configuration with this one mixer; value heads as wide as key heads unless told.

    Raises:
        UserError: the heads do not divide the width.
    """
    if width % heads:
        raise UserError(f"mixer {spec.label}", f"{heads} heads do not divide width {width}.", "change one.")
    settings = {"num_heads": heads, **spec.settings} if spec.use == "attention" else spec.settings
    entry = {"kind": "delta_net"} if ":" in spec.use else {"kind": spec.use, **settings}
    shape = {"hidden_size": width, "num_heads": heads, "head_dim": width // heads, "conv_size": conv}
    return RegraftConfig(**{"vocab_size": 1, "num_hidden_layers": 1, "mixers": [entry], **shape, **more})


def build(spec: MixerSpec, config: RegraftConfig) -> tuple[nn.Module, bool]:
    """The mixer, and whether it is one of regraft's, which the backbone initialises.

    A class gets the configuration if it takes `config`, else those of hidden_size, d_model, num_heads
    and head_dim that it takes by name; and the settings.

    Raises:
        UserError: no such mixer, or it does not take its settings.
    """
    where = f"mixer {spec.label}"
    try:
        if ":" not in spec.use:
            return build_mixer(config, 0), True
        chosen = _imported(spec.use, where)
        if issubclass(chosen, Mixer):
            return chosen(config, **spec.settings), True
        return chosen(**_arguments(chosen, config), **spec.settings), False
    except (TypeError, ValueError) as error:
        fix = "a name from docs/design-model.md or package.module:Class, with settings that it takes."
        raise UserError(where, f"cannot be built: {error}.", fix) from error


def _imported(path: str, where: str) -> type[nn.Module]:
    module, _, name = path.partition(":")
    try:
        chosen = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        fix = "install it, or run with PYTHONPATH=. if it lies here."
        raise UserError(where, f"cannot be imported: {error}.", fix) from error
    if not (inspect.isclass(chosen) and issubclass(chosen, nn.Module)):
        raise UserError(where, "is no torch.nn.Module class.", "name a class, package.module:Class.")
    return chosen


def _arguments(chosen: type[nn.Module], config: RegraftConfig) -> dict[str, Any]:
    taken = inspect.signature(chosen.__init__).parameters
    if "config" in taken:
        return {"config": config}
    offered = {
        "hidden_size": config.hidden_size,
        "d_model": config.hidden_size,
        "num_heads": config.num_heads,
        "head_dim": config.head_dim,
    }
    return {name: value for name, value in offered.items() if name in taken}


def prepare(mixer: nn.Module, spec: MixerSpec, chunk_size: int) -> None:
    """Apply what a recipe says of an initialised mixer: starting values and frozen parameters.

    Raises:
        UserError: it has no such parameter.
    """
    own = dict(mixer.named_parameters())
    for name in (*spec.start, *spec.frozen):
        if name not in own:
            raise UserError(f"mixer {spec.label}", f"has no parameter {name!r}.", f"it has {', '.join(own)}.")
    with torch.no_grad():
        for name, value in spec.start.items():
            own[name].fill_(value)
    for name in spec.frozen:
        own[name].requires_grad_(False)
    if isinstance(mixer, Mixer):
        mixer.chunk_size = chunk_size


def mixed(mixer: nn.Module, x: Tensor) -> Tensor:
    """The output `[B,T,d]` of a mixer, whatever it returns beside it."""
    y = mixer(x)
    return y[0] if isinstance(y, tuple) else y
