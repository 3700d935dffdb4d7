"""The precision of matrix products: covariance, gains and factors need all of float32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def full_float32() -> Iterator[None]:
    """Inside, matrix products take float32 as it is, whatever TF32 or bfloat16 shortcuts are switched on.

    TF32 keeps 10 bits. After repeated writes the variance along a key is the small difference of numbers near
    the prior, which that rounds away. Gradients are computed later, under the caller's setting: they decay
    from chunk to chunk instead of adding up.
    """
    backends: tuple[Any, ...] = tuple(
        getattr(torch.backends, device).matmul
        for device in ("cuda", "mkldnn")
        if hasattr(getattr(torch.backends, device), "matmul")
    )
    if not hasattr(backends[0], "fp32_precision"):  # before torch 2.9
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)
        return
    settings = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = "ieee"
        yield
    finally:
        for backend, setting in zip(backends, settings, strict=True):
            backend.fp32_precision = setting
