"""What all mixers share: projections, short convolutions, the filter, read-out norm and gate.

Parameter names are flash-linear-attention's, so a teacher's tensors fit without renaming.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regraft.layers.cache import MixerState
from regraft.layers.config import RegraftConfig
from regraft.layers.fla_kernels import gated_delta_rule, needs_gradient, usable
from regraft.ops import kalman_delta_rule
from regraft.ops.inputs import Covariance, State


class Design(NamedTuple):
    """The design model of a layer at the current input: arguments of `kalman_delta_rule`, all float32."""

    g: Tensor  # [B,T,H], or [B,T,H,D] per channel
    obs_var: Tensor  # [B,T,H] or [B,T,H,G]
    process_var: Tensor  # as g
    rotation: Tensor | None = None  # [B,T,H,D/2]
    write: Tensor | None = None  # [B,T,H], factor of the values


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

    def forward(
        self, x: Tensor, state: Tensor | None, lengths: Tensor | None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Convolve `x [B,T,channels]`, of which the first `lengths [B]` tokens of a row are real (None: all).

        Returns:
            The output `[B,T,channels]` and the new state `[B,channels,size-1]`: the last real inputs.
        """
        keep = self.weight.shape[-1] - 1
        x = x.transpose(1, 2)
        T = x.shape[-1]
        x = F.pad(x, (keep, 0)) if state is None else torch.cat([state.to(x.dtype), x], dim=-1)
        if lengths is None:
            new_state = x[..., T:]
        else:
            last = lengths[:, None] + torch.arange(keep, device=x.device)  # [B, keep]
            new_state = x.gather(-1, last[:, None].expand(-1, x.shape[1], -1))
        if cu_seqlens is None:
            y = F.conv1d(x, self.weight, groups=x.shape[1])
        else:  # tap by tap, so that a document's first tokens see nothing of the one before
            position = torch.arange(T, device=x.device) - cu_seqlens[:-1].repeat_interleave(cu_seqlens.diff())
            taps = (
                self.weight[:, 0, keep - lag, None]
                * x[..., keep - lag : keep - lag + T].where(position >= lag, 0)
                for lag in range(keep + 1)
            )
            y = torch.stack(list(taps)).sum(0)
        return F.silu(y).transpose(1, 2), new_state


class ZeroLinear(nn.Linear):
    """A linear map that starts at zero."""


class Mixer(nn.Module):
    """A linear-attention layer around `kalman_delta_rule`; subclasses give `covariance` and `design`.

    The read-out is RMS-normalised per head and gated. Key and query heads are L2-normalised, except in the
    additive family (`covariance = "none"`).
    """

    kind: str
    covariance: Covariance
    # Parameters that stay float32 whatever the model's dtype, and that weight decay must not touch.
    float32_parameters: tuple[str, ...] = ()
    # Those among them that a Gated DeltaNet has not, so that a conversion from one has to make them.
    new_parameters: tuple[str, ...] = ()
    # `fla`, `regraft` or `auto`: whose kernels compute a delta rule; None leaves it to REGRAFT_KERNELS.
    kernels: str | None = None
    # Tokens that the filter takes at once; heads much narrower than this are faster with less.
    chunk_size: int = 64

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
        self.add_design(config, **settings)
        self.q_conv1d = ShortConvolution(H * K, config.conv_size)
        self.k_conv1d = ShortConvolution(H * K, config.conv_size)
        self.v_conv1d = ShortConvolution(HV * V, config.conv_size)
        if config.use_gate:
            self.g_proj = nn.Linear(d, HV * V, bias=False)
        self.o_norm = RMSNorm(V, config.norm_eps)
        self.o_proj = nn.Linear(HV * V, d, bias=False)

    def add_design(self, config: RegraftConfig) -> None:
        """Make the parameters that `design` reads; the settings of a mixer are further arguments."""

    def initial_parameters(self) -> dict[str, Tensor]:
        """Starting values of the mixer's own parameters by name, its linear maps left out."""
        return {}

    def design(self, x: Tensor, k: Tensor) -> Design:
        """The noise and decay of every step, from the input `x [B,T,d]` and the keys `k [B,T,H,D]`."""
        raise NotImplementedError

    def filter_settings(self) -> dict[str, Any]:
        """Further arguments of `kalman_delta_rule` that do not depend on the input."""
        return {}

    def log_decay(self, x: Tensor) -> Tensor:
        """`g [B,T,HV]` or `[B,T,HV,K]`, float32; 0, a memory that never decays, unless overridden."""
        return x.new_zeros(*x.shape[:2], self.num_v_heads, dtype=torch.float32)

    def forward(
        self,
        x: Tensor,
        state: MixerState | None = None,
        lengths: Tensor | None = None,
        use_cache: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, MixerState | None]:
        """Mix `x [B,T,d]` over time.

        Args:
            x: input, `[B,T,d]`.
            state: what a former call returned for the tokens before.
            lengths: `[B]`, how many leading tokens of a row are real; the rest leave the state alone.
            use_cache: return the state after the last real token.
            cu_seqlens: boundaries `[N+1]` of the documents packed into the one row; without a state.
        """
        B, T, _ = x.shape
        conv = state.conv if state is not None else (None, None, None)
        q, conv_q = self.q_conv1d(self.q_proj(x), conv[0], lengths, cu_seqlens)
        k, conv_k = self.k_conv1d(self.k_proj(x), conv[1], lengths, cu_seqlens)
        v, conv_v = self.v_conv1d(self.v_proj(x), conv[2], lengths, cu_seqlens)
        q, k = (y.unflatten(-1, (self.num_heads, self.head_dim)).float() for y in (q, k))
        if self.covariance != "none":
            q, k = l2_norm(q), l2_norm(k)
        v = v.view(B, T, self.num_v_heads, self.value_dim)
        design = self.design(x, k.repeat_interleave(self.num_v_heads // self.num_heads, dim=2))
        if design.write is not None:
            v = v * design.write[..., None].to(v.dtype)
        if lengths is not None:
            real = torch.arange(T, device=x.device) < lengths[:, None]
            k = _where(real, k)
            design = Design(
                _where(real, design.g),
                _where(real, design.obs_var, 1.0),
                _where(real, design.process_var),
                None if design.rotation is None else _where(real, design.rotation),
            )
        o, filtered = self.filter(q, k, v, design, state, use_cache, cu_seqlens)
        o = self.o_norm(o)
        if hasattr(self, "g_proj"):
            o = o * F.silu(self.g_proj(x).view_as(o))
        y = self.o_proj(o.flatten(2))
        if filtered is None:
            return y, None
        return y, MixerState((conv_q, conv_k, conv_v), *filtered)

    def filter(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        design: Design,
        state: MixerState | None,
        use_cache: bool,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, State | None]:
        """`kalman_delta_rule`, or fla's kernels where this is a gated delta rule and they are usable."""
        start = None if state is None else (state.mean, state.cov)
        delta_rule = self.covariance == "reset" and design.g.dim() == design.obs_var.dim() == 3
        training = needs_gradient(q, k, v, design.g, design.obs_var)
        if delta_rule and design.rotation is None and usable(self.kernels, q, v, training=training):
            norm = k.square().sum(-1).repeat_interleave(self.num_v_heads // self.num_heads, dim=2)
            o, mean = gated_delta_rule(
                q,
                k,
                v,
                design.g,
                1 / (design.obs_var + norm),
                initial_state=None if start is None else start[0],
                output_final_state=use_cache,
                cu_seqlens=cu_seqlens,
            )
            return o, None if mean is None else (mean, None)
        return kalman_delta_rule(
            q,
            k,
            v,
            design.g,
            design.obs_var,
            design.process_var,
            rotation=design.rotation,
            covariance=self.covariance,
            initial_state=start,
            output_final_state=use_cache,
            cu_seqlens=cu_seqlens,
            chunk_size=self.chunk_size,
            check=False,  # in range by construction
            **self.filter_settings(),
        )


def l2_norm(x: Tensor) -> Tensor:
    """`x · rsqrt(Σ x² + 1e-6)` over the last axis in float32, as fla's kernels do it."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _where(real: Tensor, x: Tensor, fill: float = 0.0) -> Tensor:
    """`x [B,T,...]` where `real [B,T]`, else `fill`."""
    return x.where(real.reshape(*real.shape, *[1] * (x.dim() - 2)), fill)
