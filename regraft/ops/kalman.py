"""`kalman_delta_rule`: shapes, checks and the choice of a backend. The mathematics is in the backends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from regraft.ops.chunk import chunk_filter
from regraft.ops.reference import reference_filter

Covariance = Literal["dense", "reset"]
Backend = Literal["auto", "reference", "chunk"]
State = tuple[Tensor, "Tensor | None"]

COVARIANCES: tuple[str, ...] = ("dense", "reset")
BACKENDS: tuple[str, ...] = ("auto", "reference", "chunk")

# Up to this many tokens the plain recurrence is faster than setting up a chunk (decoding is one token).
_SEQUENTIAL_UP_TO = 4


@dataclass(frozen=True)
class FilterInputs:
    """The op's arguments, head first and in the compute dtype; what a backend gets.

    B batch, H heads, G noise groups, T tokens, D key width, Vg = V / G value columns of a group.
    """

    q: Tensor  # [B,H,T,D], already scaled
    k: Tensor  # [B,H,T,D]
    v: Tensor  # [B,H,G,T,Vg]
    g: Tensor  # [B,H,T] log-decay
    obs_var: Tensor  # [B,H,G,T] observation noise in the gain
    obs_var_cov: Tensor  # [B,H,G,T] the same, floored, in the covariance recursion
    process_var: Tensor  # [B,H,T]
    evidence: Tensor  # [H]
    prior_var: Tensor  # [H]
    mean: Tensor  # [B,H,G,D,Vg]
    cov: Tensor | None  # [B,H,G,D,D], None for the reset family


def kalman_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    obs_var: Tensor,
    process_var: Tensor,
    *,
    covariance: Covariance = "dense",
    evidence: float | Tensor = 1.0,
    prior_var: float | Tensor = 1.0,
    scale: float | None = None,
    initial_state: State | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: Backend = "auto",
    chunk_size: int = 64,
    obs_var_floor: float = 0.0,
) -> tuple[Tensor, State | None]:
    """Kalman filter over an associative memory, read at every step (paper 000, Proposition 1).

    One head and noise group keep a mean `M [D,V]` and a covariance `P [D,D]`; with `a = exp(g)`::

        Pbar = a² P + process_var I;  u = Pbar k;  s = k·u;  kappa = u / (obs_var + s)
        M = a M + kappa (v - (a M)ᵀ k)ᵀ
        P = Pbar - evidence / (obs_var + evidence s) · u uᵀ
        o = scale · Mᵀ q                                          (the updated state is read)

    `evidence = 1` is the exact filter, the Bayesian Layer. With `evidence = 0`, `prior_var = 1` and
    `process_var = 1 - exp(2 g)` the covariance stays the identity: Gated DeltaNet.
    A step with `k = 0`, `g = 0` and `process_var = 0` changes neither mean nor covariance (padding).

    Args:
        q, k: queries and keys `[B,T,H,D]`; keys are expected L2-normalised.
        v: values `[B,T,H,V]`.
        g: log-decay `[B,T,H]`, at most 0.
        obs_var: observation noise `[B,T,H]`, or `[B,T,H,G]` for G groups of `V/G` value columns; > 0.
        process_var: process noise `[B,T,H]`, >= 0. Ignored by the reset family.
        covariance: `dense` propagates P; `reset` holds Pbar at `prior_var · I` (the delta-rule family,
            paper 000 §3.1).
        evidence: how far a write lowers the covariance, >= 0; a float or `[H]`.
        prior_var: variance of the memory before the first write, > 0; a float or `[H]`.
        scale: factor of the readout, `D ** -0.5` by default.
        initial_state: `(mean [B,H,D,V], covariance [B,H,G,D,D] or None)`.
        output_final_state: also return the state after the last token.
        cu_seqlens: document boundaries of packed rows; not available yet.
        backend: `reference` walks the tokens, `chunk` is the exact chunk-parallel form, `auto` chooses.
        chunk_size: tokens that the chunk form takes at once.
        obs_var_floor: lower bound of the observation noise where the covariance is updated and factorised.
            The gain of the mean keeps the raw `obs_var`, so a floor leaves `evidence = 0` exact.

    Returns:
        `o [B,T,H,V]` in the dtype of `v`, and the final state in the compute dtype (float32, or float64
        if an input is float64), or None.

    Raises:
        ValueError: an argument has a wrong shape or names an unknown family or backend.
    """
    if cu_seqlens is not None:
        raise ValueError("cu_seqlens: packed documents are not available yet; pass one document a row")
    if covariance not in COVARIANCES:
        raise ValueError(f"covariance: {covariance!r} is not one of {COVARIANCES}")
    if backend not in BACKENDS:
        raise ValueError(f"backend: {backend!r} is not one of {BACKENDS}")
    if chunk_size < 1:
        raise ValueError(f"chunk_size: must be at least 1, got {chunk_size}")
    inputs = _prepare(
        q, k, v, g, obs_var, process_var, covariance, evidence, prior_var, scale, initial_state, obs_var_floor
    )
    sequential = backend == "reference" or (backend == "auto" and q.shape[1] <= _SEQUENTIAL_UP_TO)
    with torch.autocast(q.device.type, enabled=False):  # covariance and gains never run in half precision
        o, mean, cov = reference_filter(inputs) if sequential else chunk_filter(inputs, chunk_size)
    B, T, H, V = v.shape
    o = o.permute(0, 3, 1, 2, 4).reshape(B, T, H, V).to(v.dtype)
    if not output_final_state:
        return o, None
    return o, (_join_groups(mean), cov)


def _prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    obs_var: Tensor,
    process_var: Tensor,
    covariance: str,
    evidence: float | Tensor,
    prior_var: float | Tensor,
    scale: float | None,
    initial_state: State | None,
    obs_var_floor: float,
) -> FilterInputs:
    """Check shapes and bring everything head first, in float32 or float64."""
    if q.dim() != 4 or k.shape != q.shape:
        raise ValueError(f"q, k: expected one shape [B,T,H,D], got {tuple(q.shape)} and {tuple(k.shape)}")
    B, T, H, D = q.shape
    if v.dim() != 4 or v.shape[:3] != (B, T, H):
        raise ValueError(f"v: expected [B={B},T={T},H={H},V], got {tuple(v.shape)}")
    V = v.shape[-1]
    for name, x in (("g", g), ("process_var", process_var)):
        if x.shape != (B, T, H):
            raise ValueError(f"{name}: expected [B={B},T={T},H={H}], got {tuple(x.shape)}")
    if obs_var.dim() == 3:
        obs_var = obs_var[..., None]
    if obs_var.dim() != 4 or obs_var.shape[:3] != (B, T, H):
        raise ValueError(f"obs_var: expected [B={B},T={T},H={H}] or [B,T,H,G], got {tuple(obs_var.shape)}")
    G = obs_var.shape[-1]
    if V % G:
        raise ValueError(f"obs_var: {G} noise groups do not divide V={V} value columns")

    dtype = torch.float64 if any(x.dtype == torch.float64 for x in (q, k, v, g)) else torch.float32
    head_first = (0, 2, 1, 3)
    obs = obs_var.to(dtype).permute(0, 2, 3, 1)
    prior = _per_head(prior_var, "prior_var", H, q, dtype)
    mean, cov = initial_state if initial_state is not None else (None, None)
    if mean is None:
        mean_g = q.new_zeros(B, H, G, D, V // G, dtype=dtype)
    elif mean.shape != (B, H, D, V):
        raise ValueError(f"initial_state: expected a mean [B={B},H={H},D={D},V={V}], got {tuple(mean.shape)}")
    else:
        mean_g = _split_groups(mean.to(dtype), G)
    if covariance == "reset":
        cov = None
    elif cov is None:
        cov = prior[:, None, None, None] * torch.eye(D, dtype=dtype, device=q.device).expand(B, H, G, D, D)
    elif cov.shape != (B, H, G, D, D):
        raise ValueError(
            f"initial_state: expected a covariance [B={B},H={H},G={G},D={D},D], got {tuple(cov.shape)}"
        )
    else:
        cov = 0.5 * (cov + cov.mT).to(dtype)  # every backend then has the same, symmetric gradient
    return FilterInputs(
        q=q.to(dtype).permute(head_first) * (D**-0.5 if scale is None else scale),
        k=k.to(dtype).permute(head_first),
        v=v.to(dtype).reshape(B, T, H, G, V // G).permute(0, 2, 3, 1, 4),
        g=g.to(dtype).transpose(1, 2),
        obs_var=obs,
        obs_var_cov=obs.clamp(min=obs_var_floor) if obs_var_floor > 0 else obs,
        process_var=process_var.to(dtype).transpose(1, 2),
        evidence=_per_head(evidence, "evidence", H, q, dtype),
        prior_var=prior,
        mean=mean_g,
        cov=cov,
    )


def _per_head(x: float | Tensor, name: str, H: int, like: Tensor, dtype: torch.dtype) -> Tensor:
    """A float or a tensor of `[H]` as a tensor of `[H]`."""
    x = torch.as_tensor(x, dtype=dtype, device=like.device)
    if x.dim() > 1 or (x.dim() == 1 and x.shape[0] != H):
        raise ValueError(f"{name}: expected a number or a tensor [H={H}], got {tuple(x.shape)}")
    return x.expand(H)


def _split_groups(mean: Tensor, G: int) -> Tensor:
    """`[B,H,D,V] -> [B,H,G,D,V/G]`."""
    return mean.unflatten(-1, (G, -1)).movedim(-2, 2)


def _join_groups(mean: Tensor) -> Tensor:
    """`[B,H,G,D,Vg] -> [B,H,D,V]`."""
    return mean.movedim(2, -2).flatten(-2)
