"""The same folder through flash-linear-attention's own model and through ours, on a GPU: logits and speed.

    python scripts/bench/fla_agreement.py --out DIR

Two folders: random weights in the shape of the published 340M checkpoints, written by fla's own class, and
the embedded teacher. Each is run in float32 and bfloat16 by fla's `GatedDeltaNetForCausalLM`, by our decoder
with fla's kernels, and by our decoder with each backend of our op. The reference is fla in float32 with all
of its 24 bits (`TRITON_F32_DEFAULT=tf32x3`); as it comes fla multiplies float32 in TF32.

Most of the time goes into compiling fla's kernels, so every folder and number format has a process of its
own, all at once, with at most `--configs` autotuning choices a kernel. Speed is measured when all others are
done. Needs torch, triton, flash-linear-attention, einops, transformers, safetensors. The numbers are printed
as a table and written to DIR/fla_agreement.json.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from scripts.bench.shapes import SHAPE_340M

ROOT = Path(__file__).parents[2]
LENGTHS = (1000, 50)  # up to 64 tokens fla takes another kernel
PREFILL = (4, 4096)
FORMATS = {"bfloat16": torch.bfloat16, "float32": torch.float32, "tf32": torch.float32}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--configs", type=int, default=6, help="autotuning choices a kernel; 0 for all")
    parser.add_argument("--limit", type=float, default=150, help="seconds until what still compiles is cut")
    parser.add_argument("--child", nargs=3, metavar=("WHAT", "FOLDER", "RESULT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child[0], Path(args.child[1]), Path(args.child[2]), args.configs)
        return
    args.out.mkdir(parents=True, exist_ok=True)
    started = time.time()
    with tempfile.TemporaryDirectory() as scratch:
        results = run_all(Path(scratch), args.configs, args.limit)
    results |= {"seconds": round(time.time() - started), "configs": args.configs, "machine": machine()}
    (args.out / "fla_agreement.json").write_text(json.dumps(results, indent=1) + "\n")
    print(table(results))


def run_all(scratch: Path, configs: int, limit: float) -> dict[str, Any]:
    """Every process at once; then the logits against the reference of their folder."""
    until = time.time() + limit
    folders = {"340M, random weights": scratch / "340M", "embedded teacher": ROOT / "regraft/assets/teacher"}
    write = spawn("write", folders["340M, random weights"], scratch / "write.json", configs)
    children = {
        (name, what): (scratch / f"{i}-{what}.json", folder)
        for i, (name, folder) in enumerate(folders.items())
        for what in FORMATS
    }
    running = {}
    for (name, what), (result, folder) in children.items():  # the small folder is there already
        if folder.is_dir():
            running[name, what] = spawn(what, folder, result, configs)
    gradients = spawn("gradients", scratch, scratch / "gradients.json", configs)
    finish([write], until)
    for (name, what), (result, folder) in children.items():
        if (name, what) not in running:
            running[name, what] = spawn(what, folder, result, configs)
    finish([*running.values(), gradients], until)
    speed = scratch / "speed.json"  # alone on the GPU
    finish([spawn("speed", folders["340M, random weights"], speed, configs)], time.time() + limit)
    rows = []
    for name in folders:
        rows += agreement(name, {what: children[name, what][0] for what in FORMATS})
    return {
        "agreement": rows,
        "probe": read(scratch / "gradients.json"),
        "speed": read(speed),
        "failures": {f.stem: read(f)["failed"] for f in scratch.glob("*.json") if "failed" in read(f)},
    }


def finish(processes: list[subprocess.Popen[bytes]], until: float) -> None:
    """Wait for all of them; at the given time end those that still run."""
    for process in processes:
        try:
            process.wait(max(until - time.time(), 0.1))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def spawn(what: str, folder: Path, result: Path, configs: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, __file__, "--out", str(result.parent), "--configs", str(configs)]
    environment = os.environ | {"TRITON_CACHE_AUTOTUNING": "1", "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    if what == "float32":
        environment["TRITON_F32_DEFAULT"] = "tf32x3"
    return subprocess.Popen([*command, "--child", what, str(folder), str(result)], env=environment)


def child(what: str, folder: Path, result: Path, configs: int) -> None:
    """One process's work; what fails goes into its result and does not stop the others."""
    started = time.time()
    job: Callable[[], dict[str, Any]] = {
        "write": lambda: write_340m(folder),
        "gradients": lambda: probe("cuda"),
        "speed": lambda: speed(folder, "cuda"),
    }.get(what, lambda: logits_of(folder, what, result.with_suffix(".safetensors"), "cuda"))
    try:
        thin_autotuning(configs)
        found = job()
    except Exception as error:
        found = {"failed": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()[-3000:]}
        print(f"{result.stem}: {found['trace']}", file=sys.stderr)
    found["seconds"] = round(time.time() - started, 1)
    result.write_text(json.dumps(found))


def thin_autotuning(most: int) -> None:
    """Let kernels of this process choose among at most so many configurations, spread over their lists."""
    from triton.runtime.autotuner import Autotuner

    if not most:
        return
    original = Autotuner.__init__  # fla's own autotuner is derived from it

    def thinned(self: Any, fn: Any, arg_names: Any, configs: list[Any], *rest: Any, **settings: Any) -> None:
        original(self, fn, arg_names, configs[:: -(-len(configs) // most) or 1], *rest, **settings)

    Autotuner.__init__ = thinned


def fla_models() -> ModuleType:
    """fla's model classes; without its package's `__init__` where that does not fit this transformers."""
    try:
        return importlib.import_module("fla.models.gated_deltanet")
    except ImportError as error:
        print(f"fla does not import as a whole ({error}); its parts alone", file=sys.stderr)
    spec = importlib.util.find_spec("fla")
    assert spec is not None and spec.submodule_search_locations is not None
    base = Path(next(iter(spec.submodule_search_locations)))
    for name in [m for m in sys.modules if m.split(".")[0] == "fla"]:
        del sys.modules[name]
    for name in ("fla", "fla.models", "fla.layers"):  # packages whose __init__ is left out
        sys.modules[name] = package = ModuleType(name)
        package.__path__ = [str(base.joinpath(*name.split(".")[1:]))]
        package.__version__ = "0.6.0"  # type: ignore[attr-defined]
    return importlib.import_module("fla.models.gated_deltanet")


def write_340m(folder: Path) -> dict[str, Any]:
    models = fla_models()
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = models.GatedDeltaNetForCausalLM(
            models.GatedDeltaNetConfig(**SHAPE_340M, fuse_cross_entropy=False)
        )
    model.save_pretrained(folder)
    return {"parameters": sum(p.numel() for p in model.parameters())}


def load(folder: Path, dtype: torch.dtype, device: str) -> tuple[Any, Any]:
    """The folder in fla's class and in ours."""
    from regraft.layers import RegraftConfig, RegraftForCausalLM

    theirs = fla_models().GatedDeltaNetForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
    raw = json.loads((folder / "config.json").read_text())
    known = set(RegraftConfig.__init__.__annotations__)
    ours = RegraftForCausalLM(RegraftConfig(**{k: v for k, v in raw.items() if k in known}))
    fine = set(ours._keep_in_fp32_modules_strict)
    missing, unexpected = ours.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    tied = ["lm_head.weight"] if raw["tie_word_embeddings"] else []
    if unexpected or missing not in ([], tied):
        raise ValueError(f"the folder does not fit our decoder: missing {missing}, unexpected {unexpected}")
    for name, p in ours.named_parameters():
        if not fine & set(name.split(".")):
            p.data = p.data.to(dtype)
    ours.tie_weights()
    return theirs, ours.to(device).eval()


def variants(theirs: Any, ours: Any, formats: str) -> Iterator[tuple[str, Any]]:
    """Every way to run the folder: its name and the model, set up for it until the next is asked for."""
    from regraft.ops.kalman import BACKENDS

    yield "fla's model", theirs
    ours.set_kernels("fla")
    yield "ours, fla's kernels", ours
    if formats == "tf32":
        return
    ours.set_kernels("regraft")
    unfit = ("auto", "reference") if ours.device.type == "cuda" else ("auto", "reference", "triton")
    for backend in [b for b in BACKENDS if b not in unfit]:
        with our_op(backend):
            yield f"ours, our op ({backend})", ours


@contextmanager
def our_op(backend: str) -> Iterator[None]:
    """Inside, layers run this backend of our op."""
    from regraft.layers import mixer

    original = mixer.kalman_delta_rule
    mixer.kalman_delta_rule = functools.partial(original, backend=backend)  # type: ignore[arg-type]
    try:
        yield
    finally:
        mixer.kalman_delta_rule = original


def tokens(vocab_size: int, *shape: int) -> Tensor:
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits_of(folder: Path, formats: str, out: Path, device: str) -> dict[str, Any]:
    """Logits `[T,vocab]` of every variant and length into one file; a variant that fails is noted."""
    theirs, ours = load(folder, FORMATS[formats], device)
    found, failed = {}, {}
    for name, model in variants(theirs, ours, formats):
        try:
            for T in LENGTHS:
                ids = tokens(ours.config.vocab_size, 1, T).to(device)
                found[f"{name}|{T}"] = model(ids, use_cache=False).logits[0].float().cpu()
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"
            traceback.print_exc()
    save_file(found, out)
    return {"failed": failed} if failed else {}


def agreement(folder: str, results: dict[str, Path]) -> list[dict[str, Any]]:
    """Rows of the table: every variant of a folder against fla in float32."""
    logits = {
        what: load_file(path.with_suffix(".safetensors"))
        for what, path in results.items()
        if path.with_suffix(".safetensors").is_file()
    }
    rows = []
    for T in LENGTHS:
        key = f"fla's model|{T}"
        reference = next((logits[w][key] for w in ("float32", "tf32") if key in logits.get(w, {})), None)
        if reference is None:
            continue
        for what, mine in logits.items():
            for name in [k for k in mine if k.endswith(f"|{T}")]:
                if mine[name] is not reference:
                    row = {"folder": folder, "tokens": T, "format": what, "model": name.split("|")[0]}
                    rows.append(row | compare(mine[name], reference))
    return rows


def compare(x: Tensor, reference: Tensor) -> dict[str, float]:
    """Largest difference, RMS of the difference over that of the reference, share of equal argmax."""
    difference = x - reference
    return {
        "max_abs": float(difference.abs().max()),
        "relative_rms": float(difference.norm() / reference.norm()),
        "argmax": float((x.argmax(-1) == reference.argmax(-1)).float().mean()),
        "logits": float(reference.abs().max()),
    }


def probe(device: str) -> dict[str, Any]:
    """What the layers' own test of fla's kernels finds, with gradients, for the heads of the 340M shape."""
    from regraft.layers.fla_kernels import differences

    heads = (SHAPE_340M["num_heads"],) * 2 + (SHAPE_340M["head_dim"],) * 2
    return {"differences": differences(torch.device(device), torch.bfloat16, heads, True)}


@torch.no_grad()
def speed(folder: Path, device: str) -> dict[str, Any]:
    """Prefill tokens a second in bfloat16, the best of five after a warm-up, and our largest kernels."""
    theirs, ours = load(folder, torch.bfloat16, device)
    ids = tokens(ours.config.vocab_size, *PREFILL).to(device)
    found: dict[str, Any] = {"batch": PREFILL[0], "tokens": PREFILL[1], "tokens_per_second": {}}
    for name, model in variants(theirs, ours, "bfloat16"):

        def once(model: Any = model) -> float:
            torch.cuda.synchronize()
            start = time.perf_counter()
            model(ids, use_cache=False, logits_to_keep=1)
            torch.cuda.synchronize()
            return time.perf_counter() - start

        try:
            first = once()
            best = min(once() for _ in range(5 if first < 20 else 1))
            found["tokens_per_second"][name] = round(ids.numel() / best)
            if name in ("fla's model", "ours, fla's kernels"):
                found[f"largest kernels of {name}, ms"] = largest_kernels(once)
        except Exception as error:
            found["tokens_per_second"][name] = f"{type(error).__name__}: {error}"
            traceback.print_exc()
    return found


def largest_kernels(run: Callable[[], Any]) -> dict[str, float]:
    """Milliseconds on the GPU of the ten kernels that one run spends most in."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        run()
    rows = sorted(seen.key_averages(), key=lambda row: -row.self_device_time_total)[:10]
    return {row.key[:80]: round(row.self_device_time_total / 1000, 2) for row in rows}


def machine() -> dict[str, str]:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    modules = {n: importlib.import_module(n) for n in ("torch", "triton", "transformers")}
    return {"gpu": gpu, **{name: str(module.__version__) for name, module in modules.items()}}


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.is_file() else {"failed": "no result"}


def table(results: dict[str, Any]) -> str:
    lines = [
        f"against fla's model in float32; {results['machine']}, {results['seconds']} s",
        "| folder | tokens | format | model | max abs | relative RMS | same argmax | logits up to |",
        "|---|---:|---|---|---:|---:|---:|---:|",
    ]
    for r in results["agreement"]:
        lines.append(
            f"| {r['folder']} | {r['tokens']} | {r['format']} | {r['model']} | {r['max_abs']:.2g} "
            f"| {r['relative_rms']:.2g} | {r['argmax']:.2%} | {r['logits']:.3g} |"
        )
    lines.append(f"probe in bfloat16, relative RMS: {results['probe'].get('differences')}")
    speeds = {name: found for name, found in results["speed"].items() if name != "trace"}
    lines.append(f"prefill: {json.dumps(speeds, indent=1)}")
    lines += [f"FAILED {name}: {why}" for name, why in results["failures"].items()]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
