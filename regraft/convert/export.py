"""A model as a folder that transformers loads: weights, config, code, tokenizer, settings and model card."""

from __future__ import annotations

import shutil
from pathlib import Path

from regraft.convert.remote_code import AUTO_MAP, remote_code
from regraft.errors import UserError
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
_NEVER = (".py", ".bin", ".pt", ".pkl")


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
    model.config.auto_map = AUTO_MAP
    model.save_pretrained(out)
    for name, text in remote_code().items():
        (out / name).write_text(text, encoding="utf-8", newline="\n")
    for pattern in COMPANIONS:
        for file in sorted(companions_from.glob(pattern)):
            if file.is_file() and not file.name.endswith(_NEVER):
                shutil.copyfile(file, out / file.name)
    return hash_directory(out)


def push(folder: Path, repository: str) -> str:
    """Upload an export to the Hub, into a new private repository or an existing one; returns its address.

    Raises:
        UserError: no login, no network or no right to write there.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

    try:
        url = HfApi().create_repo(repository, private=True, exist_ok=True)
        HfApi().upload_folder(repo_id=repository, folder_path=folder, commit_message="Upload by regraft")
    except (HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OSError) as error:
        reason = f"could not be uploaded to ({type(error).__name__}: {error}). The student is in {folder}."
        raise UserError(repository, reason, "log in with `hf auth login`, then upload the folder.") from error
    return str(url)
