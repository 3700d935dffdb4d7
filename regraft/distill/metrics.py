"""What a run says while it goes: a JSON line a step, TensorBoard and wandb where they are, a live line."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from regraft.errors import UserError

FILE = "metrics.jsonl"
_TEXT = ("stage", "rows")  # fields that are no numbers


def forget_after(folder: Path, step: int) -> None:
    """Drop the lines of steps that a resumed run does again, and what a kill left of one."""
    file = folder / FILE
    if not file.is_file():
        return
    kept = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            if json.loads(line)["step"] > step:
                break
        except ValueError:
            break
        kept.append(f"{line}\n")
    file.write_text("".join(kept), encoding="utf-8")


class Metrics:
    """Writes each step's numbers to `metrics.jsonl`, to TensorBoard if it is installed, to wandb if asked.

    Args:
        folder: the run's.
        step: steps done before.
        wandb: send the numbers to Weights & Biases too, under the folder's name.
    """

    def __init__(self, folder: Path, step: int, *, wandb: bool = False) -> None:
        self._file = (folder / FILE).open("a", encoding="utf-8")
        self._board = _tensorboard(folder / "tensorboard", step)
        self._wandb = _wandb(folder) if wandb else None

    def write(self, line: dict[str, Any]) -> None:
        """Write one step."""
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        numbers = {k: v for k, v in line.items() if k not in (*_TEXT, "step")}
        if self._board is not None:
            for name, value in numbers.items():
                self._board.add_scalar(name, value, line["step"])
        if self._wandb is not None:
            self._wandb.log(numbers, step=line["step"])

    def close(self) -> None:
        """Finish all files."""
        self._file.close()
        if self._board is not None:
            self._board.close()
        if self._wandb is not None:
            self._wandb.finish()


def _tensorboard(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=step + 1)


def check_wandb(wanted: bool) -> None:
    """Before a run begins: whether what the recipe asks for is there.

    Raises:
        UserError: wandb is asked for and not installed.
    """
    if wanted and importlib.util.find_spec("wandb") is None:
        raise UserError("engine.wandb", "wandb is not installed.", "pip install 'regraft[track]'.")


def _wandb(folder: Path) -> Any:
    import wandb

    name = folder.resolve().name
    return wandb.init(project="regraft", name=name, id=name, dir=str(folder), resume="allow")


class _Line(Progress):
    """A bar, and under it the numbers of the step."""

    def get_renderables(self) -> Iterator[Any]:
        """Rows to draw."""
        yield from super().get_renderables()
        yield from (Text(f"         {task.fields['numbers']}") for task in self.tasks)


@contextmanager
def live_line(total: int, done: int, shown: bool = True) -> Iterator[Any]:
    """A live line: stage, bar over tokens, losses, evidence, tokens a second, memory, time left.

    Yields a function of a stage's name, tokens done and the step's numbers.
    """
    columns = (
        TextColumn("{task.description:>8}"),
        BarColumn(bar_width=20),
        TaskProgressColumn(),
        TextColumn("step {task.fields[step]}"),
        TimeRemainingColumn(),
    )
    with _Line(*columns, disable=not shown) as progress:
        task = progress.add_task("", total=total, completed=done, step=0, numbers="")

        def update(line: dict[str, Any]) -> None:
            now = {"step": line["step"], "numbers": numbers(line)}
            progress.update(task, completed=line["tokens"], description=line["stage"], **now)

        yield update


def numbers(line: dict[str, Any]) -> str:
    """The numbers of a step that people watch."""
    plain = {"step", "tokens", "tokens_per_second", "lr", "grad_norm", "memory_gb", "evidence"}
    terms = [k for k in line if k not in plain.union(_TEXT) and "." not in k]
    shown = [f"{name} {line[name]:.4g}" for name in (terms if len(terms) > 2 else terms[:1])]
    shown += [f"evidence {line['evidence']:.2f}"] if "evidence" in line else []
    shown.append(f"{line['tokens_per_second']:,.0f} tokens/s")
    shown.append(f"{line['memory_gb']:.1f} GB")
    return "  ".join(shown)


def memory_gb(device: torch.device) -> float:
    """Most memory in use so far, in 10^9 bytes: of the device, or of the process where it is the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    try:
        import resource
    except ImportError:  # Windows
        return 0.0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9
