"""Chunk path against sequential path on this machine's CPU: time as ratios of one run, and memory.

    python scripts/bench/cpu_ops.py [--tokens 2048] [--widths 64 256] [--repeats 3] [--families dense …]

Every case runs in a process of its own, so that its peak memory is its own. Times are CPU seconds of one
thread, and the two paths take turns: other work on the machine disturbs ratios of those least.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time

import torch
import torch.nn.functional as F

from regraft.ops import kalman_delta_rule
from regraft.ops.inputs import COVARIANCES


def case(family: str, D: int, T: int, repeats: int) -> dict[str, float]:
    """Seconds of both paths, forward and with gradient, and what the chunk path holds for the gradient."""
    torch.manual_seed(0)
    leaves = {
        "q": torch.randn(1, T, 1, D),
        "k": F.normalize(torch.randn(1, T, 1, D), dim=-1),
        "v": torch.randn(1, T, 1, D),
        "g": -0.1 * torch.rand(1, T, 1),
        "obs_var": 0.1 + torch.rand(1, T, 1),
        "process_var": 0.1 * torch.rand(1, T, 1),
    }
    leaves = {name: x.requires_grad_() for name, x in leaves.items()}
    saved: dict[int, int] = {}

    def note(x: torch.Tensor) -> torch.Tensor:
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    def seconds(backend: str, gradient: bool) -> float:
        start = time.process_time()
        with torch.set_grad_enabled(gradient):
            o, _ = kalman_delta_rule(**leaves, covariance=family, backend=backend)  # type: ignore[arg-type]
            if gradient:
                o.sum().backward()
        return time.process_time() - start

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    best = {"chunk": seconds("chunk", False), "chunk+grad": seconds("chunk", True)}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before  # KiB; before the sequential path runs
    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        kalman_delta_rule(**leaves, covariance=family, backend="chunk")  # type: ignore[arg-type]
    for _ in range(repeats):
        for backend in ("reference", "chunk"):
            for gradient in (False, True):
                name = backend + "+grad" * gradient
                if gradient and backend == "reference" and name in best:
                    continue  # holds every step: slow, and once is enough
                best[name] = min(best.get(name, float("inf")), seconds(backend, gradient))
    return {
        **best,
        "ratio": best["reference"] / best["chunk"],
        "ratio+grad": best["reference+grad"] / best["chunk+grad"],
        "peak_MB": peak / 1024,
        "saved_MB": sum(saved.values()) / 2**20,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--families", nargs="+", default=list(COVARIANCES), choices=COVARIANCES)
    parser.add_argument("--case", nargs=2, metavar=("FAMILY", "D"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.case:
        print(json.dumps(case(args.case[0], int(args.case[1]), args.tokens, args.repeats)))
        return
    print(f"T = {args.tokens}, B = H = 1, V = D, float32, one thread, torch {torch.__version__}\n")
    print(
        "| family | D | sequential s | chunk s | ratio | with gradient: sequential s | chunk s | ratio "
        "| chunk: peak MB | held for the gradient MB | a covariance a token would be MB |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for family in args.families:
        for D in args.widths:
            command = [sys.executable, __file__, "--case", family, str(D), "--tokens", str(args.tokens)]
            command += ["--repeats", str(args.repeats)]
            per_token = f"{args.tokens * D * D * 4 / 2**20:.0f}" if family == "dense" else ""
            r = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            print(
                f"| {family} | {D} | {r['reference']:.3f} | {r['chunk']:.3f} | {r['ratio']:.1f} "
                f"| {r['reference+grad']:.3f} | {r['chunk+grad']:.3f} | {r['ratio+grad']:.1f} "
                f"| {r['peak_MB']:.0f} | {r['saved_MB']:.0f} | {per_token} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
