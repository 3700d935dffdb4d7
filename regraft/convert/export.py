"""A model as a folder that transformers loads: weights, config, tokenizer and generation settings."""

from __future__ import annotations

import shutil
from pathlib import Path

from regraft.files import hash_directory
from regraft.layers import RegraftForCausalLM

# Files that travel from the teacher unchanged.
COMPANIONS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.jinja",
    "LICENSE*",
)


def export_model(model: RegraftForCausalLM, out: Path, *, companions_from: Path) -> str:
    """Write a model and what travels with it into an empty folder.

    Args:
        model: the model; its tensors keep their dtypes, shared ones are stored once.
        out: an existing, empty folder (make it with `atomic_directory`).
        companions_from: folder whose tokenizer, chat template and licence are copied.

    Returns:
        The hash of the exported model (config and weights).
    """
    model.config.architectures = [type(model).__name__]
    model.config.dtype = model.model.embeddings.weight.dtype
    model.save_pretrained(out)
    for pattern in COMPANIONS:
        for file in sorted(companions_from.glob(pattern)):
            if file.is_file() and not file.name.endswith((".py", ".bin", ".pt", ".pkl")):
                shutil.copyfile(file, out / file.name)
    return hash_directory(out)
