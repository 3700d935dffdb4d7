"""Devices and processes, through accelerate: one process, several (DDP), or a student in shards (FSDP2).

Started by `torchrun` or `accelerate launch`; every process runs the same loop and holds a part of each step's
rows.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, DistributedType, InitProcessGroupKwargs
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint

from regraft.distill.data import Rows
from regraft.distill.losses import Objective
from regraft.errors import UserError
from regraft.layers import RegraftForCausalLM
from regraft.layers.mixer import Mixer
from regraft.layers.model import MLP, Block

_PARALLEL = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU, DistributedType.FSDP)
_PATIENCE = timedelta(hours=2)  # for process 0 to convert or tokenise


class Step(nn.Module):
    """The objective of one micro-batch as a module: what DDP and FSDP2 wrap, for they act on calls of it."""

    def __init__(self, student: RegraftForCausalLM, teacher: RegraftForCausalLM | None) -> None:
        super().__init__()
        self.student = student
        self._teacher = [teacher]  # in a list: not a part of what is wrapped, and saved nowhere
        self.objective: Objective | None = None

    def forward(self, rows: Rows, tokens: int, targets: int) -> dict[str, Tensor]:
        """The losses of `Objective`."""
        assert self.objective is not None
        return self.objective(self.student, self._teacher[0], rows, tokens=tokens, targets=targets)


class Engine:
    """What the loop asks about devices and processes.

    Args:
        student_sharded: cut the student's parameters, gradients and moments over the processes (FSDP2).
        teacher_sharded: the same for the teacher's parameters.
        recompute: keep no activations inside mixers and MLPs; compute them again for the gradient.

    Raises:
        UserError: accelerate is configured for an engine that this loop does not run on.
    """

    def __init__(
        self, *, student_sharded: bool = False, teacher_sharded: bool = False, recompute: bool = False
    ) -> None:
        self.accelerator = Accelerator(
            mixed_precision="no",  # the loop casts by the recipe: noise parameters never leave float32
            cpu=not torch.cuda.is_available(),
            kwargs_handlers=[
                DistributedDataParallelKwargs(find_unused_parameters=True),
                InitProcessGroupKwargs(timeout=_PATIENCE),
            ],
        )
        kind = self.accelerator.distributed_type
        if kind not in _PARALLEL:
            fix = "configure accelerate for one or several GPUs or CPUs, or use torchrun."
            raise UserError("accelerate", f"is configured for {kind.value}, which is not supported.", fix)
        self.student_sharded = student_sharded or kind == DistributedType.FSDP
        self.teacher_sharded, self.recompute = teacher_sharded, recompute
        if self.world == 1:
            self.student_sharded = self.teacher_sharded = False

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        return self.accelerator.device

    @property
    def rank(self) -> int:
        """Number of this process, from 0; process 0 writes all files."""
        return self.accelerator.process_index

    @property
    def world(self) -> int:
        """Number of processes."""
        return self.accelerator.num_processes

    @property
    def main(self) -> bool:
        """Whether this process writes files and prints."""
        return self.accelerator.is_main_process

    def place(self, student: RegraftForCausalLM, teacher: RegraftForCausalLM | None) -> Step:
        """Move both models to the device, cut what is to be cut, and make them one module.

        Tensors that teacher and student share stay shared, unless one of the two is cut.
        """
        student.to(self.device)
        step = Step(student, teacher)
        if self.recompute:
            recompute(student)
        if teacher is not None:
            teacher.to(self.device).requires_grad_(False)
            if self.teacher_sharded:
                _own_tensors(teacher)
                _shard(teacher)
        if self.student_sharded:
            _own_tensors(student)
            _shard(student)
            fully_shard(step)
        return step

    def wrap(self, step: Step) -> nn.Module:
        """The module to call in a stage, once its parameters' `requires_grad` are set."""
        if self.world == 1 or self.student_sharded:
            return step
        self.accelerator.free_memory()  # the wrapper of the stage before would still exchange gradients
        return self.accelerator.prepare_model(step)

    def micro_batches(self, rows: Rows, size: int | None) -> list[Rows]:
        """This process's rows of a step on its device, as many micro-batches as every process has.

        Rows are dealt out one by one; processes with fewer get rows of padding, which count in no loss.
        """
        if self.world > 1:
            rows = rows.share(self.rank, self.world)
        return [micro.to(self.device) for micro in rows.split(size or len(rows.ids))]

    def accumulating(self, module: nn.Module, last: bool) -> AbstractContextManager[Any]:
        """Around each micro-batch: processes exchange gradients in the last one only."""
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(last)
        elif not last and self.world > 1:
            return module.no_sync()  # type: ignore[operator]
        return nullcontext()

    def sum(self, x: Tensor) -> Tensor:
        """The sum of a tensor over all processes."""
        if self.world == 1:
            return x
        return self.accelerator.reduce(x.to(self.device), reduction="sum")

    def any(self, flag: bool) -> bool:
        """Whether this is so in some process."""
        return flag if self.world == 1 else bool(self.sum(torch.tensor(float(flag))) > 0)

    def once(self, work: Callable[[], object]) -> None:
        """Do something in process 0 while the others wait; where it fails, all of them end."""
        failure: Exception | None = None
        try:
            if self.main:
                work()
        except Exception as error:
            failure = error
        if self.any(failure is not None):
            raise failure if failure is not None else SystemExit(1)


def whole(x: Tensor) -> Tensor:
    """A tensor in one piece; every process has to call this for one that is cut."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def like(x: Tensor, model: Tensor) -> Tensor:
    """A whole tensor cut and placed as another one is."""
    if isinstance(model, DTensor):
        return distribute_tensor(x.to(model.device), model.device_mesh, model.placements)
    return x.to(model.device)


def unshard(model: nn.Module) -> None:
    """Put whole parameters back in place of cut ones and take FSDP2 off, so that the model can be saved or
    run by itself."""
    done: dict[int, nn.Parameter] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.__class__ = next(c for c in type(module).__bases__ if c is not FSDPModule)
            module._forward_pre_hooks.clear()
            module._forward_hooks.clear()
        for name, p in list(module._parameters.items()):
            if isinstance(p, DTensor):
                if id(p) not in done:
                    done[id(p)] = nn.Parameter(p.detach().full_tensor().cpu(), requires_grad=False)
                module._parameters[name] = done[id(p)]


def _shard(model: nn.Module) -> None:
    """Mixers by themselves, for the layer loss calls them so; then the rest of each block."""
    for kind in (Mixer, Block):
        for module in model.modules():
            if isinstance(module, kind):
                fully_shard(module)


def _own_tensors(model: nn.Module) -> None:
    """Give a model memory of its own: cutting replaces parameters, which must not be another model's."""
    done: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, p in list(module._parameters.items()):
            if p is not None:
                if id(p) not in done:
                    done[id(p)] = nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad)
                module._parameters[name] = done[id(p)]


def recompute(model: nn.Module) -> None:
    """Keep no activations inside mixers and MLPs; `release` undoes it."""
    for module in model.modules():
        if isinstance(module, (Mixer, MLP)):
            module.forward = partial(checkpoint, module.forward, use_reentrant=False)  # type: ignore[method-assign]


def release(model: nn.Module) -> None:
    """Undo `recompute`, so that a model can be exported or run by itself."""
    for module in model.modules():
        module.__dict__.pop("forward", None)
