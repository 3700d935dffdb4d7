"""Time and peak memory of a conversion at the published 340M shape, from random weights to a reload.

    python scripts/bench/convert_340m.py [--dtype bfloat16] [--keep DIR]

Each step is a process of its own, so that its peak memory is its own: writing the folder, `regraft convert`,
`regraft verify`, and a reload through transformers that has to be bit-equal. Prints a table; needs 4 GB of
disk.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[2]))

from scripts.bench.shapes import LAYERS, SHAPE_340M

ROOT = Path(__file__).parents[2]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="write the folders here and keep them")
    parser.add_argument("--write", nargs=2, metavar=("FOLDER", "SHAPE"), help=argparse.SUPPRESS)
    parser.add_argument("--reload", nargs=1, metavar="FOLDER", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.write:
        write(Path(args.write[0]), json.loads(args.write[1]))
    elif args.reload:
        reload(args.reload[0])
    else:
        with tempfile.TemporaryDirectory() as scratch:
            rows = measure(args.keep or Path(scratch), SHAPE_340M, ",".join(map(str, LAYERS)), args.dtype)
        print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}\n")
        print("| step | seconds | CPU seconds | peak resident GB |\n|---|---:|---:|---:|")
        for row in rows:
            print(
                f"| {row['step']} | {row['seconds']:.0f} | {row['cpu_seconds']:.0f} | {row['peak_gb']:.2f} |"
            )
        print(f"\n{rows[-1]['said'].splitlines()[-1]}")


def measure(base: Path, shape: dict[str, Any], layers: str, dtype: str) -> list[dict[str, Any]]:
    """Run every step; seconds and peak resident memory of each.

    Raises:
        RuntimeError: a step failed, with the end of what it said.
    """
    teacher, student = base / "teacher", base / "student"
    me, regraft = [sys.executable, str(Path(__file__).resolve())], [sys.executable, "-m", "regraft"]
    steps = {
        "python and libraries alone": [sys.executable, "-c", "import regraft.convert"],
        "write the teacher": [*me, "--write", str(teacher), json.dumps(shape)],
        "convert": [
            *(*regraft, "convert", str(teacher), "--layers", layers, "--dtype", dtype, "--out", str(student)),
        ],
        "verify": [*regraft, "verify", str(student), "--teacher", str(teacher), "--length", "193"],
        "reload, bit-equal": [*me, "--reload", str(student)],
    }
    return [{"step": name, **run(command)} for name, command in steps.items()]


# A process starts with its parent's peak of resident memory to its name, so a small one comes in between.
_LAUNCH = """
import json, os, subprocess, sys
process = subprocess.Popen(sys.argv[2:])
_, status, usage = os.wait4(process.pid, 0)
process.returncode = os.waitstatus_to_exitcode(status)
with open(sys.argv[1], "w") as file:
    json.dump([process.returncode, usage.ru_utime + usage.ru_stime, usage.ru_maxrss], file)
"""


def run(command: list[str]) -> dict[str, Any]:
    """Run one step in a process of its own."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    start = time.perf_counter()
    with tempfile.NamedTemporaryFile("r") as usage:
        launch = [sys.executable, "-c", _LAUNCH, usage.name, *command]
        text = subprocess.run(
            launch, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True
        ).stdout
        code, cpu_seconds, peak = json.load(usage)
    if code:
        raise RuntimeError(f"{' '.join(command[:4])} ended with {code}: {text[-2000:]}")
    return {
        "seconds": time.perf_counter() - start,
        "cpu_seconds": cpu_seconds,
        "peak_gb": peak * (1 if sys.platform == "darwin" else 1024) / 1e9,  # KiB but for there
        "said": text,
    }


def write(folder: Path, shape: dict[str, Any]) -> None:
    """A teacher's folder with random bfloat16 weights, in fla's format."""
    from regraft.layers import RegraftConfig, RegraftForCausalLM

    torch.manual_seed(0)
    model = RegraftForCausalLM(RegraftConfig(**shape))
    folder.mkdir(parents=True)
    config = {"model_type": "gated_deltanet", "architectures": ["GatedDeltaNetForCausalLM"], **shape}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    tensors = {
        name: x if name.endswith("A_log") else x.to(torch.bfloat16) for name, x in model.state_dict().items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def reload(folder: str) -> None:
    """Tensors through transformers' Auto class against the file, logits against our own reader."""
    from transformers import AutoModelForCausalLM

    from regraft.convert import load_model

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    stored = load_file(Path(folder) / "model.safetensors")
    state = model.state_dict()
    wrong = [
        name
        for name, x in stored.items()
        if not (x.dtype == state[name].dtype and torch.equal(x, state[name]))
    ]
    if wrong or set(state) != set(stored):
        raise SystemExit(f"not bit-equal: {wrong[:5]}, {sorted(set(state) ^ set(stored))[:5]}")
    ids = torch.arange(70).view(1, -1)
    dtype = str(model.model.embeddings.weight.dtype).removeprefix("torch.")
    with torch.no_grad():
        if not torch.equal(model(ids).logits, load_model(folder, dtype=dtype)(ids).logits):
            raise SystemExit("logits are not bit-equal")
    print(f"{len(stored)} tensors and the logits are bit-equal")


if __name__ == "__main__":
    main()
