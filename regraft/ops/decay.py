"""Decays inside a chunk, scalar or per channel, and the products in which they appear."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Decay:
    """With `c_t = g_1 + … + g_t`; X is 1 for a scalar decay and D for one per channel.

    entry: `exp(c_t)`, from the chunk's entry to t, `[...,C,X]`.
    between: `exp(c_t - c_s)` for s <= t, else 0, `[...,C,C,X]`. At most 1: nothing is ever divided by an
    `exp(c)` that may have underflown.
    """

    entry: Tensor
    between: Tensor

    @classmethod
    def of(cls, g: Tensor) -> Decay:
        """From log-decays `[...,C,X]`.

        Sums in float64: as a difference of sums in float32 the decays after a reset, such as g = -1e6, would
        be wrong in their second digit.
        """
        c = g.double().cumsum(-2)
        C = c.shape[-2]
        future = torch.ones(C, C, dtype=torch.bool, device=g.device).triu(1)[..., None]
        steps = c[..., :, None, :] - c[..., None, :, :]
        steps = steps.to(g.dtype).masked_fill(future, float("-inf"))
        return cls(c.to(g.dtype).exp(), steps.exp())

    @property
    def exit(self) -> Tensor:
        """From t to the chunk's end, `[...,C,X]`."""
        return self.between[..., -1, :, :]

    def products(self, x: Tensor, y: Tensor) -> Tensor:
        """`Σ_d x[t,d] between[t,s,d] y[s,d]` for `x, y [...,C,D]`: lower triangular `[...,C,C]`."""
        if self.between.shape[-1] == 1:
            return x @ y.mT * self.between[..., 0]
        return (self.between * y[..., None, :, :] @ x[..., None]).squeeze(-1)

    def accumulate(self, w: Tensor) -> Tensor:
        """`n_t = Σ_s between[t,s]² w_s` for `w [...,C,1 or D]`."""
        if self.between.shape[-1] == 1:
            return self.between[..., 0].square() @ w
        return (self.between.square() * w[..., None, :, :]).sum(-2)

    def solve(self, L: Tensor, rhs: Tensor) -> Tensor:
        """U `[...,C,D]` with `Σ_s L[t,s] between[t,s,d] U[s,d] = rhs[t,d]`, L lower triangular."""
        if self.between.shape[-1] == 1:
            return torch.linalg.solve_triangular(L * self.between[..., 0], rhs, upper=False)
        A = L[..., None, :, :] * self.between.movedim(-1, -3)  # one system a channel
        return torch.linalg.solve_triangular(A, rhs.mT[..., None], upper=False).squeeze(-1).mT
