"""One job in a process of its own: make a student or a control and let it read the documents."""

from __future__ import annotations

import argparse
import functools
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from regraft.convert import load_model, load_tokenizer, open_checkpoint
from regraft.convert.scan import scan_checkpoint
from regraft.distill.parent import read_manifest
from regraft.distill.run import control, distill
from regraft.errors import UserError
from regraft.files import hash_directory, user_cache, write_json
from regraft.layers import RegraftForCausalLM
from regraft.report.inspection import Trace, inspection_document, traces
from regraft.report.niah import Entrant, evaluate
from regraft.report.perplexity import measure
from regraft.report.shelf import Shelf
from scripts.replicate import quiet
from scripts.replicate.plan import CONTROL, STUDENT, TEACHER, Variant, Work, model_name

SCAN_DOCUMENTS = 16
DTYPE = "bfloat16" if torch.cuda.is_available() else "float32"


def train(work: Work, variant: Variant, role: str, extra: tuple[str, ...] = ()) -> None:
    """Make a student or a control; a finished one is left alone."""
    run, source = work.run(variant), work.source(variant)
    if variant.quiet and source:
        if not (run / "export").is_dir():
            heads = map(quiet.parsed, work.heads(variant.quiet))
            quiet.write(str(source / "export"), run / "export", heads)
        return
    if finished(run if role == STUDENT else run / CONTROL):
        return
    if role == STUDENT:
        recipe = work.recipe(variant, (f"teacher.dtype={DTYPE}", *extra))
        alone = recipe.phases[-1].name if source else None
        distill(recipe, run, phase=alone, start=source, other_data=source is not None, resume=True)
    else:
        control(run, resume=True)


def finished(run: Path) -> bool:
    """Whether a run, or a control, has come to its end."""
    return (run / "manifest.json").is_file() and "finished" in read_manifest(run)


def read(work: Work, models: Sequence[tuple[Variant | None, str]], samples: int | None = None) -> None:
    """Answers and perplexities of models; finished cells are found in the cache."""
    settings = work.plan.evaluation
    shelf = Shelf(user_cache() / "evaluated")
    for variant, role in models:
        name, place = model_name(variant, role), work.place(variant, role)
        out = records_file(work.folder, name)
        if out.is_file():
            continue
        digest = hash_directory(open_checkpoint(place).path)
        entrant = Entrant(functools.partial(_load, place), load_tokenizer(place), f"{digest} {DTYPE}")
        answers = evaluate(
            {name: entrant}, lengths=settings.lengths, samples=samples or settings.samples,
            batch_size=settings.batch_size, say=print, documents=Shelf(user_cache() / "needles"),
            finished=shelf,
        )  # fmt: skip
        nll = measure(
            {name: entrant}, sets=[str(work.heldout)], lengths=settings.lengths, samples=settings.books,
            finished=shelf,
        )  # fmt: skip
        found = {"sha256": digest, "dtype": DTYPE, "answers": answers, "perplexity": nll}
        out.parent.mkdir(exist_ok=True)
        write_json(out, {**found, "inside": inside(work, role, entrant)})


def inside(work: Work, role: str, entrant: Entrant) -> dict[str, Any]:
    """Of a student what its filters did on a document, by layer; of the teacher where its memory lives."""
    if role == TEACHER:
        return {"scan": asdict(scan_checkpoint(open_checkpoint(work.teacher), samples=SCAN_DOCUMENTS))}
    if role == CONTROL:
        return {}
    try:
        found = traces(entrant.load(), entrant.tokenizer, inspection_document(entrant.tokenizer, 0))
    except UserError:  # no layer keeps a covariance
        return {}
    except Exception:  # a look inside is not worth the answers
        traceback.print_exc()
        return {}
    return {"traces": {str(layer): _plain(trace) for layer, trace in found.items()}}


def _plain(trace: Trace) -> dict[str, Any]:
    """Numbers to four digits, None for what is none."""
    return {
        name: value
        if isinstance(value, int)
        else [[None if np.isnan(x) else round(x, 4) for x in row] for row in value.tolist()]
        for name, value in vars(trace).items()
    }


def _load(place: str) -> RegraftForCausalLM:
    return load_model(place, dtype=DTYPE).to("cuda" if torch.cuda.is_available() else "cpu")


def records_file(folder: Path, name: str) -> Path:
    """Where the records of a model are before they are packed."""
    return folder / "records" / f"{name.replace('/', '.')}.json"


def main() -> None:
    ap = argparse.ArgumentParser(prog="python -m scripts.replicate.job", description=__doc__)
    ap.add_argument("name", help="`teacher` (reads documents), or a variant: train it, then it reads")
    ap.add_argument("--control", action="store_true", help="the control of the variant")
    ap.add_argument("--plan", required=True)
    ap.add_argument("--work", type=Path, required=True)
    ap.add_argument("--set", action="append", default=[], help="a further override of the recipe")
    ap.add_argument("--samples", type=int, help="documents per task and length, if not the plan's")
    args = ap.parse_args()
    work = Work(args.plan, args.work)
    if args.name == "teacher":
        read(work, [(None, TEACHER)], args.samples)
        return
    variant, role = work.variant(args.name), CONTROL if args.control else STUDENT
    train(work, variant, role, tuple(args.set))
    read(work, [(variant, role)], args.samples)


if __name__ == "__main__":
    main()
