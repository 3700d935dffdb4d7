"""Checkpoints of a running training: safetensors and JSON, written whole or not at all, never a pickle."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from regraft.distill.engine import like
from regraft.errors import UserError
from regraft.files import atomic_directory, write_json

_NAME = re.compile(r"step-(\d+)")
_UNFINISHED = re.compile(r"\.(step-\d+)\.(tmp|old)-\w+")
_STATE = "state.json"  # written last: a folder without it is not whole
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


def save(
    folder: Path,
    step: int,
    *,
    parameters: dict[str, Tensor],
    moments: dict[str, Tensor],
    state: dict[str, Any],
    keep: int,
    best: bool = False,
) -> Path:
    """Write `folder/step-N` and remove what need not be kept.

    A step has one state only, so a whole checkpoint of it is left as it is.

    Args:
        folder: the run's `checkpoints`.
        step: steps done since the run began.
        parameters: those that may have moved, by name.
        moments: what `moments` gave.
        state: everything else that a resumed run needs, plain types.
        keep, best: as in `rotate`.
    """
    target = folder / f"step-{step}"
    if target not in existing(folder):
        with atomic_directory(target, overwrite=True) as temporary:
            save_file(
                {n: p.contiguous() for n, p in parameters.items()}, temporary / "parameters.safetensors"
            )
            save_file({n: m.contiguous() for n, m in moments.items()}, temporary / "optimizer.safetensors")
            write_json(temporary / _STATE, {**state, "step": step})
    rotate(folder, keep, best)
    return target


def rotate(folder: Path, keep: int, best: bool = False) -> None:
    """Remove checkpoints but the newest `keep`, the last of each stage, and with `best` the one of each stage
    whose mean loss since the checkpoint before was the lowest."""
    found = existing(folder)
    states = {path: read_state(path) for path in found}
    kept = {*found[-keep:], *(p for p, s in states.items() if s.get("ends_stage"))}
    if best:
        for stage in {s.get("stage") for s in states.values()}:
            kept.add(
                min((p for p in found if states[p].get("stage") == stage), key=lambda p: states[p]["loss"])
            )
    for path in found:
        if path not in kept:
            (path / _STATE).unlink()  # from here on it is no checkpoint, also if a kill ends the removal
            shutil.rmtree(path, ignore_errors=True)


def existing(folder: Path) -> list[Path]:
    """Whole checkpoints, oldest first; steps compare as numbers."""
    found = [(int(m[1]), p) for p in folder.glob("step-*") if (m := _NAME.fullmatch(p.name))]
    return [p for _, p in sorted(found) if (p / _STATE).is_file()]


def sweep(folder: Path) -> None:
    """Remove what a kill left of a save or a removal; while no other process writes here."""
    for path in folder.glob("*") if folder.is_dir() else ():
        if _NAME.fullmatch(path.name) and not (path / _STATE).is_file():
            shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob(".*") if folder.is_dir() else ():
        if _UNFINISHED.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def read_state(checkpoint: Path) -> dict[str, Any]:
    """What `save` was given as `state`, and `step`.

    Raises:
        UserError: the file is damaged.
    """
    file = checkpoint / _STATE
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        fix = "delete this checkpoint and resume from the one before."
        raise UserError(file, f"is damaged ({error}).", fix) from error


@torch.no_grad()
def restore_parameters(checkpoint: Path, model: nn.Module) -> None:
    """Put the saved parameters back.

    Raises:
        UserError: the checkpoint belongs to another model or is damaged.
    """
    parameters = dict(model.named_parameters())
    for name, saved in _read(checkpoint / "parameters.safetensors").items():
        if name not in parameters or parameters[name].shape != saved.shape:
            fix = "resume with the recipe that the run began with."
            raise UserError(checkpoint, f"holds {name} {list(saved.shape)}, which the model has not.", fix)
        parameters[name].copy_(saved)


@torch.no_grad()
def restore_optimizer(checkpoint: Path, optimizer: torch.optim.Optimizer) -> None:
    """Put the saved moments back, cut as the parameters are now: any number of processes may go on."""
    saved = _read(checkpoint / "optimizer.safetensors")
    for group in optimizer.param_groups:
        for name, p in zip(group["names"], group["params"], strict=True):
            if f"step/{name}" in saved:
                optimizer.state[p] = {
                    m: saved[f"{m}/{name}"] if m == "step" else like(saved[f"{m}/{name}"], p)
                    for m in _MOMENTS
                }


def moments(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """AdamW's moments and step counts by `moment/parameter`; groups carry names."""
    return {
        f"{moment}/{name}": optimizer.state[p][moment]
        for group in optimizer.param_groups
        for name, p in zip(group["names"], group["params"], strict=True)
        if p in optimizer.state
        for moment in _MOMENTS
    }


def _read(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        reason = f"is damaged ({error})."
        raise UserError(file, reason, "delete this checkpoint and resume from the one before.") from error
