"""A checkpoint folder as it lies on disk: its configuration and the headers of its safetensors files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from regraft.assets import teacher_dir
from regraft.errors import UserError

EMBEDDED = "embedded"
INDEX = "model.safetensors.index.json"
# Everything a folder may hold that conversion, tokenizer or export needs; never pickles, never code.
WANTED = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "LICENSE*")


@dataclass(frozen=True)
class TensorInfo:
    """One tensor as a header describes it; `dtype` in safetensors' own spelling (F32, BF16)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: Path


@dataclass(frozen=True)
class Checkpoint:
    """A model folder, opened: its config and tensor headers. Weights are read only when asked for."""

    name: str  # as the user wrote it
    path: Path
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]

    def read(self, names: list[str]) -> Iterator[tuple[str, Tensor]]:
        """Tensors by name, file by file, one at a time.

        Raises:
            UserError: a file ends before its tensors do.
        """
        by_file: dict[Path, list[str]] = {}
        for name in names:
            by_file.setdefault(self.tensors[name].file, []).append(name)
        for file, wanted in by_file.items():
            with _open(file) as handle:
                for name in wanted:
                    yield name, handle.get_tensor(name)


def open_checkpoint(model: str, revision: str | None = None) -> Checkpoint:
    """Open `embedded`, a local folder, or a Hub id (downloaded through huggingface_hub); reads no weights.

    Raises:
        UserError: no such folder or repository, no config.json, or a safetensors file that is missing, cut
            short or outside the folder.
    """
    path = _locate(model, revision)
    config_file = path / "config.json"
    if not config_file.is_file():
        raise UserError(path, "has no config.json.", "give the folder of a Hugging Face checkpoint.")
    try:
        config = json.loads(config_file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(config_file, f"is not JSON: {error}.", "download it again.") from error
    if not isinstance(config, dict):
        raise UserError(config_file, "is not a JSON object.", "download it again.")
    return Checkpoint(model, path, config, _tensors(path))


def _locate(model: str, revision: str | None) -> Path:
    if model == EMBEDDED:
        return teacher_dir()
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.exists() or model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise UserError(model, "is not a folder.", f"give a checkpoint folder, a Hub id or `{EMBEDDED}`.")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=list(WANTED)))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = f"is no folder here and could not be fetched from the Hub ({type(error).__name__}: {error})."
        raise UserError(model, reason, "check the id, the network and HF_HUB_OFFLINE.") from error


def _tensors(path: Path) -> dict[str, TensorInfo]:
    """The tensors of a folder, through its index where it has one: index and files have to agree."""
    index = path / INDEX
    if not index.is_file():
        single = path / "model.safetensors"
        if not single.is_file():
            raise UserError(path, "holds no model.safetensors.", "convert the weights to safetensors first.")
        return {t.name: t for t in _headers(single)}
    try:
        files: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(files.values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise UserError(index, "is not a safetensors index.", "download it again.") from error
    for name in names:
        if Path(name).name != name:
            raise UserError(index, f"names {name!r}, outside the folder.", "download it again.")
        if not (path / name).is_file():
            raise UserError(path / name, f"is missing, but {INDEX} names it.", "download it again.")
    found = [t for name in names for t in _headers(path / name)]
    tensors = {t.name: t for t in found if files.get(t.name) == t.file.name}
    strays = [f"{t.file.name} holds {t.name}, which the index does not place there" for t in found]
    strays = [text for t, text in zip(found, strays, strict=True) if t.name not in tensors]
    strays += [f"{name} is not in {file}" for name, file in files.items() if name not in tensors]
    if strays:
        more = f", and {len(strays) - 5} more" if len(strays) > 5 else ""
        reason = f"does not fit its files: {'; '.join(strays[:5])}{more}."
        raise UserError(index, reason, "download the folder again.")
    return tensors


def _headers(file: Path) -> list[TensorInfo]:
    with _open(file) as handle:
        slices = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118  (not a dict)
        return [TensorInfo(n, tuple(s.get_shape()), s.get_dtype(), file) for n, s in slices.items()]


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        reason = f"is not a whole safetensors file ({error})."
        raise UserError(file, reason, "download it again.") from error
