"""Carries out a plan: what can run runs, several jobs at once; what is done is not done again.

    python -m scripts.replicate --plan h200 --work runs/replication --text train_*.jsonl.xz \
        --valid valid.jsonl.xz --test test.jsonl.xz --jobs 4 --minutes 26

Jobs are processes with a log each in WORK/logs. Prepared first are token files and documents, on the
processors, while a GPU finds out how the teacher trains fastest; a rehearsal takes random weights through
every mixer while the teacher trains, so that kernels are compiled and mistakes are seen. `--minutes` is when
the last job should have ended: none is begun that would take longer than the longest of its kind so far.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from regraft.distill.parent import MANIFEST
from regraft.errors import UserError
from scripts.replicate.job import finished, records_file
from scripts.replicate.plan import CONTROL, STUDENT, Work, model_name
from scripts.replicate.results import pack

POLL_SECONDS = 0.2
QUIET = "quiet"  # kind of a job that only takes noise away and reads


@dataclass
class Job:
    """A command, what has to be done before it, and how to see that it is done already."""

    name: str
    command: Callable[[], list[str]]
    needs: tuple[str, ...]
    done: Callable[[], bool]
    ready: Callable[[], bool] = lambda: True  # what else has to be there
    kind: str = ""  # jobs of one kind take about as long
    plain: bool = False  # without the packages of `--site`
    beside: bool = False  # takes no place among the `--jobs`
    last: bool = False  # of those beside: on the last GPU, since the teacher has the first
    optional: bool = False  # what needs it runs also where it failed
    log: dict[str, Any] = field(default_factory=dict)


def jobs(work: Work, args: argparse.Namespace) -> Iterator[Job]:
    """All jobs of a plan, the most important first."""
    here, plan = work.folder, work.plan
    at = ["--plan", args.plan, "--work", str(here)]
    texts = [f"--{name}={path}" for name in ("text", "valid", "test") for path in getattr(args, name)]
    data = ["scripts.replicate.data", *at, *texts, "--workers", str(args.workers)]
    corpus, speed, teacher = here / "corpus", here / "speed.json", here / "teacher"
    yield Job("corpus", lambda: [*data, "corpus"], (), (corpus / "meta.json").is_file, beside=True)
    ready = here / "data" / "ready"
    yield Job("data", lambda: [*data, "data"], ("corpus",), ready.is_file, beside=True)
    needs: tuple[str, ...] = ("data",)
    if plan.teacher.model is None:
        train = [*plan.teacher.train, "--out", str(teacher), "--corpus", str(corpus)]
        before: tuple[str, ...] = ("corpus",)
        if args.speed:
            timing = ["scripts.teacher.speed", *plan.teacher.train, "--speed-out", str(speed)]
            yield Job("speed", lambda: timing, (), speed.is_file, plain=True, beside=True, optional=True)
            before = ("corpus", "speed")
        yield Job(
            "teacher", lambda: ["scripts.teacher", *train, *_kernels(speed)], before,
            (teacher / "teacher.json").is_file, plain=True, beside=True,
        )  # fmt: skip
        needs = ("data", "teacher")
    rehearsed = here / "rehearsal" / "done"
    if args.rehearse:
        rehearsal = ["scripts.replicate.rehearsal", *at]
        yield Job("rehearsal", lambda: rehearsal, ("data",), rehearsed.is_file, beside=True, last=True)
    job = ["scripts.replicate.job"]
    yield Job(
        "teacher-reads", lambda: [*job, "teacher", *at], needs, records_file(here, "teacher").is_file,
    )  # fmt: skip
    for variant in plan.variants:
        if args.only and variant.name not in args.only:
            continue
        source = work.source(variant)
        yield Job(
            variant.name, lambda name=variant.name: [*job, name, *at], needs,  # type: ignore[misc]
            records_file(here, model_name(variant, STUDENT)).is_file,
            ready=lambda source=source: source is None or finished(source),  # type: ignore[misc]
            kind=QUIET if variant.quiet else STUDENT,
        )  # fmt: skip
        if variant.control is True:  # beside its student, whose conversion says which layers it trains
            yield Job(
                f"{variant.name}-control", lambda name=variant.name: [*job, name, *at, "--control"], needs,  # type: ignore[misc]
                records_file(here, model_name(variant, CONTROL)).is_file,
                ready=functools.partial(_may_control, work.run(variant), source), kind=CONTROL,
            )  # fmt: skip


def _may_control(run: Path, before: Path | None) -> bool:
    """Once the run says what it trains, and where it goes on from another, that one's control is there."""
    return (run / MANIFEST).is_file() and (before is None or finished(before / CONTROL))


def _kernels(speed: Path) -> list[str]:
    return ["--kernels", json.loads(speed.read_text())["chosen"]] if speed.is_file() else []


class Runner:
    """Starts jobs as soon as they can run and waits for all of them."""

    def __init__(self, work: Work, args: argparse.Namespace) -> None:
        self.work, self.args = work, args
        self.started = time.time()
        self.todo = list(jobs(work, args))
        self.running: dict[str, tuple[Job, subprocess.Popen[bytes], float]] = {}
        self.done: set[str] = set()
        self.failed: set[str] = set()
        self.longest: dict[str, float] = {}
        self.slots = list(range(args.jobs))

    def run(self) -> bool:
        """Whether all went well."""
        (self.work.folder / "logs").mkdir(parents=True, exist_ok=True)
        while self.todo or self.running:
            for job in list(self.todo):
                self._consider(job)
            for job, process, began in list(self.running.values()):
                if process.poll() is not None:
                    self._ended(job, process.returncode, time.time() - began)
            if self.todo and not self.running and not any(self._can(job) for job in self.todo):
                break
            time.sleep(POLL_SECONDS)
        for job in self.todo:
            self._say(f"left out: {job.name}")
        return not self.failed and not self.todo

    def _can(self, job: Job) -> bool:
        return self.done.issuperset(job.needs) and job.ready() and not self._late(job)

    def _late(self, job: Job) -> bool:
        expected = self.longest.get(job.kind, 0.0)
        return time.time() - self.started + expected > 60 * self.args.minutes

    def _consider(self, job: Job) -> None:
        if job.done():
            self.done.add(job.name)
            self.todo.remove(job)
            return
        if self._can(job) and (job.beside or self.slots):
            self.todo.remove(job)
            slot = self._place(job)
            job.log["slot"] = slot
            environment = self._environment(job, slot)
            with (self.work.folder / "logs" / f"{job.name}.log").open("ab") as log:
                process = subprocess.Popen(
                    [sys.executable, "-m", *job.command()], stdout=log, stderr=log, env=environment
                )
            self.running[job.name] = (job, process, time.time())
            self._say(f"begins: {job.name}")

    def _place(self, job: Job) -> int:
        if job.beside:
            return self.args.gpus - 1 if job.last else 0
        return self.slots.pop(0)

    def _environment(self, job: Job, slot: int) -> dict[str, str]:
        cache = str(self.work.folder / "cache")
        found = {**os.environ, "PYTHONUNBUFFERED": "1", "REGRAFT_CACHE": cache}
        if self.args.gpus > 1:
            found["CUDA_VISIBLE_DEVICES"] = str(slot % self.args.gpus)
        if self.args.site and not job.plain:
            found["PYTHONPATH"] = f"{self.args.site}:{os.environ.get('PYTHONPATH', '')}"
        return found

    def _ended(self, job: Job, code: int, seconds: float) -> None:
        del self.running[job.name]
        if not job.beside:
            self.slots.append(job.log["slot"])
        good = code == 0 and job.done()
        if not good:
            self.failed.add(job.name)
        if good or job.optional:
            self.done.add(job.name)
        self.longest[job.kind] = max(self.longest.get(job.kind, 0.0), seconds)
        self._say(f"{'ends' if good else f'FAILED ({code})'}: {job.name}, {seconds:.0f} s")
        with (self.work.folder / "jobs.jsonl").open("a") as file:
            file.write(json.dumps({"job": job.name, "seconds": round(seconds, 1), "code": code}) + "\n")
        if not good:
            log = (self.work.folder / "logs" / f"{job.name}.log").read_text(errors="replace")
            print("\n".join(log.splitlines()[-12:]), flush=True)

    def _say(self, line: str) -> None:
        print(f"{time.time() - self.started:6.0f} s  {line}", flush=True)


def main() -> None:
    ap = argparse.ArgumentParser(
        prog="python -m scripts.replicate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    ap.add_argument("--plan", default="h200", help="a plan in scripts/replicate/plans, or a file")
    ap.add_argument("--work", type=Path, required=True, help="folder of everything; resumed if it exists")
    ap.add_argument("--text", nargs="+", type=Path, default=[], help="books for training, .jsonl.xz")
    ap.add_argument("--valid", nargs="+", type=Path, default=[], help="held-out books")
    ap.add_argument("--test", nargs="*", type=Path, default=[], help="more held-out books")
    ap.add_argument("--jobs", type=int, default=1, help="students at once")
    ap.add_argument("--gpus", type=int, default=1, help="GPUs that jobs are spread over")
    ap.add_argument("--minutes", type=float, default=1e9, help="when the last job should have ended")
    ap.add_argument("--only", nargs="*", default=[], help="these variants only")
    # starting a process takes longer than what it does: of 24 on a new machine minutes went into imports
    workers = min(8, os.cpu_count() or 1)
    ap.add_argument("--workers", type=int, default=workers, help="processes that make data")
    ap.add_argument("--site", help="packages for all jobs but the teacher's training")
    ap.add_argument("--speed", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    ap.add_argument("--rehearse", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    args = ap.parse_args()
    try:
        work = Work(args.plan, args.work.resolve())
        good = Runner(work, args).run()
    except UserError as error:
        raise SystemExit(f"error: {error}") from error
    out = pack(work)
    print(f"results: {out}", flush=True)
    raise SystemExit(0 if good else 1)
