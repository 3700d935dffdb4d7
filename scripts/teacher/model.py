"""The teacher before its first step, and its folder afterwards, as flash-linear-attention would write it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from regraft.layers import GatedDeltaNet, RegraftConfig, RegraftForCausalLM

SMALL = 6 * 192  # layers times width of the embedded teacher
SHARED_FIELDS = (  # of a configuration: what flash-linear-attention and RegraftConfig name alike
    *("hidden_size", "expand_v", "use_gate", "conv_size", "head_dim", "num_heads", "num_v_heads"),
    *("max_position_embeddings", "hidden_ratio", "intermediate_size", "num_hidden_layers", "norm_eps"),
    *("tie_word_embeddings", "initializer_range", "vocab_size", "allow_neg_eigval"),
)


def new_model(args: argparse.Namespace, vocab_size: int) -> RegraftForCausalLM:
    """Random weights, but for a vector that all embeddings share and rates of forgetting spread over heads.

    The output gate has no bias: with embeddings of mean zero nothing constant is there to open it, and recall
    does not form.
    """
    config = RegraftConfig(
        vocab_size=vocab_size,
        hidden_size=args.hidden,
        num_hidden_layers=args.layers,
        num_heads=args.heads,
        head_dim=args.head_dim,
        max_position_embeddings=args.length,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=1,
    )
    model = RegraftForCausalLM(config)
    with torch.no_grad():
        embeddings = model.model.embeddings.weight
        embeddings.normal_(0, args.embedding_std)
        embeddings += args.embedding_mean * torch.randn(args.hidden)
        # What blocks add to the residual stream grows with depth and width, and drowns the shared vector:
        # in the end as much as in the embedded teacher, whose levels are known to pass.
        scale = (SMALL / (args.layers * args.hidden)) ** 0.5
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight *= scale
    spread_decays(model)
    return model


@torch.no_grad()
def spread_decays(model: RegraftForCausalLM) -> None:
    """Rates of forgetting from 0.001 to 0.3 a token over the heads of a layer, so that some keep a needle."""
    for mixer in (m for m in model.modules() if isinstance(m, GatedDeltaNet)):
        dt = torch.logspace(-3, -0.5, mixer.num_v_heads)
        mixer.A_log.zero_()
        mixer.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))


def export(model: RegraftForCausalLM, folder: Path, tokenizer: Path | None = None) -> None:
    """Write the model with flash-linear-attention's names and fields, bfloat16 except for rates.

    Args:
        model: any device.
        folder: made if missing; a teacher that is there is replaced.
        tokenizer: folder whose tokenizer files go along.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {
        name: (x.float() if name.endswith(("A_log", "dt_bias")) else x.bfloat16()).cpu().contiguous()
        for name, x in model.state_dict().items()
        if name != "lm_head.weight"  # tied
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    c = model.config
    special = {"bos_token_id": c.bos_token_id, "eos_token_id": c.eos_token_id, "pad_token_id": c.pad_token_id}
    config = {
        "architectures": ["GatedDeltaNetForCausalLM"],
        "model_type": "gated_deltanet",
        "dtype": "bfloat16",
        "attn": None,
        "attn_mode": "chunk",
        "use_short_conv": True,
        "hidden_act": "swish",
        "use_cache": True,
        **{name: getattr(c, name) for name in SHARED_FIELDS},
        **special,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(special, indent=2) + "\n")
    if tokenizer is not None:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (folder / name).write_bytes((tokenizer / name).read_bytes())
