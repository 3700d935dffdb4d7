"""Random weights of the teacher's shape through every kind of job: compiles kernels, shows mistakes early."""

from __future__ import annotations

import argparse
import traceback
from pathlib import Path

import torch

from regraft.assets import teacher_dir
from scripts.replicate.job import read, train
from scripts.replicate.plan import STUDENT, TeacherPlan, Work
from scripts.teacher.model import export, new_model
from scripts.teacher.train import arguments

STEPS = 2  # of each phase
VOCABULARY = 8192


def rehearse(work: Work, folder: Path) -> list[str]:
    """Every mixer of the plan for two steps a phase, one document a cell; names of those that failed."""
    args = arguments([*work.plan.teacher.train, "--out", str(folder)])
    teacher = folder / "teacher"
    export(new_model(args, VOCABULARY), teacher, teacher_dir())
    small = _Rehearsal(work, folder, str(teacher))
    failed, seen = [], set()
    for variant in work.plan.variants:
        recipe = work.recipe(variant)
        kind = (recipe.convert.to, recipe.convert.noise_groups, recipe.data.seq_len)
        if kind in seen:
            continue
        seen.add(kind)
        variant = variant.model_copy(update={"set": tuple(s for s in variant.set if "scan:" not in s)})
        phases = work.recipe(variant).phases
        short = tuple(f"phases.{i}.tokens={STEPS * p.batch_tokens}" for i, p in enumerate(phases))
        try:
            train(small, variant, short)
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
    failed = rehearse(work, folder)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")
    (folder / "done").touch()


if __name__ == "__main__":
    main()
