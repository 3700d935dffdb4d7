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

from regraft.errors import UserError
from regraft.files import atomic_directory, write_json

_NAME = re.compile(r"step-(\d+)")
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


def save(
    folder: Path,
    step: int,
    *,
    model: nn.Module,
    names: set[str],
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    keep: int,
) -> Path:
    """Write `folder/step-N` and remove all but the newest `keep`.

    Args:
        folder: the run's `checkpoints`.
        step: steps done since the run began.
        model, names: the model, and which of its parameters may have moved.
        optimizer: AdamW over named groups.
        state: everything else that a resumed run needs, plain types.
        keep: how many to keep, at least 1.
    """
    parameters = dict(model.named_parameters())
    target = folder / f"step-{step}"
    with atomic_directory(target, overwrite=True) as temporary:
        save_file(
            {n: parameters[n].detach().contiguous() for n in sorted(names)},
            temporary / "parameters.safetensors",
        )
        save_file(_moments(optimizer), temporary / "optimizer.safetensors")
        write_json(temporary / "state.json", {**state, "step": step})
    for old in existing(folder)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def existing(folder: Path) -> list[Path]:
    """Whole checkpoints, oldest first; steps compare as numbers."""
    found = [(int(m[1]), p) for p in folder.glob("step-*") if (m := _NAME.fullmatch(p.name))]
    return [p for _, p in sorted(found) if (p / "state.json").is_file()]


def read_state(checkpoint: Path) -> dict[str, Any]:
    """What `save` was given as `state`, and `step`."""
    return json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))


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
    """Put the saved moments back."""
    saved = _read(checkpoint / "optimizer.safetensors")
    for group in optimizer.param_groups:
        for name, p in zip(group["names"], group["params"], strict=True):
            if f"step/{name}" in saved:
                optimizer.state[p] = {
                    m: saved[f"{m}/{name}"].to(p.device if m != "step" else "cpu") for m in _MOMENTS
                }


def _moments(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"{moment}/{name}": optimizer.state[p][moment].contiguous()
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
