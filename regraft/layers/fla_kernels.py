"""flash-linear-attention's kernels for the gated delta rule, where they can be imported and compute it right.

A covariance held at the identity makes the filter the gated delta rule, which fla has Triton kernels for.
Nothing here runs, or imports fla, before a layer on a GPU could use them.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor

from regraft.ops import kalman_delta_rule

KERNELS = ("auto", "fla", "regraft")
ENVIRONMENT = "REGRAFT_KERNELS"
_OLDEST = (0, 6)  # takes more value heads than key heads
# fla's own layer also takes the recurrent kernel for few tokens, which has no backward.
_RECURRENT_UP_TO = 64
# Relative RMS difference to our op on the same bfloat16 inputs; wrong kernels miss by far more.
_OUTPUT_TOLERANCE, _GRADIENT_TOLERANCE = 0.02, 0.05


class KernelsUnusable(RuntimeError):
    """fla's kernels were asked for by name and are not there or not right."""


def choose(name: str | None) -> str:
    """The kernels asked for: by name, else by the environment variable `REGRAFT_KERNELS`, else `auto`.

    Raises:
        ValueError: neither `auto`, `fla` nor `regraft`.
    """
    chosen = name or os.environ.get(ENVIRONMENT) or "auto"
    if chosen not in KERNELS:
        raise ValueError(f"kernels: {chosen!r} is not one of {KERNELS}")
    return chosen


@torch.compiler.disable
def usable(kernels: str | None, q: Tensor, v: Tensor, *, training: bool) -> bool:
    """Whether fla's kernels shall compute the rule for queries `q [B,T,H,K]` and values `v [B,T,HV,V]`.

    `auto` takes them on a GPU in 16-bit formats only: in float32 they multiply in TF32, and who asks for
    float32 wants more than 10 bits. The first time a shape is seen, they have to agree with our own op on a
    small problem, in training with its gradients too; a warning says once why they were not taken.

    Raises:
        ValueError: an unknown name.
        KernelsUnusable: `fla` was asked for by name and is not there or not right.
    """
    chosen = choose(kernels)
    if chosen == "regraft":
        return False
    if chosen == "auto" and not (_on_gpu(v) and v.element_size() == 2 and installed()):
        return False
    shape = (q.shape[2], v.shape[2], q.shape[3], v.shape[3])
    problem = problem_with(v.device, v.dtype, shape, training)
    if not problem:
        return True
    if chosen == "fla":
        raise KernelsUnusable(f"kernels: 'fla' was asked for, but {problem}")
    _warn(f"Delta-rule layers run in regraft's own op, not in flash-linear-attention's kernels: {problem}")
    return False


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`S = exp(g)S; S += k ⊗ beta (v - Sᵀk); o = Sᵀ q K^-1/2` by fla's kernels; see `usable`.

    Args:
        q, k: `[B,T,H,K]`, normalised; taken in the dtype of v.
        v: `[B,T,HV,V]`, HV a multiple of H.
        g, beta: log-decay and write strength `[B,T,HV]`, float32.
        initial_state: `[B,HV,K,V]`, float32.
        output_final_state: also return the state after the last token.
        cu_seqlens: boundaries `[N+1]` of the documents packed into the one row.
    """
    rules = importlib.import_module("fla.ops.gated_delta_rule")
    few = q.shape[1] <= _RECURRENT_UP_TO and not needs_gradient(q, k, v, g, beta)
    rule = rules.fused_recurrent_gated_delta_rule if few else rules.chunk_gated_delta_rule
    o, state = rule(
        q=q.to(v.dtype),
        k=k.to(v.dtype),
        v=v,
        g=g,
        beta=beta,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
    )
    return o.to(v.dtype), state


def needs_gradient(*inputs: Tensor) -> bool:
    """Whether a backward pass may follow."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in inputs)


@cache
def installed() -> bool:
    """Whether there is an fla to import; says nothing about whether it works."""
    return importlib.util.find_spec("fla") is not None


@cache
def problem_with(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int, int], training: bool
) -> str:
    """Why fla's kernels cannot serve heads of this shape (H, HV, K, V), and the fix; empty if they can."""
    return (
        _import_problem() or (training and _known_problem(device)) or _probe(device, dtype, shape, training)
    )


def _on_gpu(x: Tensor) -> bool:
    return x.is_cuda


@cache
def _warn(message: str) -> None:
    """Once for each message."""
    warnings.warn(message, RuntimeWarning, stacklevel=2)


@cache
def _import_problem() -> str:
    fix = "Fix: pip install 'flash-linear-attention>=0.6.0' and the triton that belongs to your torch."
    try:
        fla = importlib.import_module("fla")
        importlib.import_module("fla.ops.gated_delta_rule")
    except Exception as error:  # a package that does not fit its neighbours fails in any way
        return f"it cannot be imported ({type(error).__name__}: {error}). {fix}"
    version = str(getattr(fla, "__version__", "0"))
    if _numbers(version) < _OLDEST:
        return f"version {version} is too old. {fix}"
    return ""


def _known_problem(device: torch.device) -> str:
    """Pairs whose gradients are wrong (fla issue 640): Triton 3.4 to 3.7.0 on Hopper, without tilelang."""
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
    if not hopper or importlib.util.find_spec("tilelang") is not None:
        return ""
    version = str(importlib.import_module("triton").__version__)
    if not (3, 4) <= _numbers(version) < (3, 7, 1):
        return ""
    return (
        f"Triton {version} gives its backward wrong gradients on Hopper GPUs (its issue 640). "
        "Fix: pip install 'triton>=3.7.1', or tilelang."
    )


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.split("+")[0].split(".")
    return tuple(int(p) for p in parts if p.isdigit())


def _probe(device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int, int], training: bool) -> str:
    try:
        found = differences(device, dtype, shape, training)
    except Exception as error:  # compilation and launch fail in any way
        return f"its kernels fail ({type(error).__name__}: {error}). Fix: another version of fla or triton."
    for name, difference in found.items():
        limit = _GRADIENT_TOLERANCE if name.startswith("d_") else _OUTPUT_TOLERANCE
        if not difference <= limit:  # a NaN is no agreement
            return (
                f"its {name} differs from ours by {difference:.2g} (relative RMS, at most {limit}) for "
                f"{shape[1]} heads of {shape[2]}x{shape[3]}. Fix: another version of fla or triton."
            )
    return ""


def differences(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int, int], training: bool
) -> dict[str, float]:
    """Relative RMS difference of fla's kernels to our op on a small problem with heads (H, HV, K, V).

    More than a chunk of tokens at once, then two from the state they left; in training also the gradients
    (`d_q`, ...).
    """
    with torch.autocast(device.type, enabled=False), torch.set_grad_enabled(training):
        inputs = _problem(device, dtype, shape)
        theirs, ours = _run(gated_delta_rule, inputs, training), _run(_own, inputs, training)
    return {name: _relative(theirs[name], expected) for name, expected in ours.items()}


def _problem(device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int, int]) -> dict[str, Tensor]:
    H, HV, K, V = shape
    T, rng = _RECURRENT_UP_TO + 6, torch.Generator().manual_seed(0)  # leaves the global one alone

    def normal(*size: int) -> Tensor:
        return torch.randn(1, T, *size, generator=rng)

    inputs = {
        "q": torch.nn.functional.normalize(normal(H, K), dim=-1).to(dtype),
        "k": torch.nn.functional.normalize(normal(H, K), dim=-1).to(dtype),
        "v": normal(HV, V).to(dtype),
        "g": -0.1 * normal(HV).abs(),
        "beta": normal(HV).sigmoid(),
    }
    return {name: x.to(device) for name, x in inputs.items()}


def _run(rule: Any, inputs: dict[str, Tensor], training: bool) -> dict[str, Tensor]:
    """Outputs of prefill and decoding, the state between, and in training the gradients of the prefill."""
    x = {name: t.clone().requires_grad_(training) for name, t in inputs.items()}
    o, state = rule(**x, output_final_state=True)
    results = {"output": o.detach(), "state": state.detach()}
    if training:
        loss = (o.float() * inputs["v"].float().flip(1)).sum() + 0.1 * state.square().sum()
        for name, gradient in zip(x, torch.autograd.grad(loss, list(x.values())), strict=True):
            results[f"d_{name}"] = gradient
    with torch.no_grad():
        last = {name: t[:, -2:].detach() for name, t in x.items()}
        results["decoded"], _ = rule(**last, initial_state=state.detach(), output_final_state=True)
    return results


def _own(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **settings: Any) -> tuple[Tensor, Tensor]:
    q, k = q.float(), k.float()
    norm = k.square().sum(-1).repeat_interleave(v.shape[2] // k.shape[2], dim=2)
    start = settings.pop("initial_state", None)
    o, state = kalman_delta_rule(
        q,
        k,
        v,
        g,
        1 / beta - norm,
        torch.zeros_like(g),
        covariance="reset",
        initial_state=None if start is None else (start, None),
        backend="chunk",
        check=False,
        **settings,
    )
    assert state is not None
    return o, state[0]


def _relative(x: Tensor, reference: Tensor) -> float:
    reference = reference.float()
    return float((x.float() - reference).norm() / reference.norm().clamp(min=1e-30))
