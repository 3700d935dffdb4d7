"""A checkpoint folder as it lies on disk: its configuration and the headers of its safetensors files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from regraft.assets import teacher_dir
from regraft.errors import UserError

EMBEDDED = "embedded"
PICKLE = ".bin"
_SHORT = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
FLOATS = tuple(_SHORT.values())
# Everything a folder may hold that conversion, tokenizer or export needs; never pickles, never code.
WANTED = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "LICENSE*", "README.md")


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
        """Tensors by name, one at a time: what was read before is no longer held in memory."""
        for name in names:
            file = self.tensors[name].file
            if file.suffix == PICKLE:
                yield name, read_pickle(file)[name]
            else:
                with _open(file) as handle:  # opened anew: a mapped file stays in memory while it is open
                    yield name, handle.get_tensor(name)

    def with_tensors_of(self, other: Checkpoint, prefixes: tuple[str, ...]) -> Checkpoint:
        """This folder with the tensors under these prefixes taken from another."""
        kept = {n: t for n, t in self.tensors.items() if not n.startswith(prefixes)}
        theirs = {n: t for n, t in other.tensors.items() if n.startswith(prefixes)}
        return replace(self, tensors={**kept, **theirs})


def open_checkpoint(model: str, revision: str | None = None, *, allow_pickle: bool = False) -> Checkpoint:
    """Open `embedded`, a local folder, or a Hub id (downloaded through huggingface_hub); reads no weights.

    Args:
        model: what to open.
        revision: branch, tag or commit of a Hub id.
        allow_pickle: where there are no safetensors, read `pytorch_model.bin` with torch's unpickler for
            weights only.

    Raises:
        UserError: no such folder or repository, no config.json, or a file of weights that is missing, cut
            short or outside the folder.
    """
    path = _locate(model, revision, allow_pickle)
    config_file = path / "config.json"
    if not config_file.is_file():
        export = path / "export"  # of a run directory
        fix = f"give {export}." if export.is_dir() else "give the folder of a Hugging Face checkpoint."
        raise UserError(path, "has no config.json.", fix)
    try:
        config = json.loads(config_file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(config_file, f"is not JSON: {error}.", "download it again.") from error
    if not isinstance(config, dict):
        raise UserError(config_file, "is not a JSON object.", "download it again.")
    return Checkpoint(model, path, config, _tensors(path, allow_pickle))


def _locate(model: str, revision: str | None, allow_pickle: bool) -> Path:
    path = teacher_dir() if model == EMBEDDED else Path(model).expanduser()
    if path.is_dir():
        if revision is not None:
            raise UserError("revision", f"{model} is a folder and has none.", "leave it out.")
        return path
    if path.exists() or model.startswith((".", "/", "~")) or model.count("/") != 1:
        fix = f"give a checkpoint folder, a Hub id such as OWNER/NAME, or `{EMBEDDED}`."
        raise UserError(model, "is not a folder.", fix)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    from huggingface_hub.utils import disable_progress_bars, enable_progress_bars

    wanted = [*WANTED, *([f"pytorch_model*{PICKLE}"] if allow_pickle else [])]
    enable_progress_bars()  # gigabytes may come: the one place where a library's own bar is of use
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=wanted))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = f"is no folder here and could not be fetched from the Hub ({type(error).__name__}: {error})."
        raise UserError(model, reason, "check the id, the network and HF_HUB_OFFLINE.") from error
    finally:
        disable_progress_bars()


def _tensors(path: Path, allow_pickle: bool) -> dict[str, TensorInfo]:
    """The tensors of a folder, through its index where it has one: index and files have to agree."""
    kinds = ["model.safetensors", *(["pytorch_model.bin"] if allow_pickle else [])]
    for single in kinds:
        index = path / f"{single}.index.json"
        if index.is_file():
            return _indexed(index)
        if (path / single).is_file():
            return {t.name: t for t in _headers(path / single)}
    if any(path.glob(f"pytorch_model*{PICKLE}")) and not allow_pickle:
        fix = "pass --allow-pickle if you trust its source, or convert it to safetensors."
        raise UserError(path, "holds its weights as a pickle only, no model.safetensors.", fix)
    raise UserError(path, "holds no model.safetensors.", "give the folder of a Hugging Face checkpoint.")


def _indexed(index: Path) -> dict[str, TensorInfo]:
    path = index.parent
    try:
        files: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(files.values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise UserError(index, "is not an index of weights.", "download it again.") from error
    for name in names:
        if Path(name).name != name:
            raise UserError(index, f"names {name!r}, outside the folder.", "download it again.")
        if not (path / name).is_file():
            raise UserError(path / name, f"is missing, but {index.name} names it.", "download it again.")
    found = [t for name in names for t in _headers(path / name)]
    tensors = {t.name: t for t in found if files.get(t.name) == t.file.name}
    strays = [
        f"{t.file.name} holds {t.name}, which the index does not place there"
        for t in found
        if files.get(t.name) != t.file.name
    ]
    strays += [f"{name} is not in {file}" for name, file in files.items() if name not in tensors]
    if strays:
        more = f", and {len(strays) - 5} more" if len(strays) > 5 else ""
        reason = f"does not fit its files: {'; '.join(strays[:5])}{more}."
        raise UserError(index, reason, "download the folder again.")
    return tensors


def _headers(file: Path) -> list[TensorInfo]:
    if file.suffix == PICKLE:
        return [
            TensorInfo(n, tuple(t.shape), _SHORT.get(t.dtype, str(t.dtype)), file)
            for n, t in read_pickle(file).items()
        ]
    with _open(file) as handle:
        slices = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118  (not a dict)
        return [TensorInfo(n, tuple(s.get_shape()), s.get_dtype(), file) for n, s in slices.items()]


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        reason = f"is not a whole safetensors file ({error})."
        raise UserError(file, reason, "download it again.") from error


def read_pickle(file: Path) -> dict[str, Tensor]:
    """Tensors of a `.bin`, mapped into memory and read when used; the unpickler takes weights only.

    Raises:
        UserError: the file is cut short, or holds something else than tensors.
    """
    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # unpickling fails in as many ways as files can be wrong
        reason = f"cannot be read as plain weights ({type(error).__name__})."
        raise UserError(file, reason, "convert it to safetensors where you trust it.") from error
    if not isinstance(tensors, dict) or not all(isinstance(t, Tensor) for t in tensors.values()):
        raise UserError(file, "holds more than named tensors.", "save the model's state_dict alone.")
    return tensors
