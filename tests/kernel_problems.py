"""What the tests of the Triton kernels share: the device, poisoned memory, results and errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
on_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter would take minutes")


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Memory that no kernel writes holds NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def results(
    inputs: dict[str, Tensor], run: Callable[[dict[str, Tensor]], tuple[Tensor, Tensor]], output: str
) -> dict[str, Tensor]:
    """The output, the final state, and gradients of a fixed functional of both."""
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    outputs = dict(zip((output, "final"), run(leaves), strict=True))
    rng = torch.Generator().manual_seed(1)
    loss = sum(
        (x * torch.randn(x.shape, generator=rng).bfloat16().to(x.device, x.dtype)).sum()
        for x in outputs.values()
    )
    gradients = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
    return {
        **{name: x.detach() for name, x in outputs.items()},
        **{f"d{name}": x for name, x in zip(leaves, gradients, strict=True)},
    }


def ratio(x: Tensor, reference: Tensor) -> float:
    """RMS of the difference over RMS of the reference."""
    assert x.isfinite().all()
    return float((x.double() - reference).norm() / reference.norm().clamp(min=1e-12))
