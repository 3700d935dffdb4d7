"""What a backend gets: the op's arguments, checked, in one dtype and one layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

Covariance = Literal["dense", "diagonal", "isotropic", "reset", "none"]
State = tuple[Tensor, "Tensor | None"]

COVARIANCES: tuple[str, ...] = ("dense", "diagonal", "isotropic", "reset", "none")
# Keys normalised in bfloat16 miss norm 1 by up to 0.4 %; keys nobody normalised have a norm near sqrt(D).
MAX_KEY_NORM = 1.01


@dataclass(frozen=True)
class FilterInputs:
    """Arguments of a backend. B rows, T tokens, H heads, G noise groups, D key width, Vg = V / G columns.

    Everything that belongs to a token is `[B,T,H,G,X]`, with 1 in place of G where groups share it. N is the
    number of documents: B, or what `boundaries` says of a single packed row.
    """

    covariance: str
    q: Tensor  # [B,T,H,1,D], already scaled
    k: Tensor  # [B,T,H,1,D]
    v: Tensor  # [B,T,H,G,Vg]
    g: Tensor  # [B,T,H,1,1] or [B,T,H,1,D], log-decay
    obs_var: Tensor  # [B,T,H,G,1], observation noise in the gain
    obs_var_cov: Tensor  # [B,T,H,G,1], the same, floored, in the covariance recursion
    process_var: Tensor  # [B,T,H,1,1] or [B,T,H,1,D]
    rotation: Tensor | None  # [B,T,H,1,D/2], angles
    evidence: Tensor  # [H,1,1,1]
    prior_var: Tensor  # [H,1,1,1]
    mean: Tensor  # [N,H,G,D,Vg]
    cov: Tensor | None  # [N,H,G] and [D,D] dense, [D] diagonal, [1] isotropic; else None
    boundaries: list[int] | None  # [N+1], documents of the one packed row

    def map_tokens(self, change: Callable[[str, Tensor], Tensor]) -> FilterInputs:
        """With everything that belongs to a token replaced by `change(name, tensor)`."""
        names = ("q", "k", "v", "g", "obs_var", "obs_var_cov", "process_var", "rotation")
        tokens: dict[str, Any] = {n: change(n, t) for n in names if (t := getattr(self, n)) is not None}
        return replace(self, **tokens)


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    obs_var: Tensor,
    process_var: Tensor,
    covariance: str,
    evidence: float | Tensor,
    prior_var: float | Tensor,
    rotation: Tensor | None,
    scale: float | None,
    initial_state: State | None,
    cu_seqlens: Tensor | None,
    obs_var_floor: float,
    spread: bool = True,
) -> FilterInputs:
    """Check shapes and bring everything into the layout of `FilterInputs`, in float32 or float64.

    With `spread` off, q, k and v keep their dtype, q and k their `Hk` heads, and q is not scaled.

    Raises:
        ValueError: a shape does not fit; the message starts with the argument's name.
    """
    if covariance not in COVARIANCES:
        raise ValueError(f"covariance: {covariance!r} is not one of {COVARIANCES}")
    if q.dim() != 4 or k.shape != q.shape or 0 in q.shape:
        raise ValueError(f"q, k: expected one shape [B,T,H,D], got {tuple(q.shape)} and {tuple(k.shape)}")
    B, T, key_heads, D = q.shape
    if v.dim() != 4 or v.shape[:2] != (B, T) or v.shape[2] % key_heads or 0 in v.shape:
        raise ValueError(f"v: expected [B={B},T={T},H,V], H a multiple of {key_heads}, got {tuple(v.shape)}")
    H, V = v.shape[2:]
    for name, x in (("g", g), ("process_var", process_var)):
        if x.shape not in ((B, T, H), (B, T, H, D)):
            raise ValueError(f"{name}: expected [B={B},T={T},H={H}] or [B,T,H,D={D}], got {tuple(x.shape)}")
    if obs_var.dim() not in (3, 4) or obs_var.shape[:3] != (B, T, H):
        raise ValueError(f"obs_var: expected [B={B},T={T},H={H}] or [B,T,H,G], got {tuple(obs_var.shape)}")
    G = obs_var.shape[3] if obs_var.dim() == 4 else 1
    if G == 0 or V % G:
        raise ValueError(f"obs_var: {G} noise groups do not divide V={V} value columns")
    if rotation is not None and (D % 2 or rotation.shape != (B, T, H, D // 2)):
        raise ValueError(f"rotation: expected [B={B},T={T},H={H},D/2={D / 2:g}], got {tuple(rotation.shape)}")
    if rotation is not None and covariance == "diagonal":
        raise ValueError("rotation: a diagonal covariance does not stay diagonal when it is turned")
    if not 0 <= obs_var_floor < float("inf"):
        raise ValueError(f"obs_var_floor: must be a finite number >= 0, got {obs_var_floor}")
    boundaries = None if cu_seqlens is None else _boundaries(cu_seqlens, B, T)

    dtype = torch.float64 if any(x.dtype == torch.float64 for x in (q, k, v, g)) else torch.float32
    prior = _per_head(prior_var, "prior_var", H, q, dtype)
    N = B if boundaries is None else len(boundaries) - 1
    mean, cov = _start(initial_state, covariance, prior, (N, H, G, D, V))
    obs = obs_var.to(dtype).reshape(B, T, H, G, 1)
    if spread:
        repeats, scale = H // key_heads, D**-0.5 if scale is None else scale
        q = q.to(dtype).repeat_interleave(repeats, 2) * scale
        k, v = k.to(dtype).repeat_interleave(repeats, 2), v.to(dtype)
    return FilterInputs(
        covariance=covariance,
        q=q.unsqueeze(3),
        k=k.unsqueeze(3),
        v=v.reshape(B, T, H, G, V // G),
        g=g.to(dtype).reshape(B, T, H, 1, -1),
        obs_var=obs,
        obs_var_cov=obs.clamp(min=obs_var_floor) if obs_var_floor > 0 else obs,
        process_var=process_var.to(dtype).reshape(B, T, H, 1, -1),
        rotation=None if rotation is None else rotation.to(dtype).unsqueeze(3),
        evidence=_per_head(evidence, "evidence", H, q, dtype),
        prior_var=prior,
        mean=mean,
        cov=cov,
        boundaries=boundaries,
    )


def check_values(x: FilterInputs) -> None:
    """Refuse numbers that no filter has. Reads every tensor once, so it waits for an accelerator.

    Raises:
        ValueError: NaN, infinite or out of range; the message starts with the argument's name.
    """
    for name in ("q", "k", "v", "g", "obs_var", "process_var", "rotation", "evidence", "prior_var"):
        t = getattr(x, name)
        if t is not None and not bool(t.isfinite().all()):
            raise ValueError(f"{name}: holds NaN or infinite values")
    if not all(bool(t.isfinite().all()) for t in (x.mean, x.cov) if t is not None):
        raise ValueError("initial_state: holds NaN or infinite values")
    additive = x.covariance == "none"
    too_small = x.obs_var < 0 if additive else x.obs_var <= 0
    for name, wrong, rule in (
        ("g", x.g > 0, "a log-decay is at most 0"),
        ("obs_var", too_small, f"a variance is {'at least' if additive else 'above'} 0"),
        ("process_var", x.process_var < 0, "a variance is at least 0"),
        ("prior_var", x.prior_var <= 0, "a variance is above 0"),
        ("evidence", x.evidence < 0, "must be at least 0"),
    ):
        if bool(wrong.any()):
            raise ValueError(f"{name}: {rule}, got {getattr(x, name)[wrong][0]:g}")
    norm = float(x.k.detach().norm(dim=-1).max())
    if not additive and norm > MAX_KEY_NORM:
        raise ValueError(f"k: expected L2-normalised keys, got one of norm {norm:.4g} > {MAX_KEY_NORM}")


def split_groups(mean: Tensor, G: int) -> Tensor:
    """`[N,H,D,V] -> [N,H,G,D,V/G]`."""
    return mean.unflatten(-1, (G, -1)).movedim(-2, 2)


def join_groups(mean: Tensor) -> Tensor:
    """`[N,H,G,D,Vg] -> [N,H,D,V]`."""
    return mean.movedim(2, -2).flatten(-2)


def _start(
    state: State | None, covariance: str, prior: Tensor, shape: tuple[int, int, int, int, int]
) -> tuple[Tensor, Tensor | None]:
    """Mean and covariance before the first token, the prior's where none is given."""
    N, H, G, D, V = shape
    mean, cov = state if state is not None else (None, None)
    if mean is None:
        mean = prior.new_zeros(N, H, D, V)
    elif mean.shape != (N, H, D, V):
        raise ValueError(f"initial_state: expected a mean [{N},H={H},D={D},V={V}], got {tuple(mean.shape)}")
    mean = split_groups(mean.to(prior.dtype), G)
    tails = {"dense": (D, D), "diagonal": (D,), "isotropic": (1,)}
    if covariance not in tails:
        if cov is not None:
            raise ValueError(f"initial_state: the family {covariance!r} has no covariance, pass None")
        return mean, None
    expected = (N, H, G, *tails[covariance])
    if cov is not None and cov.shape != expected:
        raise ValueError(f"initial_state: expected a covariance {expected}, got {tuple(cov.shape)}")
    if covariance != "dense":
        return mean, prior[..., 0].expand(expected) if cov is None else cov.to(prior.dtype)
    if cov is None:
        return mean, prior * torch.eye(D, dtype=prior.dtype, device=prior.device).expand(expected)
    return mean, 0.5 * (cov + cov.mT).to(prior.dtype)  # every backend then has the same, symmetric gradient


def _boundaries(cu_seqlens: Tensor, B: int, T: int) -> list[int]:
    """Document boundaries of one packed row as integers."""
    ends = cu_seqlens.tolist()
    if B != 1:
        raise ValueError(f"cu_seqlens: packed documents stand in one row, got {B} rows")
    if cu_seqlens.dim() != 1 or ends[0] != 0 or ends[-1] != T or ends != sorted(set(ends)):
        raise ValueError(f"cu_seqlens: expected increasing boundaries from 0 to T={T}, got {ends}")
    return ends


def _per_head(x: float | Tensor, name: str, H: int, like: Tensor, dtype: torch.dtype) -> Tensor:
    """A number or a tensor `[H]` as a tensor `[H,1,1,1]`."""
    # A number is filled in on the spot: a copy from the CPU would wait, and no CUDA graph could record it.
    x = x.to(like.device, dtype) if isinstance(x, Tensor) else like.new_full((), x, dtype=dtype)
    if x.dim() > 1 or (x.dim() == 1 and x.shape[0] != H):
        raise ValueError(f"{name}: expected a number or a tensor [H={H}], got {tuple(x.shape)}")
    return x.expand(H)[:, None, None, None]
