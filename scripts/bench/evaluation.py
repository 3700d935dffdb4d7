"""Needle evaluation against lm-eval's own loop, on the same documents with equal answers.

    OMP_NUM_THREADS=1 chrt -r 10 python scripts/bench/evaluation.py --lengths 2048 --samples 4
    python scripts/bench/evaluation.py --random 340m --loop generate --lengths 2048 8192     # on a GPU

`--loop lm-eval` is `HFLM.generate_until` with `--batch-size`; `--loop generate` is what that calls at its
default batch size of 1, transformers' own `generate`, one document after the other, and needs neither lm-eval
nor datasets (wonderwords it does need).
On a CPU seconds are those of the processor, so other programs may run.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).parents[2]))

from regraft.assets import teacher_dir
from regraft.assets.needles import ALL_TASKS, make_document
from regraft.layers import RegraftConfig, RegraftForCausalLM
from regraft.layers.mixer import Mixer
from regraft.report.generate import Prompt, answer
from regraft.report.tasks import found
from scripts.bench.shapes import LAYERS, SHAPE_340M


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--model", default="embedded")
    ap.add_argument(
        "--random", choices=["340m", "340m-bayesian"], help="random weights of that shape instead"
    )
    ap.add_argument("--loop", choices=["lm-eval", "generate"], default="lm-eval")
    ap.add_argument("--tasks", nargs="+", default=["niah_single_2", "niah_multiquery"])
    ap.add_argument("--lengths", nargs="+", type=int, default=[2048, 8192])
    ap.add_argument("--samples", type=int, default=4, help="documents a task and length")
    ap.add_argument("--batch-size", type=int, default=1, help="of lm-eval; ours is 64")
    ap.add_argument("--repeats", type=int, default=2)
    ap.add_argument("--threads", type=int, default=1)
    args = ap.parse_args()
    torch.set_num_threads(args.threads)
    model, tokenizer = load(args.model, args.random)
    clock = seconds_on_gpu if model.device.type == "cuda" else time.process_time
    theirs = (
        lm_eval(model, tokenizer, args.batch_size) if args.loop == "lm-eval" else one_by_one(model, tokenizer)
    )
    warm = prompts_of(tokenizer, args.tasks[:1], 256, 2)[1]
    answer(model, tokenizer, warm, batch_size=2)
    for length in args.lengths:
        texts, prompts = prompts_of(tokenizer, args.tasks, length, args.samples)
        seconds = longer = float("inf")
        for _ in range(args.repeats):  # in turns, the fastest of each: others may take memory and caches
            begin = clock()
            ours = answer(model, tokenizer, prompts, batch_size=64)
            seconds, begin = min(seconds, clock() - begin), clock()
            other = theirs(texts, prompts)
            longer = min(longer, clock() - begin)
        hits, their_hits = (
            [[found(v, t) for v in p.answers] for p, t in zip(prompts, made, strict=True)]
            for made in (ours, other)
        )
        n = len(prompts)
        same = sum(a == b for a, b in zip(hits, their_hits, strict=True))
        texts_agree = sum(b.startswith(a.rstrip("�")) for a, b in zip(ours, other, strict=True))
        print(
            f"{length} tokens, {n} documents: ours {n / seconds:.3f}/s ({seconds:.1f} s), {args.loop} "
            f"{n / longer:.3f}/s ({longer:.1f} s), ratio {longer / seconds:.2f}; equal hits in {same} of {n} "
            f"({sum(map(sum, hits))} values found), our text begins theirs in {texts_agree}",
            flush=True,
        )


def load(model: str, random: str | None) -> tuple[RegraftForCausalLM, PreTrainedTokenizerFast]:
    """The model, on a GPU if there is one (random weights in bfloat16), and a tokenizer."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if random is None:
        from regraft.convert import load_model, load_tokenizer

        return load_model(model).to(device), load_tokenizer(model)
    torch.manual_seed(0)
    kinds = [
        "bayesian" if random.endswith("bayesian") and i in LAYERS else "gated_deltanet" for i in range(24)
    ]
    config = RegraftConfig(**SHAPE_340M, mixers=[{"kind": kind} for kind in kinds])
    made = RegraftForCausalLM(config).eval()
    if device == "cuda":
        to_bfloat16(made)
    return made.to(device), AutoTokenizer.from_pretrained(teacher_dir())


def to_bfloat16(model: RegraftForCausalLM) -> None:
    """What the mixers keep in float32 stays so, as in a checkpoint that is loaded in bfloat16."""
    mixers = [(name, m) for name, m in model.named_modules() if isinstance(m, Mixer)]
    kept = {f"{name}.{own}." for name, m in mixers for own in m.float32_parameters}
    for name, parameter in model.named_parameters():
        if not f"{name}.".startswith(tuple(kept)):
            parameter.data = parameter.data.to(torch.bfloat16)


def prompts_of(tokenizer: Any, tasks: list[str], length: int, samples: int) -> tuple[list[str], list[Prompt]]:
    """The texts of the documents, and what our loop takes."""
    made = [make_document(t, length, i, seed=0, tokenizer=tokenizer) for t in tasks for i in range(samples)]
    texts = [document.model_input for document in made]
    return texts, [
        Prompt(tuple(tokenizer(text)["input_ids"]), document.answers, ALL_TASKS[document.task].new_tokens)
        for text, document in zip(texts, made, strict=True)
    ]


def lm_eval(model: Any, tokenizer: Any, batch_size: int) -> Callable[[list[str], list[Prompt]], list[str]]:
    """lm-eval's loop."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    plain = HFLM(model, tokenizer=tokenizer, max_length=2**31, batch_size=batch_size)

    def run(texts: list[str], prompts: list[Prompt]) -> list[str]:
        requests = [
            Instance("generate_until", {}, (text, {"until": [], "max_gen_toks": p.new_tokens}), i)
            for i, (text, p) in enumerate(zip(texts, prompts, strict=True))
        ]
        return plain.generate_until(requests, disable_tqdm=True)

    return run


def one_by_one(model: Any, tokenizer: Any) -> Callable[[list[str], list[Prompt]], list[str]]:
    """transformers' `generate`, a document at a time."""

    @torch.no_grad()
    def run(texts: list[str], prompts: list[Prompt]) -> list[str]:
        made = []
        for prompt in prompts:
            ids = torch.tensor([prompt.ids], device=model.device)
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=prompt.new_tokens, do_sample=False,
                eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.eos_token_id,
            )  # fmt: skip
            made.append(tokenizer.decode(out[0, len(prompt.ids) :], skip_special_tokens=True))
        return made

    return run


def seconds_on_gpu() -> float:
    """Wall time when all that was asked of the GPU is done."""
    torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main()
