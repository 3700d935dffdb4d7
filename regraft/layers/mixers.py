"""Mixers: projections, short convolutions and gate are shared; a mixer only says what filter its heads run.

Parameter names are flash-linear-attention's, so a teacher's tensors fit without renaming.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regraft.layers.cache import MixerState
from regraft.layers.config import RegraftConfig
from regraft.ops import kalman_delta_rule
from regraft.ops.inputs import Covariance


class Design(NamedTuple):
    """The design model of a layer at the current input: arguments of `kalman_delta_rule`, all float32."""

    g: Tensor  # [B,T,H]
    obs_var: Tensor  # [B,T,H] or [B,T,H,G]
    process_var: Tensor  # [B,T,H]


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis, computed in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `[..., width]`, same dtype out."""
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


class ShortConvolution(nn.Module):
    """Depthwise causal convolution over time with SiLU; `weight [channels, 1, size]`."""

    def __init__(self, channels: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, size))

    def forward(self, x: Tensor, state: Tensor | None, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
        """Convolve `x [B,T,channels]`, of which the first `lengths [B]` tokens of a row are real (None: all).

        Returns:
            The output `[B,T,channels]` and the new state `[B,channels,size-1]`: the last real inputs.
        """
        keep = self.weight.shape[-1] - 1
        x = x.transpose(1, 2)
        x = F.pad(x, (keep, 0)) if state is None else torch.cat([state.to(x.dtype), x], dim=-1)
        if lengths is None:
            new_state = x[..., x.shape[-1] - keep :]
        else:
            last = lengths[:, None] + torch.arange(keep, device=x.device)  # [B, keep]
            new_state = x.gather(-1, last[:, None].expand(-1, x.shape[1], -1))
        y = F.conv1d(x, self.weight, groups=x.shape[1])
        return F.silu(y).transpose(1, 2), new_state


class ZeroLinear(nn.Linear):
    """A linear map that starts at zero."""


class Mixer(nn.Module):
    """A linear-attention layer around `kalman_delta_rule`; subclasses give `covariance` and `design`.

    The key and query heads are L2-normalised, the read-out is RMS-normalised per head and gated.
    """

    kind: str
    covariance: Covariance
    # Parameters that stay float32 whatever the model's dtype, and that weight decay must not touch.
    float32_parameters: tuple[str, ...] = ("A_log", "dt_bias")
    # Parameters that a Gated DeltaNet has not: a conversion makes them.
    new_parameters: tuple[str, ...] = ()

    def __init__(self, config: RegraftConfig, **settings: Any) -> None:
        super().__init__()
        d, H, HV, K, V = (
            config.hidden_size,
            config.num_heads,
            config.num_v_heads,
            config.head_dim,
            config.value_dim,
        )
        self.num_heads, self.num_v_heads, self.head_dim, self.value_dim = H, HV, K, V
        self.q_proj = nn.Linear(d, H * K, bias=False)
        self.k_proj = nn.Linear(d, H * K, bias=False)
        self.v_proj = nn.Linear(d, HV * V, bias=False)
        self.a_proj = nn.Linear(d, HV, bias=False)
        self.b_proj = nn.Linear(d, HV, bias=False)
        self.A_log = nn.Parameter(torch.empty(HV))
        self.dt_bias = nn.Parameter(torch.empty(HV))
        self.q_conv1d = ShortConvolution(H * K, config.conv_size)
        self.k_conv1d = ShortConvolution(H * K, config.conv_size)
        self.v_conv1d = ShortConvolution(HV * V, config.conv_size)
        if config.use_gate:
            self.g_proj = nn.Linear(d, HV * V, bias=False)
        self.o_norm = RMSNorm(V, config.norm_eps)
        self.o_proj = nn.Linear(HV * V, d, bias=False)

    def initial_parameters(self) -> dict[str, Tensor]:
        """Starting values of the mixer's own parameters, as fla draws them: rates 0-16, steps 1e-3-0.1."""
        HV = self.num_v_heads
        dt = torch.empty(HV).uniform_(math.log(1e-3), math.log(0.1)).exp()
        rate = torch.empty(HV).uniform_(1e-3, 16)
        return {"A_log": rate.log(), "dt_bias": dt + torch.log(-torch.expm1(-dt))}

    def design(self, x: Tensor, k: Tensor) -> Design:
        """The noise and decay of every step, from the input `x [B,T,d]` and the keys `k [B,T,H,D]`."""
        raise NotImplementedError

    def filter_settings(self) -> dict[str, Any]:
        """Further arguments of `kalman_delta_rule` that do not depend on the input."""
        return {}

    def forward(
        self,
        x: Tensor,
        state: MixerState | None = None,
        lengths: Tensor | None = None,
        use_cache: bool = False,
    ) -> tuple[Tensor, MixerState | None]:
        """Mix `x [B,T,d]` over time.

        Args:
            x: input, `[B,T,d]`.
            state: what a former call returned for the tokens before.
            lengths: `[B]`, how many leading tokens of a row are real; the rest leave the state alone.
            use_cache: return the state after the last real token.
        """
        B, T, _ = x.shape
        conv = state.conv if state is not None else (None, None, None)
        q, conv_q = self.q_conv1d(self.q_proj(x), conv[0], lengths)
        k, conv_k = self.k_conv1d(self.k_proj(x), conv[1], lengths)
        v, conv_v = self.v_conv1d(self.v_proj(x), conv[2], lengths)
        q = l2_norm(self._heads(q))
        k = l2_norm(self._heads(k))
        g, obs_var, process_var = self.design(x, k)
        if lengths is not None:
            real = torch.arange(T, device=x.device) < lengths[:, None]
            k = k * real[:, :, None, None]
            g, process_var = g * real[..., None], process_var * real[..., None]
        o, filtered = kalman_delta_rule(
            q,
            k,
            v.view(B, T, self.num_v_heads, self.value_dim),
            g,
            obs_var,
            process_var,
            covariance=self.covariance,
            initial_state=None if state is None else (state.mean, state.cov),
            output_final_state=use_cache,
            check=False,  # in range by construction
            **self.filter_settings(),
        )
        o = self.o_norm(o)
        if hasattr(self, "g_proj"):
            o = o * F.silu(self.g_proj(x).view_as(o))
        y = self.o_proj(o.flatten(2))
        if filtered is None:
            return y, None
        return y, MixerState((conv_q, conv_k, conv_v), *filtered)

    def _heads(self, x: Tensor) -> Tensor:
        """`[B,T,H*K] -> [B,T,HV,K]`; key heads are repeated where there are more value heads."""
        x = x.unflatten(-1, (self.num_heads, self.head_dim))
        return x.repeat_interleave(self.num_v_heads // self.num_heads, dim=2)

    def log_decay(self, x: Tensor) -> Tensor:
        """`g = -exp(A_log) softplus(a + dt_bias)`, `[B,T,HV]`, float32."""
        return -self.A_log.float().exp() * F.softplus(self.a_proj(x).float() + self.dt_bias.float())

    def log_precision(self, x: Tensor) -> Tensor:
        """`b [B,T,HV]`, float32: logit of the write strength, log-precision of an observation."""
        return self.b_proj(x).float()


class GatedDeltaNet(Mixer):
    """Gated DeltaNet: covariance held at the identity, gain `sigmoid(b)` (paper 000 §3.1)."""

    kind = "gated_deltanet"
    covariance: Covariance = "reset"

    def design(self, x: Tensor, k: Tensor) -> Design:
        """`obs_var = exp(-b)`, so that the gain along a unit key is `sigmoid(b)`."""
        obs_var = teacher_obs_var(self.log_precision(x), k)
        return Design(self.log_decay(x), obs_var, torch.zeros_like(obs_var))


class BayesianLayer(Mixer):
    """The exact Kalman filter (paper 000, Proposition 1), initialised from a Gated DeltaNet's projections.

    Every parameter that a Gated DeltaNet has not is zero or neutral at the start, and at `evidence = 0` the
    layer equals the Gated DeltaNet with the same projections for any value of `refresh`::

        obs_var     = exp(-b + obs_log_scale + obs_proj x)
        process_var = exp(process_proj x) · ((1 - a²) exp(process_log_scale)
                                             + evidence · softplus(refresh) · a² sigmoid(b))

    The first part of `process_var` keeps the prior stationary. The second gives back, at
    `softplus(refresh) = 1`, the variance that one write of the teacher's strength takes, so that repeated
    keys are written as the teacher writes them; it is what a head that never forgets (a = 1) has for
    plasticity.

    Settings:
        noise_groups: groups G of value columns with their own observation noise and covariance.
        obs_var_floor: lower bound of the observation noise in the covariance recursion (float32 needs one).
    """

    kind = "bayesian"
    covariance: Covariance = "dense"
    new_parameters = (
        "evidence",
        "obs_log_scale",
        "obs_proj",
        "process_log_scale",
        "process_proj",
        "refresh",
    )
    float32_parameters = (*Mixer.float32_parameters, *new_parameters)

    def __init__(self, config: RegraftConfig, noise_groups: int = 1, obs_var_floor: float = 0.01) -> None:
        super().__init__(config)
        if self.value_dim % noise_groups:
            raise ValueError(f"noise_groups: {noise_groups} does not divide the value width {self.value_dim}")
        d, HV = config.hidden_size, config.num_v_heads
        self.noise_groups, self.obs_var_floor = noise_groups, obs_var_floor
        self.evidence = nn.Parameter(torch.empty(HV))
        self.obs_log_scale = nn.Parameter(torch.empty(HV, noise_groups))
        self.obs_proj = ZeroLinear(d, HV * noise_groups, bias=False)
        self.process_log_scale = nn.Parameter(torch.empty(HV))
        self.process_proj = ZeroLinear(d, HV, bias=False)
        self.refresh = nn.Parameter(torch.empty(HV))

    def initial_parameters(self) -> dict[str, Tensor]:
        """Neutral values: evidence 0, unit scales, input-dependent parts at zero, a refresh of 0.01."""
        neutral = ("evidence", "obs_log_scale", "process_log_scale")
        return {
            **super().initial_parameters(),
            **{name: torch.zeros(getattr(self, name).shape) for name in neutral},
            "refresh": torch.full((self.num_v_heads,), inverse_softplus(0.01)),
        }

    def design(self, x: Tensor, k: Tensor) -> Design:
        """Noise and decay of every step; see the class for the formulas."""
        x32 = x.float()
        g, b = self.log_decay(x), self.log_precision(x)
        shift = self.obs_log_scale + self.obs_proj(x32).unflatten(-1, self.obs_log_scale.shape)
        obs_var = teacher_obs_var(b[..., None] - shift, k[..., None, :])
        forgotten = -torch.expm1(2 * g)  # 1 - a²
        refresh = self._evidence() * F.softplus(self.refresh) * (1 - forgotten) * b.sigmoid()
        process_var = self.process_proj(x32).exp() * (forgotten * self.process_log_scale.exp() + refresh)
        return Design(g, obs_var, process_var)

    def filter_settings(self) -> dict[str, Any]:
        """Evidence per head and the floor of the observation noise."""
        return {"evidence": self._evidence(), "obs_var_floor": self.obs_var_floor}

    def _evidence(self) -> Tensor:
        """Evidence `[HV]`, kept from going below 0 where it is trained."""
        return self.evidence.clamp(min=0)


MIXERS: dict[str, type[Mixer]] = {m.kind: m for m in (GatedDeltaNet, BayesianLayer)}


def build_mixer(config: RegraftConfig, layer: int) -> Mixer:
    """The mixer that `config.mixers[layer]` describes.

    Raises:
        ValueError: its kind is unknown.
    """
    settings = dict(config.mixers[layer])
    kind = settings.pop("kind")
    if kind not in MIXERS:
        raise ValueError(f"mixers[{layer}].kind: {kind!r} is not one of {sorted(MIXERS)}")
    return MIXERS[kind](config, **settings)


def teacher_obs_var(log_precision: Tensor, k: Tensor) -> Tensor:
    """Observation noise whose gain along k under a unit prior is `sigmoid(log_precision)`, for any key norm.

    The teacher normalises keys with an epsilon, so short ones stay below norm 1, yet writes them with the
    full `sigmoid(b)`: `1 / (obs_var + |k|²) = sigmoid(b)` gives `exp(-b)` plus what |k|² lacks to 1.
    """
    return (-log_precision).exp() + (1 - k.float().square().sum(-1)).clamp(min=0)


def l2_norm(x: Tensor) -> Tensor:
    """`x · rsqrt(Σ x² + 1e-6)` over the last axis in float32, as fla's kernels do it."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def inverse_softplus(y: float) -> float:
    """x with `softplus(x) = y`, y > 0."""
    return y + math.log(-math.expm1(-y))
