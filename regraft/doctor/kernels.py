"""Whether the filter computes right here: every way of running it against the float64 recurrence."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

from regraft.doctor.facts import Facts
from regraft.layers import fla_kernels
from regraft.ops import kalman_delta_rule
from regraft.ops.kalman import Backend

# Relative RMS: float64 differs by the order of sums, the kernels' three TF32 products are about float32.
_DOUBLE, _SINGLE = 1e-10, 1e-4
_HEAD = 64  # width of a head that fla's kernels are asked for, with `_HEADS` of them
_HEADS = 2


@dataclass(frozen=True)
class Check:
    """One way of computing: right, wrong (`ok` False, with a fix) or not there (`ok` None)."""

    name: str
    ok: bool | None
    said: str
    fix: str = ""


def checks(facts: Facts) -> Iterator[Check]:
    """The chunk form in PyTorch, our Triton kernels and fla's, as far as they are here. The first use of a
    kernel compiles it."""
    yield _agreement("chunk form, PyTorch on the CPU", "chunk", "cpu", torch.float64, _DOUBLE)
    yield _triton(facts)
    yield _fla(facts)


def _triton(facts: Facts) -> Check:
    name = "Triton kernels"
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if find_spec("triton") is None:
        return Check(name, None, "Triton is not installed; the chunk form runs in PyTorch")
    if not (facts.seen or interpreted):
        return Check(name, None, "no GPU here; the chunk form runs in PyTorch")
    if not interpreted and torch.version.hip is not None:
        return Check(name, None, "written for CUDA; on ROCm the chunk form runs in PyTorch")
    device = "cpu" if interpreted else "cuda"
    where = "in Triton's interpreter" if interpreted else "on the GPU"
    return _agreement(f"{name} {where}", "triton", device, torch.float32, _SINGLE)


def _fla(facts: Facts) -> Check:
    name = "flash-linear-attention's kernels"
    if not fla_kernels.installed():
        return Check(name, None, "not installed; delta-rule layers run in regraft's own op")
    if not facts.seen:
        return Check(name, None, "installed, for GPUs only; delta-rule layers run in regraft's own op here")
    shape = (_HEADS, _HEADS, _HEAD, _HEAD)
    problem = fla_kernels.problem_with(torch.device("cuda"), torch.bfloat16, shape, True)
    if problem:
        said, _, fix = problem.partition(" Fix: ")
        return Check(name, False, said, fix)
    return Check(name, True, "agree with regraft's op, gradients too")


def _agreement(name: str, backend: Backend, device: str, dtype: torch.dtype, limit: float) -> Check:
    try:
        difference = _difference(backend, device, dtype)
    except Exception as error:  # compilers and drivers fail in any way
        said = f"fails: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        return Check(name, False, said, "pip install the triton that belongs to your torch")
    said = f"differs from the float64 recurrence by {difference:.1g} (relative, at most {limit:g})"
    if not difference <= limit:  # a NaN is no agreement
        return Check(
            name, False, said, "report it with `regraft doctor --json`; another torch or triton may help"
        )
    return Check(name, True, said)


def _difference(backend: Backend, device: str, dtype: torch.dtype) -> float:
    """Largest relative RMS difference of outputs, state and gradients on a small dense problem."""
    exact = _results("reference", "cpu", torch.float64)
    found = _results(backend, device, dtype)
    return max(float((x.cpu().double() - y).norm() / y.norm()) for x, y in zip(found, exact, strict=True))


def _results(backend: Backend, device: str, dtype: torch.dtype) -> list[Tensor]:
    """Output, mean, covariance and the gradients of every input; 40 tokens, so more than one chunk of 32."""
    T, H, D = 40, 2, 16
    rng = torch.Generator().manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(1, T, H, *size, generator=rng, dtype=torch.float64)

    q, k = (torch.nn.functional.normalize(draw(D), dim=-1) for _ in range(2))
    drawn = (q, k, draw(D), -0.1 * draw().abs(), 0.1 + draw().abs(), 0.05 * draw().abs())
    inputs = [t.to(device, dtype, copy=True).requires_grad_() for t in drawn]  # q, k, v, g, two noises
    o, state = kalman_delta_rule(*inputs, backend=backend, chunk_size=32, output_final_state=True)
    assert state is not None and state[1] is not None
    loss = (
        (o * drawn[2].flip(1).to(device, dtype)).sum()
        + 0.1 * state[0].square().sum()
        + 0.1 * state[1].square().sum()
    )
    gradients = torch.autograd.grad(loss, inputs)
    return [o.detach(), state[0].detach(), state[1].detach(), *gradients]
