"""Checkpoint folders in fla's published form, written tensor by tensor with random weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from regraft.assets import teacher_dir

CONFIG: dict[str, Any] = {
    "model_type": "gated_deltanet",
    "architectures": ["GatedDeltaNetForCausalLM"],
    "attn": None,
    "attn_mode": "chunk",
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_heads": 2,
    "num_v_heads": None,
    "head_dim": 8,
    "expand_v": 1,
    "hidden_ratio": 4,
    "intermediate_size": 48,
    "vocab_size": 97,
    "use_gate": True,
    "use_short_conv": True,
    "conv_size": 4,
    "allow_neg_eigval": False,
    "norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "fuse_norm": True,
    "fuse_cross_entropy": True,
    "use_cache": True,
}


def mixer_shapes(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Tensors of one Gated DeltaNet layer of fla, `A_log` and `dt_bias` apart."""
    d, H, K = c["hidden_size"], c["num_heads"], c["head_dim"]
    HV, V = c["num_v_heads"] or H, int(K * c["expand_v"])
    shapes = {
        "q_proj.weight": (H * K, d),
        "k_proj.weight": (H * K, d),
        "v_proj.weight": (HV * V, d),
        "a_proj.weight": (HV, d),
        "b_proj.weight": (HV, d),
        "q_conv1d.weight": (H * K, 1, c["conv_size"]),
        "k_conv1d.weight": (H * K, 1, c["conv_size"]),
        "v_conv1d.weight": (HV * V, 1, c["conv_size"]),
        "o_norm.weight": (V,),
        "o_proj.weight": (d, HV * V),
    }
    return shapes | ({"g_proj.weight": (HV * V, d)} if c["use_gate"] else {})


def attention_shapes(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Tensors of one softmax attention layer of a hybrid."""
    d, attn = c["hidden_size"], c["attn"]
    keys = d // attn["num_heads"] * (attn.get("num_kv_heads") or attn["num_heads"])
    widths = {"q_proj": d, "k_proj": keys, "v_proj": keys}
    biases = {f"{name}.bias": (width,) for name, width in widths.items() if attn.get("qkv_bias")}
    weights = {f"{name}.weight": (width, d) for name, width in widths.items()}
    return weights | biases | {"o_proj.weight": (d, d)}


def make_tensors(c: dict[str, Any], dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    """All tensors of a model, with fla's names."""
    rng = torch.Generator().manual_seed(seed)
    d, inner, vocab, HV = (
        c["hidden_size"],
        c["intermediate_size"],
        c["vocab_size"],
        c["num_v_heads"] or c["num_heads"],
    )

    def draw(shape: tuple[int, ...]) -> Tensor:
        if len(shape) == 1:
            return (1 + 0.1 * torch.randn(shape, generator=rng)).to(dtype)
        return (torch.randn(shape, generator=rng) * shape[-1] ** -0.5).to(dtype)

    tensors = {"model.embeddings.weight": draw((vocab, d)), "model.norm.weight": draw((d,))}
    if not c["tie_word_embeddings"]:
        tensors["lm_head.weight"] = draw((vocab, d))
    for i in range(c["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        attention = i in (c["attn"] or {}).get("layers", ())
        for name, shape in (attention_shapes(c) if attention else mixer_shapes(c)).items():
            tensors[f"{layer}attn.{name}"] = draw(shape)
        if not attention:
            tensors[f"{layer}attn.A_log"] = torch.rand(HV, generator=rng).mul(16).clamp(min=0.1).log()
            tensors[f"{layer}attn.dt_bias"] = torch.randn(HV, generator=rng).sub(4).to(dtype)
        for name, shape in (("gate", (inner, d)), ("up", (inner, d)), ("down", (d, inner))):
            tensors[f"{layer}mlp.{name}_proj.weight"] = draw(shape)
        for norm in ("attn_norm", "mlp_norm"):
            tensors[f"{layer}{norm}.weight"] = draw((d,))
    return tensors


def write_teacher(
    folder: Path, *, tokenizer: bool = False, dtype: torch.dtype = torch.float32, **changes: Any
) -> Path:
    """A teacher's folder; `changes` are fields of config.json."""
    config = CONFIG | ({"vocab_size": 8192} if tokenizer else {}) | changes
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(make_tensors(config, dtype), folder / "model.safetensors", metadata={"format": "pt"})
    if tokenizer:
        for file in teacher_dir().glob("tokenizer*"):
            shutil.copy(file, folder)
    return folder


def edit_config(folder: Path, **changes: Any) -> None:
    """Change fields of config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_tensors(folder: Path, change: Any) -> None:
    """Rewrite the weights after `change(tensors)`."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file({name: t.contiguous().clone() for name, t in tensors.items()}, file)


def shard(folder: Path) -> dict[str, Any]:
    """Split the weights into two files with an index; returns the index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {
        "model-00001-of-00002.safetensors": names[::2],
        "model-00002-of-00002.safetensors": names[1::2],
    }
    for file, mine in parts.items():
        save_file({n: tensors[n] for n in mine}, folder / file)
    index = {"metadata": {}, "weight_map": {n: file for file, mine in parts.items() for n in mine}}
    write_index(folder, index)
    return index


def write_index(folder: Path, index: dict[str, Any]) -> None:
    """Write the index of a sharded checkpoint."""
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
