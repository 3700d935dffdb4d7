"""The mixers: each says in a few lines which decay, noise and covariance its heads have.

`docs/design-model.md` lists them with what they assume. Parameter names of the teacher's mixer are
flash-linear-attention's, so its tensors fit without renaming.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regraft.layers.attention import Attention
from regraft.layers.config import RegraftConfig
from regraft.layers.mixer import Design, Mixer, ZeroLinear
from regraft.ops.inputs import Covariance


class ScalarDecay(Mixer):
    """`g = -exp(A_log) softplus(a_proj x + dt_bias)`, one number a head."""

    float32_parameters: tuple[str, ...] = ("A_log", "dt_bias")

    def add_design(self, config: RegraftConfig) -> None:
        """`a_proj [HV,d]`, `A_log [HV]`, `dt_bias [HV]`."""
        self.a_proj = nn.Linear(config.hidden_size, self.num_v_heads, bias=False)
        self.A_log = nn.Parameter(torch.empty(self.num_v_heads))
        self.dt_bias = nn.Parameter(torch.empty(self.num_v_heads))
        super().add_design(config)

    def initial_parameters(self) -> dict[str, Tensor]:
        """As fla draws them: rates 0-16, steps 1e-3-0.1."""
        dt_bias = inverse_softplus_of_steps(self.dt_bias.shape)
        rate = torch.empty(self.num_v_heads).uniform_(1e-3, 16)
        return {**super().initial_parameters(), "A_log": rate.log(), "dt_bias": dt_bias}

    def step_size(self, x: Tensor) -> Tensor:
        """`softplus(a_proj x + dt_bias)`, `[B,T,HV]`, float32."""
        return F.softplus(self.a_proj(x).float() + self.dt_bias.float())

    def log_decay(self, x: Tensor) -> Tensor:
        """`[B,T,HV]`, float32."""
        return -self.A_log.float().exp() * self.step_size(x)


class ChannelDecay(Mixer):
    """`g = -exp(A_log) softplus(f_proj x + dt_bias)`, one number a key channel, as in KDA."""

    float32_parameters: tuple[str, ...] = ("A_log", "dt_bias")

    def add_design(self, config: RegraftConfig) -> None:
        """`f_proj`, of the rank of a value head; `A_log [HV]`, `dt_bias [HV*K]`."""
        channels = self.num_v_heads * self.head_dim
        self.f_proj = nn.Sequential(
            nn.Linear(config.hidden_size, self.value_dim, bias=False),
            nn.Linear(self.value_dim, channels, bias=False),
        )
        self.A_log = nn.Parameter(torch.empty(self.num_v_heads))
        self.dt_bias = nn.Parameter(torch.empty(channels))
        super().add_design(config)

    def initial_parameters(self) -> dict[str, Tensor]:
        """As fla draws them: rates 1-16, steps 1e-3-0.1."""
        dt_bias = inverse_softplus_of_steps(self.dt_bias.shape)
        rate = torch.empty(self.num_v_heads).uniform_(1, 16)
        return {**super().initial_parameters(), "A_log": rate.log(), "dt_bias": dt_bias}

    def log_decay(self, x: Tensor) -> Tensor:
        """`[B,T,HV,K]`, float32."""
        step = F.softplus(self.f_proj(x).float() + self.dt_bias.float())
        return -self.A_log.float().exp()[:, None] * step.unflatten(-1, (self.num_v_heads, -1))


class DeltaNet(Mixer):
    """DeltaNet: covariance held at the identity, gain `sigmoid(b_proj x)`, no decay (paper 000 §3.1)."""

    kind = "delta_net"
    covariance: Covariance = "reset"

    def add_design(self, config: RegraftConfig) -> None:
        """`b_proj [HV,d]`."""
        self.b_proj = nn.Linear(config.hidden_size, self.num_v_heads, bias=False)
        super().add_design(config)

    def log_precision(self, x: Tensor) -> Tensor:
        """`b [B,T,HV]`, float32: logit of the write strength, log-precision of an observation."""
        return self.b_proj(x).float()

    def design(self, x: Tensor, k: Tensor) -> Design:
        """`obs_var = exp(-b)`, so that the gain along a unit key is `sigmoid(b)`."""
        obs_var = teacher_obs_var(self.log_precision(x), k)
        return Design(self.log_decay(x), obs_var, torch.zeros_like(obs_var))


class GatedDeltaNet(ScalarDecay, DeltaNet):
    """Gated DeltaNet: DeltaNet with scalar decay (paper 000 §3.1).

    With `allow_neg_eigval` its gain is `2 sigmoid(b)`, which no noise reaches: `obs_var` is then the number,
    negative for gains above 1, that gives it where the covariance is held at the identity.
    """

    kind = "gated_deltanet"

    def add_design(self, config: RegraftConfig) -> None:
        """As the classes it is made of."""
        self.doubled = config.allow_neg_eigval
        super().add_design(config)

    def design(self, x: Tensor, k: Tensor) -> Design:
        """`1 / (obs_var + |k|²)` is the gain along k."""
        design = super().design(x, k)
        if not self.doubled:
            return design
        norm = k.float().square().sum(-1)
        return design._replace(obs_var=0.5 * (design.obs_var + norm) - norm)


class KDA(ChannelDecay, DeltaNet):
    """Kimi Delta Attention: DeltaNet with a decay per key channel."""

    kind = "kda"


class CovarianceReset(GatedDeltaNet):
    """The Bayesian Layer with `Pbar = I` at every step: what is left of it without its covariance.

    Observation noise is `exp(-b + obs_log_scale + obs_proj x)`, which at the start is Gated DeltaNet's.

    Settings:
        noise_groups: groups G of value columns with their own observation noise.
    """

    kind = "covariance_reset"
    new_parameters: tuple[str, ...] = ("obs_log_scale", "obs_proj")
    float32_parameters = (*GatedDeltaNet.float32_parameters, *new_parameters)

    def add_design(self, config: RegraftConfig, noise_groups: int = 1) -> None:
        """`obs_log_scale [HV,G]` and `obs_proj [HV*G,d]`."""
        super().add_design(config)
        if self.value_dim % noise_groups:
            raise ValueError(f"noise_groups: {noise_groups} does not divide the value width {self.value_dim}")
        self.noise_groups = noise_groups
        self.obs_log_scale = nn.Parameter(torch.empty(self.num_v_heads, noise_groups))
        self.obs_proj = ZeroLinear(config.hidden_size, self.num_v_heads * noise_groups, bias=False)

    def initial_parameters(self) -> dict[str, Tensor]:
        """Unit scales."""
        return {**super().initial_parameters(), "obs_log_scale": torch.zeros(self.obs_log_scale.shape)}

    def obs_var(self, x: Tensor, b: Tensor, k: Tensor) -> Tensor:
        """Observation noise `[B,T,HV,G]`, from the input, its log-precision and the keys."""
        shift = self.obs_log_scale + self.obs_proj(x.float()).unflatten(-1, self.obs_log_scale.shape)
        return teacher_obs_var(b[..., None] - shift, k[..., None, :])

    def design(self, x: Tensor, k: Tensor) -> Design:
        """Noise and decay of every step; see the class."""
        g = self.log_decay(x)
        return Design(g, self.obs_var(x, self.log_precision(x), k), torch.zeros_like(g))


class BayesianLayer(CovarianceReset):
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
        covariance: `dense`, the exact filter, or its `diagonal` or `isotropic` approximation (paper 002),
            which at evidence 0 are the same Gated DeltaNet.
        obs_var_floor: lower bound of the observation noise in the covariance recursion (float32 needs one).
    """

    kind = "bayesian"
    covariance: Covariance = "dense"
    new_parameters = (
        *CovarianceReset.new_parameters,
        "evidence",
        "process_log_scale",
        "process_proj",
        "refresh",
    )
    float32_parameters = (*GatedDeltaNet.float32_parameters, *new_parameters)

    def add_design(
        self,
        config: RegraftConfig,
        noise_groups: int = 1,
        covariance: Covariance = "dense",
        obs_var_floor: float = 0.01,
    ) -> None:
        """`evidence`, `process_log_scale`, `refresh`, each `[HV]`, and `process_proj [HV,d]`."""
        super().add_design(config, noise_groups)
        if covariance not in ("dense", "diagonal", "isotropic"):
            raise ValueError(f"covariance: {covariance!r} is not dense, diagonal or isotropic")
        self.covariance = covariance
        HV = self.num_v_heads
        self.obs_var_floor = obs_var_floor
        self.evidence = nn.Parameter(torch.empty(HV))
        self.process_log_scale = nn.Parameter(torch.empty(HV))
        self.process_proj = ZeroLinear(config.hidden_size, HV, bias=False)
        self.refresh = nn.Parameter(torch.empty(HV))

    def initial_parameters(self) -> dict[str, Tensor]:
        """Neutral values: evidence 0, unit scales, a refresh of 0.01."""
        HV = self.num_v_heads
        return {
            **super().initial_parameters(),
            "evidence": torch.zeros(HV),
            "process_log_scale": torch.zeros(HV),
            "refresh": torch.full((HV,), inverse_softplus(0.01)),
        }

    def design(self, x: Tensor, k: Tensor) -> Design:
        """Noise and decay of every step; see the class for the formulas."""
        g, b = self.log_decay(x), self.log_precision(x)
        forgotten = -torch.expm1(2 * g)  # 1 - a²
        refresh = self._evidence() * F.softplus(self.refresh) * (1 - forgotten) * b.sigmoid()
        scale = self.process_proj(x.float()).exp()
        process_var = scale * (forgotten * self.process_log_scale.exp() + refresh)
        return Design(g, self.obs_var(x, b, k), process_var)

    def filter_settings(self) -> dict[str, Any]:
        """Evidence per head and the floor of the observation noise."""
        return {"evidence": self._evidence(), "obs_var_floor": self.obs_var_floor}

    def _evidence(self) -> Tensor:
        """Evidence `[HV]`, kept from going below 0 where it is trained."""
        return self.evidence.clamp(min=0)


class KalmanDeltaNet(ChannelDecay):
    """Kalman Delta Network (paper 002): the filter with a diagonal or isotropic covariance::

        obs_var     = 0.01 + softplus(r_proj x + r_bias)      one a head
        process_var = softplus(w_proj x + w_bias)             one a channel (diagonal) or a head (isotropic)
        prior_var   = exp(log_prior)                          one a head
        evidence    = key width D, its information scale mu

    Settings:
        covariance: `diagonal` or `isotropic`.
        learn_evidence: train mu, per head, from D.
    """

    kind = "kalman_delta_net"
    covariance: Covariance = "diagonal"
    float32_parameters = (
        *ChannelDecay.float32_parameters,
        "r_proj",
        "r_bias",
        "w_proj",
        "w_bias",
        "log_prior",
        "log_evidence",
    )

    def add_design(
        self, config: RegraftConfig, covariance: Covariance = "diagonal", learn_evidence: bool = False
    ) -> None:
        """`r_proj [HV,d]`, `w_proj` (zero at the start), biases, `log_prior [HV]`, `log_evidence [HV]`."""
        super().add_design(config)
        if covariance not in ("diagonal", "isotropic"):
            raise ValueError(f"covariance: {covariance!r} is not diagonal or isotropic")
        self.covariance = covariance
        HV = self.num_v_heads
        rates = HV * self.head_dim if covariance == "diagonal" else HV
        self.r_proj = nn.Linear(config.hidden_size, HV, bias=False)
        self.r_bias = nn.Parameter(torch.empty(HV))
        self.w_proj = ZeroLinear(config.hidden_size, rates, bias=False)
        self.w_bias = nn.Parameter(torch.empty(rates))
        self.log_prior = nn.Parameter(torch.empty(HV))
        if learn_evidence:
            self.log_evidence = nn.Parameter(torch.empty(HV))

    def initial_parameters(self) -> dict[str, Tensor]:
        """Biases 0 and a unit prior."""
        own = {name: torch.zeros(getattr(self, name).shape) for name in ("r_bias", "w_bias", "log_prior")}
        if hasattr(self, "log_evidence"):
            own["log_evidence"] = torch.full((self.num_v_heads,), math.log(self.head_dim))
        return {**super().initial_parameters(), **own}

    def design(self, x: Tensor, k: Tensor) -> Design:
        """Noise and decay of every step; see the class for the formulas."""
        obs_var = 0.01 + F.softplus(self.r_proj(x.float()) + self.r_bias)
        process_var = F.softplus(self.w_proj(x.float()) + self.w_bias)
        if self.covariance == "diagonal":
            process_var = process_var.unflatten(-1, (self.num_v_heads, -1))
        return Design(self.log_decay(x), obs_var, process_var)

    def filter_settings(self) -> dict[str, Any]:
        """Prior and evidence per head."""
        evidence = self.log_evidence.exp() if hasattr(self, "log_evidence") else float(self.head_dim)
        return {"evidence": evidence, "prior_var": self.log_prior.exp()}


class LinearAttention(Mixer):
    """Linear attention: every write is added in full, nothing decays (paper 000 §3.2).

    This and its subclasses are the update rules alone: feature maps and normalisers of the published layers
    are left out, projections, convolutions and gate are those of the other mixers.
    """

    kind = "linear_attention"
    covariance: Covariance = "none"

    def design(self, x: Tensor, k: Tensor) -> Design:
        """Observations without noise: `omega = 1`."""
        g = self.log_decay(x)
        none = torch.zeros_like(g if g.dim() == 3 else g[..., 0])
        return Design(g, none, none)


class RetNet(LinearAttention):
    """Retention: head h keeps `1 - 2^(-5-h)` of its memory a step and turns it by rotary frequencies."""

    kind = "retnet"

    def log_decay(self, x: Tensor) -> Tensor:
        """The same at every step, `[B,T,HV]`."""
        head = torch.arange(self.num_v_heads, device=x.device, dtype=torch.float32)
        return torch.log1p(-torch.exp2(-5 - head)).expand(*x.shape[:2], -1)

    def design(self, x: Tensor, k: Tensor) -> Design:
        """Damped rotations; frequencies `10000^(-2i/K)`."""
        pairs = torch.arange(self.head_dim // 2, device=x.device, dtype=torch.float32)
        angle = 10000.0 ** (-2 * pairs / self.head_dim)
        rotation = angle.expand(*x.shape[:2], self.num_v_heads, -1)
        return super().design(x, k)._replace(rotation=rotation)


class GLA(LinearAttention):
    """Gated linear attention: `g = logsigmoid(gk_proj x) / 16`, one number a key channel."""

    kind = "gla"

    def add_design(self, config: RegraftConfig) -> None:
        """`gk_proj`, of rank 16."""
        self.gk_proj = nn.Sequential(
            nn.Linear(config.hidden_size, 16, bias=False),
            nn.Linear(16, self.num_v_heads * self.head_dim, bias=False),
        )

    def log_decay(self, x: Tensor) -> Tensor:
        """`[B,T,HV,K]`, float32."""
        return F.logsigmoid(self.gk_proj(x).float().unflatten(-1, (self.num_v_heads, -1))) / 16


class Mamba2SSD(ScalarDecay, LinearAttention):
    """The SSD core of Mamba-2: scalar decay, and values times the step size that the decay has."""

    kind = "mamba2_ssd"

    def design(self, x: Tensor, k: Tensor) -> Design:
        """As linear attention, `write = softplus(a_proj x + dt_bias)`."""
        return super().design(x, k)._replace(write=self.step_size(x))


MIXERS: dict[str, type[Mixer]] = {
    m.kind: m
    for m in (
        GatedDeltaNet,
        BayesianLayer,
        KalmanDeltaNet,
        CovarianceReset,
        DeltaNet,
        KDA,
        LinearAttention,
        RetNet,
        GLA,
        Mamba2SSD,
    )
}


def layer_class(kind: str) -> type[Mixer] | type[Attention]:
    """The class of a layer's kind: a mixer, or the attention of hybrids."""
    return Attention if kind == Attention.kind else MIXERS[kind]


def build_mixer(config: RegraftConfig, layer: int) -> Mixer | Attention:
    """The mixer that `config.mixers[layer]` describes.

    Raises:
        ValueError: its kind or one of its settings is unknown.
    """
    settings = dict(config.mixers[layer])
    kind = settings.pop("kind")
    if kind not in MIXERS and kind != Attention.kind:
        raise ValueError(f"mixers[{layer}].kind: {kind!r} is not one of {[*sorted(MIXERS), Attention.kind]}")
    chosen = layer_class(kind)
    known = list(inspect.signature(getattr(chosen, "add_design", chosen.__init__)).parameters)[2:]
    for name in settings:
        if name not in known:
            raise ValueError(f"mixers[{layer}].{name}: {kind!r} has the settings {known}")
    return chosen(config, **settings)


def teacher_obs_var(log_precision: Tensor, k: Tensor) -> Tensor:
    """Observation noise whose gain along k under a unit prior is `sigmoid(log_precision)`, for any key norm.

    The teacher normalises keys with an epsilon, so short ones stay below norm 1, yet writes them with the
    full `sigmoid(b)`: `1 / (obs_var + |k|²) = sigmoid(b)` gives `exp(-b)` plus what |k|² lacks to 1.
    Beyond ±60 a sigmoid in float32 is 0 or 1 to the last bit, while `exp(-b)` would leave its range.
    """
    noise = (-log_precision.clamp(-60, 60)).exp()
    return noise + (1 - k.float().square().sum(-1)).clamp(min=0)


def inverse_softplus(y: float) -> float:
    """x with `softplus(x) = y`, y > 0."""
    return y + math.log(-math.expm1(-y))


def inverse_softplus_of_steps(shape: torch.Size) -> Tensor:
    """Biases whose softplus is log-uniform between 1e-3 and 0.1."""
    dt = torch.empty(shape).uniform_(math.log(1e-3), math.log(0.1)).exp()
    return dt + torch.log(-torch.expm1(-dt))
