"""Random weights of the teacher's shape through every kind of job: compiles kernels, shows mistakes early.

Before that the embedded teacher, whose answers are known, reads a few documents with every mixer in three of
its layers at evidence 1, where retrieval stays what it was: kernels that compute something else would show.
"""

from __future__ import annotations

import argparse
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from regraft.assets import teacher_dir
from regraft.convert import load_model, load_tokenizer, make_student
from regraft.convert.convert import cast_model
from regraft.convert.load import DTYPES
from regraft.layers import BayesianLayer
from regraft.report.niah import evaluate
from scripts.replicate.job import DTYPE, read, train
from scripts.replicate.plan import STUDENT, TeacherPlan, Work
from scripts.teacher.model import export, new_model
from scripts.teacher.train import arguments

STEPS = 2  # of each phase
KNOWN: dict[str, Any] = {"task": "niah_single_2", "length": 512, "samples": 20}
KNOWN_LAYERS = (1, 3, 5)
KNOWN_SHARE = 0.9  # found at least: 20 of 20 on a CPU in float32, with every mixer
VOCABULARY = 8192


def known_answers(kinds: Iterable[str]) -> dict[str, float]:
    """Share that the embedded teacher finds by itself and with a mixer of each kind at evidence 1."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = load_tokenizer("embedded")
    shares = {}
    for kind in ("", *kinds):
        model = make_student("embedded", KNOWN_LAYERS, to=kind).student if kind else load_model("embedded")
        with torch.no_grad():
            for mixer in (m for m in model.modules() if isinstance(m, BayesianLayer)):
                mixer.evidence.fill_(1.0)
        cast_model(model, DTYPES[DTYPE])
        model = model.to(device).eval()
        records = evaluate(
            {"known": (model, tokenizer)}, tasks=[KNOWN["task"]], lengths=[KNOWN["length"]],
            samples=KNOWN["samples"],
        )  # fmt: skip
        shares[kind or "teacher"] = sum(record["score"] for record in records) / len(records)
        print(f"embedded, {kind or 'as it is'}: finds {shares[kind or 'teacher']:.2f}", flush=True)
    return shares


def rehearse(work: Work, folder: Path) -> list[str]:
    """Every mixer of the plan for two steps a phase, one document a cell; names of those that failed."""
    args = arguments([*work.plan.teacher.train, "--out", str(folder)])
    teacher = folder / "teacher"
    export(new_model(args, VOCABULARY), teacher, teacher_dir())
    small = _Rehearsal(work, folder, str(teacher))
    failed, seen = [], set()
    for variant in work.plan.variants:
        if variant.source:  # it needs the run of another
            continue
        recipe = work.recipe(variant)
        kind = (recipe.convert.to, recipe.convert.noise_groups, recipe.data.seq_len)
        if kind in seen:
            continue
        seen.add(kind)
        # Of random weights nothing can be scanned: the recipe's layers.
        kept = tuple(s for s in variant.set if not s.startswith("convert.layers="))
        variant = variant.model_copy(update={"set": kept})
        phases = work.recipe(variant).phases
        short = tuple(f"phases.{i}.tokens={STEPS * p.batch_tokens}" for i, p in enumerate(phases))
        try:
            train(small, variant, STUDENT, short)
            read(small, [(variant, STUDENT)], samples=1)
            print(f"rehearsed {variant.name}", flush=True)
        except Exception:  # the other mixers are to be seen as well
            traceback.print_exc()
            failed.append(variant.name)
    return failed


class _Rehearsal(Work):
    """The same plan in a folder of its own, on another teacher and the token files that are there."""

    def __init__(self, work: Work, folder: Path, teacher: str) -> None:
        super().__init__(work.name, folder)
        self.real = work
        self.plan = work.plan.model_copy(update={"teacher": TeacherPlan(model=teacher)})

    @property
    def heldout(self) -> Path:
        return self.real.heldout

    def tokens(self, kind: str, seq_len: int) -> Path:
        return self.real.tokens(kind, seq_len)


def main() -> None:
    ap = argparse.ArgumentParser(prog="python -m scripts.replicate.rehearsal", description=__doc__)
    ap.add_argument("--plan", required=True)
    ap.add_argument("--work", type=Path, required=True)
    args = ap.parse_args()
    torch.manual_seed(0)
    work = Work(args.plan, args.work)
    folder = args.work / "rehearsal"
    folder.mkdir(parents=True, exist_ok=True)
    kinds = dict.fromkeys(work.recipe(variant).convert.to for variant in work.plan.variants)
    wrong = [kind for kind, share in known_answers(kinds).items() if share < KNOWN_SHARE]
    failed = [*wrong, *rehearse(work, folder)]
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")
    (folder / "done").touch()


if __name__ == "__main__":
    main()
