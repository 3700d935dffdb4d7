"""The update families of paper 000, E.5, with addresses given from outside, and the host for any mixer.

"-style": only the recurrent update of the named architecture, without convolutions, output gate or norm.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regraft.errors import UserError
from regraft.layers import DeltaNet, LinearAttention, Mixer, RegraftConfig
from regraft.layers.mixer import Design, ZeroLinear
from regraft.layers.mixers import inverse_softplus
from regraft.ops.inputs import Covariance

OBS_VAR, PROCESS_VAR, PRIOR_VAR = 0.05, 0.05, 3.0  # E.5.5: fixed; the second where process noise starts
KEPT = 4.0  # logit of GLA's gate at the start, which the paper does not give: 0.98 a step


class FixedAddress(nn.Module):
    """Hosts a mixer whose keys and queries are given: no projection, convolution, output gate or norm."""

    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        if not isinstance(mixer, Mixer):
            where = f"mixer {type(mixer).__name__}"
            raise UserError(
                where, "takes no addresses from outside.", "`recall` needs a regraft.layers.Mixer."
            )
        for name in ("q_proj", "k_proj", "q_conv1d", "k_conv1d", "v_conv1d", "g_proj", "o_norm"):
            if hasattr(mixer, name):
                delattr(mixer, name)
        self.mixer = mixer

    def forward(self, x: Tensor, address: Tensor, write: Tensor) -> Tensor:
        """Mix `x [B,T,d]`, with `address [B,T,D]` as key and query of every head.

        Tokens where `write [B,T]` is False read only: they leave mean and covariance as they are.
        """
        m = self.mixer
        v = m.v_proj(x).unflatten(-1, (m.num_v_heads, m.value_dim))
        k = (address * write[..., None])[:, :, None].expand(-1, -1, m.num_heads, -1)
        q = address[:, :, None].expand_as(k)
        design = m.design(x, k.expand(-1, -1, m.num_v_heads, -1))
        if design.write is not None:
            v = v * design.write[..., None]
        design = design._replace(
            g=_where(write, design.g),
            obs_var=_where(write, design.obs_var, 1.0),
            process_var=_where(write, design.process_var),
            rotation=None if design.rotation is None else _where(write, design.rotation),
        )
        o, _ = m.filter(q, k, v, design, None, False, None)
        return m.o_proj((o * m.head_dim**0.5).flatten(2))  # the filter's read-out is scaled by D^-1/2


def _where(write: Tensor, x: Tensor, fill: float = 0.0) -> Tensor:
    return x.where(write.reshape(*write.shape, *[1] * (x.dim() - 2)), fill)


class LinearStyle(LinearAttention):
    """`M += k vᵀ`."""

    kind = "linear-style"


class GLAStyle(LinearAttention):
    """`M = diag(sigmoid(W x + b)) M + k vᵀ`."""

    kind = "gla-style"

    def add_design(self, config: RegraftConfig) -> None:
        """`gate`, `d -> H D`, and its bias."""
        channels = self.num_v_heads * self.head_dim
        self.gate = nn.Linear(config.hidden_size, channels, bias=False)
        self.gate_bias = nn.Parameter(torch.empty(channels))

    def initial_parameters(self) -> dict[str, Tensor]:
        """Gates of 0.98."""
        return {"gate_bias": torch.full(self.gate_bias.shape, KEPT)}

    def log_decay(self, x: Tensor) -> Tensor:
        """`[B,T,H,D]`."""
        return F.logsigmoid(self.gate(x) + self.gate_bias).unflatten(-1, (self.num_v_heads, -1)).float()


class DeltaStyle(DeltaNet):
    """`M += beta k (v - Mᵀk)ᵀ` with `beta = sigmoid(w x + b)`."""

    kind = "delta-style"

    def add_design(self, config: RegraftConfig) -> None:
        """`b_proj` and its bias `[H]`."""
        super().add_design(config)
        self.b_bias = nn.Parameter(torch.empty(self.num_v_heads))

    def initial_parameters(self) -> dict[str, Tensor]:
        """Gains of one half."""
        return {"b_bias": torch.zeros(self.num_v_heads)}

    def log_precision(self, x: Tensor) -> Tensor:
        """`[B,T,H]`."""
        return super().log_precision(x) + self.b_bias


class ResetStyle(Mixer):
    """The filter with its predicted covariance held at `0.05 I`: a constant gain of one half."""

    kind = "reset-style"
    covariance: Covariance = "reset"
    kernels = "regraft"  # fla's hold the covariance at 1

    def design(self, x: Tensor, k: Tensor) -> Design:
        """Nothing here is learned."""
        g = self.log_decay(x)
        return Design(g, torch.full_like(g, OBS_VAR), torch.full_like(g, PROCESS_VAR))

    def filter_settings(self) -> dict[str, Any]:
        """`Pbar`."""
        return {"prior_var": PROCESS_VAR}


class BayesianStyle(Mixer):
    """The filter with process noise `softplus(w x + b)`, one number a head; prior 3, noise 0.05 (E.5.5).

    Settings:
        covariance: `dense`, or KDN's `diagonal` or `isotropic` with the same noise.
        evidence: KDN's information scale.
    """

    kind = "bayesian-style"
    covariance: Covariance = "dense"
    float32_parameters = ("process_bias",)

    def add_design(
        self, config: RegraftConfig, covariance: Covariance = "dense", evidence: float = 1.0
    ) -> None:
        """`process_proj`, zero at the start, and its bias `[H]`."""
        if covariance not in ("dense", "diagonal", "isotropic"):
            raise ValueError(f"covariance: {covariance!r} is not dense, diagonal or isotropic")
        self.covariance, self.evidence = covariance, evidence
        self.process_proj = ZeroLinear(config.hidden_size, self.num_v_heads, bias=False)
        self.process_bias = nn.Parameter(torch.empty(self.num_v_heads))

    def initial_parameters(self) -> dict[str, Tensor]:
        """Process noise of 0.05."""
        return {"process_bias": torch.full((self.num_v_heads,), inverse_softplus(PROCESS_VAR))}

    def design(self, x: Tensor, k: Tensor) -> Design:
        """No decay, fixed observation noise."""
        g = self.log_decay(x)
        process_var = F.softplus(self.process_proj(x).float() + self.process_bias)
        return Design(g, torch.full_like(g, OBS_VAR), process_var)

    def filter_settings(self) -> dict[str, Any]:
        """Prior and information scale."""
        return {"prior_var": PRIOR_VAR, "evidence": float(self.evidence)}
