"""Low-rank adapters through peft: put on before training, merged into their maps before an export."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from regraft.errors import UserError
from regraft.layers import RegraftForCausalLM
from regraft.recipes.problems import nearest
from regraft.recipes.schema import LoRA


def is_adapter(name: str) -> bool:
    """Whether a parameter belongs to an adapter."""
    return ".lora_A." in name or ".lora_B." in name


def plain_name(name: str) -> str:
    """The name that a parameter has without adapters around it."""
    return name.replace(".base_layer.", ".")


def add_adapters(model: RegraftForCausalLM, lora: LoRA, layers: Iterable[int]) -> None:
    """Put adapters on the model's linear maps, in place; they start without effect.

    Args:
        model: the model; parameters of adapted maps get `.base_layer` in their name.
        lora: the recipe's item.
        layers: the converted layers.

    Raises:
        UserError: peft is not installed, or a target fits no linear map.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise UserError("train", "lora needs peft.", "pip install 'regraft[lora]'.") from error
    among = range(model.config.num_hidden_layers) if lora.layers == "all" else layers
    blocks = tuple(f"model.layers.{i}." for i in among)
    linear = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n.startswith(blocks)]
    known = {name.rpartition(".")[2] for name in linear}
    for target in lora.targets:
        if target not in known:
            raise UserError(
                "train.targets", f"{target!r} fits no linear map.", nearest(target, sorted(known))
            )
    chosen = [name for name in linear if name.rpartition(".")[2] in lora.targets]
    inject_adapter_in_model(
        LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=chosen, bias="none"), model
    )


def merge_adapters(model: nn.Module) -> None:
    """Add every adapter to the map it is on, and take it off; without adapters nothing happens."""
    adapted = [(name, m) for name, m in model.named_modules() if hasattr(m, "base_layer")]
    for name, module in adapted:
        module.merge()
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, module.base_layer)
