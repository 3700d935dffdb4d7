"""Needle evaluation against lm-eval's own loop on the same documents: python scripts/bench/evaluation.py"""

from __future__ import annotations

import argparse
import time

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from regraft.assets.needles import ALL_TASKS
from regraft.convert import load_model, load_tokenizer
from regraft.report.generate import Prompt, answer
from regraft.report.tasks import found, make_documents


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--model", default="embedded")
    ap.add_argument("--tasks", nargs="+", default=["niah_single_1", "niah_single_2", "niah_multiquery"])
    ap.add_argument("--lengths", nargs="+", type=int, default=[2048, 8192])
    ap.add_argument("--samples", type=int, default=4)
    ap.add_argument("--batch-size", type=int, default=8, help="of lm-eval; ours is 64")
    ap.add_argument("--threads", type=int, default=1)
    args = ap.parse_args()
    torch.set_num_threads(args.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, tokenizer = load_model(args.model).to(device), load_tokenizer(args.model)
    plain = HFLM(model, tokenizer=tokenizer, max_length=2**31, batch_size=args.batch_size)
    clock = time.perf_counter if device == "cuda" else time.process_time  # processor seconds: others may run
    for length in args.lengths:
        made = make_documents(args.tasks, [length], args.samples, seed=0, tokenizer=tokenizer)
        documents = [document for cell in made.values() for document in cell]
        begin = clock()
        prompts = [
            Prompt(tuple(tokenizer(d.model_input)["input_ids"]), d.answers, ALL_TASKS[d.task].new_tokens)
            for d in documents
        ]
        ours = answer(model, tokenizer, prompts, batch_size=64)
        seconds = clock() - begin
        requests = [
            Instance("generate_until", {}, (d.model_input, {"until": [], "max_gen_toks": p.new_tokens}), i)
            for i, (d, p) in enumerate(zip(documents, prompts, strict=True))
        ]
        begin = clock()
        theirs = plain.generate_until(requests, disable_tqdm=True)
        other = clock() - begin
        hits = [
            [[found(v, text) for v in d.answers] for d, text in zip(documents, texts, strict=True)]
            for texts in (ours, theirs)
        ]
        same = sum(a == b for a, b in zip(*hits, strict=True))
        n = len(documents)
        print(
            f"{length} tokens, {n} documents: ours {n / seconds:.2f}/s, lm-eval {n / other:.2f}/s, "
            f"ratio {other / seconds:.2f}; equal hits in {same} of {n}",
            flush=True,
        )


if __name__ == "__main__":
    main()
