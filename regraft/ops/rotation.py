"""Damped rotations as transitions: 2×2 rotations on interleaved pairs of channels (paper 000, Appendix D)."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x: Tensor, angle: Tensor) -> Tensor:
    """Turn the pairs `(x[2i], x[2i+1])` of the last axis `[...,D]` by `angle [...,D/2]`."""
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.stack([cos * even - sin * odd, sin * even + cos * odd], dim=-1).flatten(-2)


def rotate_rows(x: Tensor, angle: Tensor) -> Tensor:
    """`R x` for matrices `x [...,D,X]`, R the rotation by `angle [...,D/2]`."""
    return rotate(x.mT, angle[..., None, :]).mT


def rotate_both(P: Tensor, angle: Tensor) -> Tensor:
    """`R P Rᵀ` for matrices `P [...,D,D]`."""
    return rotate(rotate_rows(P, angle), angle[..., None, :])
