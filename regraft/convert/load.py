"""Models and tokenizers from checkpoint folders, weights read tensor by tensor."""

from __future__ import annotations

import torch
from torch import nn
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from regraft.convert.checkpoint import Checkpoint, open_checkpoint
from regraft.convert.plan import Plan, make_plan, model_config
from regraft.errors import UserError
from regraft.layers import RegraftForCausalLM
from regraft.layers.mixers import Mixer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_model(model: str, *, dtype: str = "float32", revision: str | None = None) -> RegraftForCausalLM:
    """A teacher in fla's format or a model that regraft exported, in our decoder, in eval mode.

    Args:
        model: `embedded`, a local folder or a Hub id.
        dtype: `float32` or `bfloat16`; noise parameters, `A_log` and `dt_bias` are float32 in both.
        revision: Hub branch, tag or commit.

    Raises:
        UserError: the folder is not whole or not of a known form.
    """
    checkpoint = open_checkpoint(model, revision)
    return fill(checkpoint, make_plan(checkpoint, model_config(checkpoint), DTYPES[dtype]))


def load_tokenizer(model: str, *, revision: str | None = None) -> PreTrainedTokenizerFast:
    """The tokenizer of a checkpoint.

    Raises:
        UserError: the folder has none that loads without running its code.
    """
    path = open_checkpoint(model, revision).path
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise UserError(path, f"has no tokenizer that loads: {error}.", "add its tokenizer files.") from error


@torch.no_grad()
def fill(checkpoint: Checkpoint, plan: Plan) -> RegraftForCausalLM:
    """Build the planned model; each source tensor is read once and cast on its way in."""
    with torch.device("meta"):
        model = RegraftForCausalLM(plan.config)
    by_source: dict[str, list[int]] = {}
    for i, entry in enumerate(plan.entries):
        if entry.source is not None:
            by_source.setdefault(entry.source, []).append(i)
    state = {}
    for name, tensor in checkpoint.read(list(by_source)):
        for i in by_source[name]:
            entry = plan.entries[i]
            part = tensor if entry.rows is None else tensor[slice(*entry.rows)]
            state[entry.target] = part.to(entry.dtype, copy=True).contiguous()
    for entry in plan.new:
        state[entry.target] = _initial(model, entry.target).to(entry.dtype)
    model.load_state_dict(state, strict=False, assign=True)  # the plan was strict; a tied head is absent
    model.tie_weights()
    generation = checkpoint.path / "generation_config.json"
    if generation.is_file():
        model.generation_config = GenerationConfig.from_pretrained(checkpoint.path)
    return model.eval()


def _initial(model: nn.Module, target: str) -> torch.Tensor:
    """Starting value of a new mixer parameter: what its mixer says, else zeros."""
    owner, _, name = target.rpartition(".")
    mixer = model.get_submodule(owner)
    if isinstance(mixer, Mixer) and name in (own := mixer.initial_parameters()):
        return own[name]
    return torch.zeros(model.get_parameter(target).shape)
