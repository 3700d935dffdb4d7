"""Training on GPUs: tokens a second, share of the GPU's arithmetic and of the teacher, by processes.

    python scripts/bench/gpu_train.py --out one.json
    torchrun --standalone --nproc-per-node 2 scripts/bench/gpu_train.py --out two.json
    python scripts/bench/gpu_train.py --compare one.json two.json

The shape of the published 340M checkpoints with random weights, four layers converted, bfloat16 products,
rows of 2,048 random tokens, through the training loop itself: phase `match` (layer NMSE, evidence from 0 to
1), then phase `joint` (forward KL and boundary MSE). The global batch is the same for any number of
processes, so the loss curves are to agree. Speed is the median of a phase's steps after the first three.
FLOPs are those that manifests count, recomputation left out. Needs torch, triton, transformers, accelerate,
pydantic, rich; flash-linear-attention's kernels are used where they are installed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from regraft.distill.cost import stage_cost
from regraft.distill.data import Rows
from regraft.distill.engine import Engine
from regraft.distill.loop import Loop
from regraft.distill.losses import trace
from regraft.distill.stage import Stage
from regraft.layers import RegraftConfig, RegraftForCausalLM
from regraft.recipes.schema import BoundaryMSE, Evidence, ForwardKL, LayerNMSE, Optimiser
from scripts.bench.shapes import LAYERS, SHAPE_340M

TINY = {**SHAPE_340M, "hidden_size": 64, "head_dim": 16, "intermediate_size": 128, "vocab_size": 512}
PEAK = 989e12  # FLOP/s in bfloat16 of an H100 or H200, dense
WARM = 3  # steps of a phase before its speed counts


class RandomRows:
    """Full rows of random tokens: number n of a run is the same on every machine."""

    def __init__(self, vocab_size: int, seq_len: int) -> None:
        self.vocab_size, self.seq_len, self.taken = vocab_size, seq_len, 0
        self.ledger: dict[str, Any] = {}

    def take(self, rows: int, tokens: int) -> Rows:
        random = torch.Generator().manual_seed(self.taken)
        self.taken += 1
        ids = torch.randint(self.vocab_size, (rows, self.seq_len), generator=random)
        first = torch.zeros_like(ids, dtype=torch.bool)
        first[:, 0] = True
        return Rows(ids, torch.ones_like(first), first)

    def state(self) -> dict[str, int]:
        return {"taken": self.taken}

    def restore(self, state: dict[str, int], ledger: object) -> None:
        self.taken = state["taken"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="where the numbers go")
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("ONE", "TWO"))
    parser.add_argument("--rows", type=int, default=64, help="rows of a step, over all processes")
    parser.add_argument("--micro-batch", type=int, default=8, help="rows at once")
    parser.add_argument("--steps", type=int, default=10, help="steps of each phase")
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--logit-chunk", type=int, default=4096)
    parser.add_argument("--noise-groups", type=int, default=1)
    parser.add_argument("--sharded", action="store_true", help="student by FSDP2")
    parser.add_argument("--recompute", action="store_true", help="activation checkpointing")
    parser.add_argument("--tiny", action="store_true", help="a small shape, to see that the script runs")
    args = parser.parse_args()
    if args.compare:
        compare(*(json.loads(path.read_text()) for path in args.compare))
        return
    found = measure(args)
    if found is not None:
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(found, indent=1) + "\n")
        print(json.dumps({k: v for k, v in found.items() if k != "losses"}, indent=1))


def make_models(args: argparse.Namespace, device: torch.device) -> tuple[RegraftForCausalLM, ...]:
    """Teacher and its exact copy with Bayesian Layers, float32."""
    shape: dict[str, Any] = TINY if args.tiny else SHAPE_340M
    bayesian = {"kind": "bayesian", "noise_groups": args.noise_groups}
    mixers = [
        bayesian if i in LAYERS else {"kind": "gated_deltanet"} for i in range(shape["num_hidden_layers"])
    ]
    torch.manual_seed(0)
    teacher = RegraftForCausalLM(RegraftConfig(**shape))
    student = RegraftForCausalLM(RegraftConfig(**shape, mixers=mixers))
    missing, unexpected = student.load_state_dict(teacher.state_dict(), strict=False)
    if unexpected or any(int(name.split(".")[2]) not in LAYERS for name in missing):
        raise SystemExit(f"the student is no copy: missing {missing}, unexpected {unexpected}")
    return teacher.to(device).eval(), student.to(device).eval()


def stages(args: argparse.Namespace) -> list[Stage]:
    tokens = args.steps * args.rows * args.seq_len
    phases: dict[str, tuple[tuple[Any, ...], float, Evidence | None]] = {
        "match": ((LayerNMSE(),), 2e-4, Evidence()),
        "joint": ((ForwardKL(), BoundaryMSE()), 1e-4, None),
    }
    return [
        Stage(name, losses, "converted", lr, Optimiser(), ((tokens, args.rows),), args.micro_batch,
              args.logit_chunk, evidence)
        for name, (losses, lr, evidence) in phases.items()
    ]  # fmt: skip


def measure(args: argparse.Namespace) -> dict[str, Any] | None:
    """Both phases; None in all processes but the first."""
    engine = Engine(student_sharded=args.sharded, recompute=args.recompute)
    teacher, student = make_models(args, engine.device)
    plan = stages(args)
    with tempfile.TemporaryDirectory() as folder:
        stream: Any = RandomRows(teacher.config.vocab_size, args.seq_len)
        kind = torch.bfloat16
        loop = Loop(
            student, teacher, LAYERS, plan, stream, Path(folder), 10**9, 1, autocast=kind, engine=engine
        )
        loop.run()
        if not engine.main:
            return None
        lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    found: dict[str, Any] = {
        "machine": machine(engine),
        "settings": {k: v for k, v in vars(args).items() if k not in ("out", "compare")},
        "phases": {},
        "losses": {stage.name: [x["loss"] for x in lines if x["stage"] == stage.name] for stage in plan},
    }
    for stage in plan:
        mine = [x for x in lines if x["stage"] == stage.name]
        speed = statistics.median(x["tokens_per_second"] for x in mine[min(WARM, len(mine) - 1) :])
        cost = stage_cost(
            stage, student.config, teacher.config, LAYERS, seq_len=args.seq_len, dtype=torch.bfloat16
        )
        alone = teacher_seconds(teacher, args, stage.name, engine.device) / engine.world
        found["phases"][stage.name] = {
            "tokens_per_second": round(speed),
            "first_step_seconds": round(args.rows * args.seq_len / mine[0]["tokens_per_second"], 1),
            "gflops_per_token": round(cost.flops / 1e9, 3),
            "gflops_per_token_of_teacher": round(cost.teacher_flops / 1e9, 3),
            "mfu": round(cost.flops * speed / PEAK / engine.world, 4),
            "teacher_share_of_time": round(alone / (args.rows * args.seq_len / speed), 3),
            "peak_memory_gb": max(x["memory_gb"] for x in mine),
        }
    return found


@torch.no_grad()
def teacher_seconds(
    teacher: RegraftForCausalLM, args: argparse.Namespace, phase: str, device: torch.device
) -> float:
    """Seconds that the teacher alone takes for the rows of a step, its logits in phase `joint` included."""
    rows = RandomRows(teacher.config.vocab_size, args.seq_len).take(args.micro_batch, 0).to(device)

    def once() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            seen = trace(teacher, rows, LAYERS, whole=phase == "joint")
            if seen.final is not None:
                for piece in seen.final.flatten(0, 1).split(args.logit_chunk):
                    F.linear(piece, teacher.lm_head.weight)

    return timed(once, device) * args.rows / args.micro_batch


def timed(work: Callable[[], None], device: torch.device) -> float:
    """Seconds, the median of five after two."""
    seconds = []
    for _ in range(7):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[2:])


def machine(engine: Engine) -> dict[str, Any]:
    import transformers

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    try:
        from importlib.metadata import version

        fla = version("flash-linear-attention")
    except ImportError:
        fla = "none"
    return {
        "gpu": gpu, "processes": engine.world, "torch": torch.__version__,
        "transformers": transformers.__version__, "flash-linear-attention": fla,
    }  # fmt: skip


def compare(one: dict[str, Any], two: dict[str, Any]) -> None:
    """Speed and losses of two runs of one batch."""
    for phase, mine in one["phases"].items():
        theirs = two["phases"][phase]
        ratio = theirs["tokens_per_second"] / mine["tokens_per_second"]
        a, b = (torch.tensor(found["losses"][phase]) for found in (one, two))
        apart: Tensor = (a - b).abs()
        relative = float((apart / a.abs().clamp(min=1e-12)).max())
        print(
            f"{phase}: {mine['tokens_per_second']:,} -> {theirs['tokens_per_second']:,} tokens/s, "
            f"{ratio:.2f}x; losses differ by {float(apart.max()):.2e}, relatively {relative:.2e} at most"
        )


if __name__ == "__main__":
    main()
