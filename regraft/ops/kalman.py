"""`kalman_delta_rule`: the public function. Checks are in `inputs.py`, the mathematics in the backends."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

from regraft.ops.chunk import chunk_filter
from regraft.ops.inputs import Covariance, FilterInputs, State, check_values, join_groups, prepare
from regraft.ops.precision import full_float32
from regraft.ops.reference import reference_filter

Backend = Literal["auto", "reference", "chunk", "triton"]
BACKENDS: tuple[str, ...] = ("auto", "reference", "chunk", "triton")
Precision = Literal["tf32x3", "tf32", "ieee"]
PRECISIONS: tuple[str, ...] = ("tf32x3", "tf32", "ieee")

# Up to this many tokens the plain recurrence is faster than setting up a chunk (decoding is one token).
_SEQUENTIAL_UP_TO = 4


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
    rotation: Tensor | None = None,
    scale: float | None = None,
    initial_state: State | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: Backend = "auto",
    chunk_size: int = 64,
    obs_var_floor: float = 0.0,
    precision: Precision = "tf32x3",
    check: bool = True,
) -> tuple[Tensor, State | None]:
    """Kalman filter over an associative memory, read at every step (paper 000, Proposition 1 and Table 1).

    One head and noise group keep a mean `M [D,V]` and, in the dense family, a covariance `P [D,D]`; with
    `A = R(rotation) diag(exp(g))`::

        Pbar = A P Aᵀ + diag(process_var);  u = Pbar k;  s = k·u;  kappa = u / (obs_var + s)
        M = A M + kappa (v - (A M)ᵀ k)ᵀ
        P = Pbar - evidence / (obs_var + evidence s) · u uᵀ
        o = scale · Mᵀ q                                          (the updated state is read)

    `evidence = 1` is the exact filter, the Bayesian Layer. With `evidence = 0`, `prior_var = 1` and
    `process_var = 1 - exp(2 g)` the covariance stays the identity: Gated DeltaNet.
    A step with `k = 0`, `g = 0`, `process_var = 0` (and no rotation) changes neither mean nor covariance:
    padding.

    Args:
        q, k: queries and keys `[B,T,Hk,D]`, Hk a divisor of H; keys L2-normalised (norm at most 1.01) in
            every family but `none`.
        v: values `[B,T,H,V]`.
        g: log-decay `[B,T,H]`, or `[B,T,H,D]` per channel; at most 0.
        obs_var: observation noise `[B,T,H]`, or `[B,T,H,G]` for G groups of `V/G` value columns; > 0
            (`none`: >= 0).
        process_var: process noise `[B,T,H]`, or `[B,T,H,D]` per channel; >= 0. Ignored by `reset`, `none`.
        covariance: what is tracked of the covariance:
            `dense` all of it; `diagonal` and `isotropic` its diagonal or its mean variance (KDN, paper 002);
            `reset` nothing, Pbar is `prior_var · I` at every step (the delta-rule family, paper 000 §3.1);
            `none` nothing, and nothing is predicted: `M = A M + prior/(prior + obs_var) k vᵀ` (the additive
            family, paper 000 §3.2).
        evidence: how far a write lowers the covariance, >= 0; a number or `[H]`.
        prior_var: variance of the memory before the first write, > 0; a number or `[H]`.
        rotation: angles `[B,T,H,D/2]` by which interleaved pairs of channels turn, after the decay (paper
            000, Appendix D). Not for `diagonal`.
        scale: factor of the readout, `D ** -0.5` by default.
        initial_state: `(mean [B,H,D,V], covariance)`, the covariance `[B,H,G,D,D]` (dense), `[B,H,G,D]`
            (diagonal), `[B,H,G,1]` (isotropic) or None. For packed documents, one state each instead of B.
        output_final_state: also return the state after the last token.
        cu_seqlens: boundaries `[N+1]` of the documents packed into the one row (B = 1), from 0 to T.
        backend: `reference` walks the tokens, `chunk` is the exact chunk-parallel form, `triton` the same as
            kernels for a GPU; `auto` chooses.
        chunk_size: tokens that the chunk form takes at once (at most 16 where decay is per channel; `triton`
            has 16, 32 and 64).
        obs_var_floor: lower bound of the observation noise where the covariance is updated and factorised.
            The gain of the mean keeps the raw `obs_var`, so a floor leaves `evidence = 0` exact.
        precision: of the products of float32 matrices in the kernels: `tf32x3` is three TF32 products, about
            as exact as float32; `tf32` keeps 10 bits; `ieee` is float32 without tensor cores. Gradients of
            bfloat16 keys take `tf32` where it is `tf32x3`.
        check: look for values out of range; costs a wait for the device on an accelerator.

    Returns:
        `o [B,T,H,V]` in the dtype of `v`, and the final state, or None. It is computed and the state kept in
        float32 (float64 if an input is), without autocast and, but for `precision`, without TF32. The kernels
        multiply queries, keys and values of 16 bits as they are.

    Raises:
        ValueError: an argument has a wrong shape, values out of its range, or names an unknown family or
            backend. The message starts with its name.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend: {backend!r} is not one of {BACKENDS}")
    if chunk_size < 1:
        raise ValueError(f"chunk_size: must be at least 1, got {chunk_size}")
    if precision not in PRECISIONS:
        raise ValueError(f"precision: {precision!r} is not one of {PRECISIONS}")
    few = q.shape[1] <= _SEQUENTIAL_UP_TO and cu_seqlens is None
    kernels = backend == "triton" or (backend == "auto" and not few and _has_kernels(q))
    if kernels:
        from regraft.ops.triton.filter import triton_filter, unsupported

        reason = unsupported(q, v, g, obs_var, process_var, covariance, rotation, chunk_size)
        if reason is not None and backend == "triton":
            raise ValueError(reason)
        kernels = reason is None
    x = prepare(
        q,
        k,
        v,
        g,
        obs_var,
        process_var,
        covariance,
        evidence,
        prior_var,
        rotation,
        scale,
        initial_state,
        cu_seqlens,
        obs_var_floor,
        spread=not kernels,
    )
    if check:
        check_values(x)
    # A rotation does not commute with anything that tells the channels of a pair apart.
    anisotropic = rotation is not None and (g.dim() == 4 or process_var.dim() == 4)
    if anisotropic and backend == "chunk":
        raise ValueError("rotation: with per-channel decay or process noise only `reference` has it")
    sequential = backend == "reference" or (backend == "auto" and (few or anisotropic))
    # device_of: kernels start on the current device, which need not be the one that holds the tensors
    with torch.autocast(q.device.type, enabled=False), full_float32(), torch.cuda.device_of(q):
        if kernels:
            o, mean, cov = triton_filter(x, scale, chunk_size, precision)
        elif not sequential:
            o, mean, cov = chunk_filter(x, chunk_size)
        elif backend == "auto" and _has_kernels(q) and not _differentiable(x):
            o, mean, cov = _decode(x)
        else:
            o, mean, cov = reference_filter(x)
    o = o.flatten(3).to(v.dtype)
    return o, (join_groups(mean), cov) if output_final_state else None


def _decode(x: FilterInputs) -> tuple[Tensor, Tensor, Tensor | None]:
    """A few tokens by the kernels for it, if they have what these need."""
    from regraft.ops.triton.step import decode_step, unsupported

    return decode_step(x) if unsupported(x) is None else reference_filter(x)


def _differentiable(x: FilterInputs) -> bool:
    """Whether a gradient may be asked for."""
    tensors = (t for t in vars(x).values() if isinstance(t, Tensor))
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def _has_kernels(x: Tensor) -> bool:
    """Whether Triton is there for the device of x."""
    return x.is_cuda and torch.version.hip is None and find_spec("triton") is not None
