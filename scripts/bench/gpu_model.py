"""The published 340M shape on a GPU: a training step, prefill and decoding, by how many layers are converted.

    python scripts/bench/gpu_model.py --out gpu_model.json

Random weights. `teacher` has no converted layer, `four` the paper's (5, 11, 17, 23), `all` all 24. A training
step is a forward and backward pass of cross-entropy and an AdamW update of every parameter, float32 weights,
products in bfloat16; prefill and decoding run in bfloat16. Delta-rule layers take flash-linear-attention's
kernels where they are installed. Times are medians; everything of a table runs in one process, in turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[2]))

from regraft.distill.engine import Engine
from regraft.layers import RegraftConfig, RegraftForCausalLM
from scripts.bench.evaluation import to_bfloat16
from scripts.bench.gpu_train import machine
from scripts.bench.shapes import LAYERS, SHAPE_340M

CONVERTED = {"teacher": (), "four": LAYERS, "all": tuple(range(24))}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("gpu_model.json"))
    parser.add_argument("--rows", type=int, nargs="+", default=[8], help="rows of a training step")
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 16384], help="of a prefill")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32], help="of decoding")
    parser.add_argument("--tokens", type=int, default=32, help="decoded in one measurement")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    table = (
        training(args.rows, args.seq_len, args.repeats)
        + prefill(args.lengths, args.repeats)
        + decoding(args.batches, args.tokens, args.repeats)
    )
    found = {"machine": machine(Engine()), "table": table}
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found["machine"]))
    for row in table:
        base = row["ms"]["teacher"]
        print(
            f"{row['what']:28s}"
            + "".join(f"  {n} {ms:9.2f} ms ({ms / base:.3f}x)" for n, ms in row["ms"].items())
        )


def model(name: str) -> RegraftForCausalLM:
    """Float32, on the GPU."""
    torch.manual_seed(0)
    layers = SHAPE_340M["num_hidden_layers"]
    kinds = ["bayesian" if i in CONVERTED[name] else "gated_deltanet" for i in range(layers)]
    with torch.device("cuda"):
        return RegraftForCausalLM(RegraftConfig(**SHAPE_340M, mixers=[{"kind": kind} for kind in kinds]))


def tokens(rows: int, length: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(0)
    return torch.randint(SHAPE_340M["vocab_size"], (rows, length), generator=random).cuda()


def in_turns(calls: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Milliseconds of each, the median, after two calls that do not count."""
    seen: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats + 2):
        for name, call in calls.items():
            torch.cuda.synchronize()
            begin = time.perf_counter()
            call()
            torch.cuda.synchronize()
            seen[name].append(1e3 * (time.perf_counter() - begin))
    return {name: statistics.median(times[2:]) for name, times in seen.items()}


def training(rows: list[int], length: int, repeats: int) -> list[dict[str, Any]]:
    models = {name: model(name).train() for name in CONVERTED}
    optimisers = {name: torch.optim.AdamW(m.parameters(), 1e-5, fused=True) for name, m in models.items()}

    def step(name: str, ids: torch.Tensor) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            logits = models[name](ids, use_cache=False).logits
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimisers[name].step()
        optimisers[name].zero_grad(set_to_none=True)

    found = []
    for n in rows:
        ids = tokens(n, length)
        ms = in_turns({name: partial(step, name, ids) for name in models}, repeats)
        found.append({"what": f"training step, {n} x {length}", "rows": n, "length": length, "ms": ms})
    return found


@torch.no_grad()
def prefill(lengths: list[int], repeats: int) -> list[dict[str, Any]]:
    models = reading()
    found = []
    for length in lengths:
        ids = tokens(1, length)
        calls = {n: partial(m.__call__, ids, use_cache=True, logits_to_keep=1) for n, m in models.items()}
        found.append(
            {"what": f"prefill, 1 x {length}", "rows": 1, "length": length, "ms": in_turns(calls, repeats)}
        )
    return found


@torch.no_grad()
def decoding(batches: list[int], count: int, repeats: int) -> list[dict[str, Any]]:
    """Milliseconds a token (of every row)."""
    models = reading()

    def decode(name: str, one: torch.Tensor, cache: Any) -> None:
        for _ in range(count):
            models[name](one, past_key_values=cache, use_cache=True)

    found = []
    for rows in batches:
        caches = {
            n: m(tokens(rows, 256), use_cache=True, logits_to_keep=1).past_key_values
            for n, m in models.items()
        }
        calls = {n: partial(decode, n, tokens(rows, 1), cache) for n, cache in caches.items()}
        ms = in_turns(calls, repeats)
        ms = {name: t / count for name, t in ms.items()}
        found.append({"what": f"decoding a token, batch {rows}", "rows": rows, "ms": ms})
    return found


def reading() -> dict[str, RegraftForCausalLM]:
    made = {name: model(name).eval() for name in CONVERTED}
    for m in made.values():
        to_bfloat16(m)
    return made


if __name__ == "__main__":
    main()
