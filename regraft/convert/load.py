"""Models and tokenizers from checkpoint folders, weights read tensor by tensor."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import nn
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from regraft.convert.checkpoint import Checkpoint, open_checkpoint
from regraft.convert.plan import TEACHER_TYPE, Entry, Plan, make_plan, model_config
from regraft.errors import UserError
from regraft.layers import RegraftConfig, RegraftForCausalLM
from regraft.layers.mixers import Mixer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_model(
    model: str, *, dtype: str = "float32", revision: str | None = None, allow_pickle: bool = False
) -> RegraftForCausalLM:
    """A teacher in fla's format or a model that regraft exported, in our decoder, in eval mode.

    Args:
        model: `embedded`, a local folder or a Hub id.
        dtype: `float32` or `bfloat16`; noise parameters, `A_log` and `dt_bias` are float32 in both.
        revision: Hub branch, tag or commit.
        allow_pickle: read `.bin` weights where there are no safetensors.

    Raises:
        UserError: the folder is not whole or not of a known form.
    """
    checkpoint = open_checkpoint(model, revision, allow_pickle=allow_pickle)
    return fill(checkpoint, make_plan(checkpoint, model_config(checkpoint), DTYPES[dtype]))


def load_tokenizer(model: str | Path, *, revision: str | None = None) -> PreTrainedTokenizerFast:
    """The tokenizer of a checkpoint, or of an opened folder.

    Raises:
        UserError: the folder has none that loads without running its code.
    """
    path = model if isinstance(model, Path) else open_checkpoint(model, revision).path
    try:
        return AutoTokenizer.from_pretrained(path, **_known_config(path))
    except (OSError, ValueError) as error:
        raise UserError(path, f"has no tokenizer that loads: {error}.", "add its tokenizer files.") from error


def _known_config(path: Path) -> dict[str, RegraftConfig]:
    """A config in place of a teacher's, whose type transformers does not know and warns about; it names no
    tokenizer either way."""
    file = path / "config.json"
    teacher = file.is_file() and json.loads(file.read_bytes()).get("model_type") == TEACHER_TYPE
    return {"config": RegraftConfig()} if teacher else {}


@torch.no_grad()
def fill(
    checkpoint: Checkpoint, plan: Plan, *, beside: RegraftForCausalLM | None = None
) -> RegraftForCausalLM:
    """Build the planned model; each source tensor is read once and cast on its way in.

    Tensors that another model, `beside`, has bit for bit share its memory.
    """
    known = {} if beside is None else beside.state_dict()
    by_source: dict[str, list[Entry]] = {}
    for entry in plan.entries:
        if entry.source is not None:
            by_source.setdefault(entry.source, []).append(entry)
    state = {}
    for name, tensor in checkpoint.read(list(by_source)):
        for entry in by_source[name]:
            part = tensor if entry.rows is None else tensor[slice(*entry.rows)]
            mine = part.to(entry.dtype, copy=True).contiguous()
            theirs = known.get(entry.target)
            same = theirs is not None and theirs.dtype == mine.dtype and torch.equal(theirs, mine)
            state[entry.target] = theirs if theirs is not None and same else mine
    return _assemble(plan, state, checkpoint)


@torch.no_grad()
def graft(teacher: RegraftForCausalLM, checkpoint: Checkpoint, plan: Plan) -> RegraftForCausalLM:
    """Build the planned model around a loaded teacher: what is kept is the teacher's own memory, shared."""
    kept = {entry.target for entry in plan.entries if entry.source is not None}
    state = {name: t for name, t in teacher.state_dict().items() if name in kept}
    return _assemble(plan, state, checkpoint)


def _assemble(plan: Plan, state: dict[str, torch.Tensor], checkpoint: Checkpoint) -> RegraftForCausalLM:
    """The model with these tensors, new ones at their start, and the folder's generation settings."""
    with torch.device("meta"):
        model = RegraftForCausalLM(plan.config)
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
