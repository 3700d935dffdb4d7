"""Time of the op on a GPU, as ratios to fla's kernels in the same run: `python scripts/bench/gpu_ops.py`.

Inputs bfloat16, V = D. `fla` is `chunk_gated_delta_rule` on the same shapes, `mesa` is `chunk_mesa_net`. A
time is the median of CUDA events over repeated calls; `peak` what a forward and backward pass needs above its
inputs, `held` what lies there between the two. `again` is `dense` under activation checkpointing: the
covariances at chunk boundaries are not kept but computed again. After `dense` comes a line with what bounds
it, see `floors`. Prints a table and writes JSON to --out.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch.utils.checkpoint import checkpoint

from regraft.ops import kalman_delta_rule

# B, T, H, D
SHAPES = {
    "main": [(8, 4096, 4, 256), (32, 4096, 4, 256), (8, 4096, 8, 128), (8, 4096, 16, 64)],
    "length": [(64, 1024, 4, 256), (16, 4096, 4, 256), (4, 16384, 4, 256), (1, 65536, 4, 256)],
    "heads": [(1, 4096, 4, 256), (2, 4096, 4, 256), (4, 4096, 4, 256), (16, 4096, 4, 256)],
}
PEAK = 989e12  # FLOP/s in bfloat16 of an H200, dense; half of that in TF32
BANDWIDTH = 4.3e12  # bytes/s that a copy on an H200 moves, read and written


def make(B: int, T: int, H: int, D: int) -> dict[str, torch.Tensor]:
    rng = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng, device="cuda")

    g = -0.05 * torch.rand(B, T, H, generator=rng, device="cuda")
    return {
        "q": F.normalize(normal(B, T, H, D), dim=-1).bfloat16(),
        "k": F.normalize(normal(B, T, H, D) + 0.7 * normal(H, D), dim=-1).bfloat16(),
        "v": normal(B, T, H, D).bfloat16(),
        "g": g,
        "obs_var": normal(B, T, H).exp() + 0.05,
        "process_var": 1 - (2 * g).exp(),
    }


def time_of(call: Callable[[], Any], budget_ms: float = 60) -> float:
    """Milliseconds, the median."""
    return float(triton.testing.do_bench(call, warmup=20, rep=budget_ms, return_mode="median"))


def measure(
    forward: Callable[[dict[str, torch.Tensor]], torch.Tensor], x: dict[str, torch.Tensor]
) -> dict[str, float]:
    """Forward without gradient, forward and backward, and what the latter needs at its peak."""
    with torch.no_grad():
        forward(x)
        alone = time_of(lambda: forward(x))
    leaves = {name: t.detach().requires_grad_() for name, t in x.items()}
    out = forward(leaves)
    do = torch.randn_like(out)
    del out

    held = -torch.cuda.memory_allocated()
    out = forward(leaves)
    held += torch.cuda.memory_allocated()
    del out

    def both() -> None:
        forward(leaves).backward(do)
        for t in leaves.values():
            t.grad = None

    both()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    both()
    torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    return {"forward": alone, "both": time_of(both), "peak_mib": peak, "held_mib": held / 2**20}


def floors(B: int, T: int, H: int, D: int, C: int = 64) -> dict[str, float]:
    """Milliseconds that arithmetic and memory alone take for the dense filter, forward and both, V = D.

    Products are weighted by what they cost in bfloat16 products: three for keys in that format, two for one
    in TF32, six for three. Bytes are inputs, outputs and what is kept for the gradient, each moved once:
    write vectors, R and U of every token, covariance and memory at every chunk's entry.
    """
    chunks, wide, small = B * H * T / C, 2 * C * D * D, 2 * C * C * D
    forward = 3 * (wide + small) + 6 * (wide + 2 * small) + 6 * 4 * C**3
    backward = 2 * (4 * wide + 11 * small)
    memory = 3 * wide + 5 * small
    vectors, entries = B * H * T * D, chunks * D * D
    moved = vectors * (4 * 2 + 2)
    kept = vectors * (2 + 2 * 4) + 2 * entries * 4
    gradient = vectors * 2 * (4 + 4)
    return {
        "gflop": 1e-9 * chunks * (forward + backward + 3 * memory),
        "gbyte": 1e-9 * (moved + 2 * kept + gradient),
        "forward": 1e3 * max(chunks * (forward + memory) / PEAK, moved / BANDWIDTH),
        "both_by_arithmetic": 1e3 * chunks * (forward + backward + 3 * memory) / PEAK,
        "both_by_memory": 1e3 * (moved + 2 * kept + gradient) / BANDWIDTH,
    }


def ours(**settings: Any) -> Callable[[dict[str, torch.Tensor]], torch.Tensor]:
    arguments: dict[str, Any] = {"check": False, **settings}
    return lambda x: kalman_delta_rule(**x, **arguments)[0]  # type: ignore[arg-type]


def again(x: dict[str, torch.Tensor]) -> torch.Tensor:
    """The dense filter, what its gradient needs computed again."""
    if not x["q"].requires_grad:
        return ours(backend="triton")(x)
    out: torch.Tensor = checkpoint(
        lambda *tensors: ours(backend="triton")(dict(zip(x, tensors, strict=True))),
        *x.values(), use_reentrant=False,
    )  # fmt: skip
    return out


def fla_gdn(x: dict[str, torch.Tensor]) -> torch.Tensor:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    beta = torch.sigmoid(-x["obs_var"].log())
    return chunk_gated_delta_rule(x["q"], x["k"], x["v"], x["g"], beta.to(x["v"].dtype))[0]


def fla_mesa(x: dict[str, torch.Tensor]) -> torch.Tensor:
    from fla.ops.mesa_net import chunk_mesa_net

    H, D = x["q"].shape[2:]
    beta = torch.sigmoid(-x["obs_var"].log())
    lamb = torch.full((H, D), 0.5, device="cuda", dtype=torch.float32)
    return chunk_mesa_net(x["q"], x["k"], x["v"], x["g"], beta.to(x["v"].dtype), lamb, max_CG_iteration=30)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", default="main,length,heads")
    parser.add_argument("--calls", default="fla,mesa,dense,again,tf32,isotropic,diagonal,reset,chunk")
    parser.add_argument("--shapes", type=int, default=99, help="at most so many of each group")
    parser.add_argument("--out", type=Path, default=Path("gpu_ops.json"))
    options = parser.parse_args()
    calls: dict[str, Callable[[dict[str, torch.Tensor]], torch.Tensor]] = {
        "fla": fla_gdn,
        "mesa": fla_mesa,
        "dense": ours(backend="triton"),
        "again": again,
        "tf32": ours(backend="triton", precision="tf32"),
        "isotropic": ours(backend="triton", covariance="isotropic", evidence=16.0),
        "diagonal": ours(backend="triton", covariance="diagonal", evidence=16.0),
        "reset": ours(backend="triton", covariance="reset"),
        "chunk": ours(backend="chunk"),
    }
    rows = []
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__, flush=True)
    for group in options.groups.split(","):
        for B, T, H, D in SHAPES[group][: options.shapes]:
            x = make(B, T, H, D)
            base: dict[str, float] = {}
            for name in options.calls.split(","):
                if (name == "mesa" and D > 128) or (name == "chunk" and (group != "main" or B > 8)):
                    continue
                began = time.perf_counter()
                try:
                    found = measure(calls[name], x)
                except Exception as error:
                    print(
                        f"{name} B{B} T{T} H{H} D{D}: {type(error).__name__}: {str(error)[:300]}", flush=True
                    )
                    torch.cuda.empty_cache()
                    continue
                base = base or found
                row = {"group": group, "B": B, "T": T, "H": H, "D": D, "call": name, **found}
                rows.append(row)
                print(
                    f"B{B:3d} T{T:6d} H{H:3d} D{D:4d} {name:10s} forward {found['forward']:8.2f} ms "
                    f"({found['forward'] / base['forward']:5.2f}x)  both {found['both']:8.2f} ms "
                    f"({found['both'] / base['both']:5.2f}x)  peak {found['peak_mib']:6.0f} "
                    f"held {found['held_mib']:6.0f} MiB   [{time.perf_counter() - began:.0f} s]",
                    flush=True,
                )
                if name == "dense":
                    bound = row["floors"] = floors(B, T, H, D)
                    over = found["both"] / max(bound["both_by_arithmetic"], bound["both_by_memory"])
                    print(
                        f"    {bound['gflop']:.0f} GFLOP in bfloat16: {bound['both_by_arithmetic']:.2f} ms, "
                        f"{bound['gbyte']:.2f} GB: {bound['both_by_memory']:.2f} ms; {over:.1f} times "
                        "the longer is taken",
                        flush=True,
                    )
            options.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
