"""Cells in this process or in several, with the progress of all of them."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import queue
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from typing import Any

Tick = Callable[[float], None]  # work done since the last call, in the unit of `Cell.work`

_ticks: Any = None  # a worker's way to report progress


def probe_of(name: str) -> Any:
    """The module of a probe; `regraft.probes.runner.Probe` says what it offers."""
    return importlib.import_module(f"regraft.probes.{name}")


def run_all(
    probe: str,
    cells: Sequence[dict[str, Any]],
    device: str,
    jobs: int,
    tick: Tick,
    more: Callable[[], bool] = lambda: True,
) -> Iterator[tuple[int, dict[str, Any], float]]:
    """Run cells of a probe; yields index, result and seconds of each as it is done, in any order.

    `more` is asked before each begins; those that are left where it says no are not run. An interrupt or an
    error ends the other processes.
    """
    if jobs == 1 or len(cells) < 2:
        for index, settings in enumerate(cells):
            if not more():
                return
            yield index, *_timed(probe, settings, device, tick)
        return
    context = multiprocessing.get_context("spawn")  # a forked process cannot use a GPU
    with context.Manager() as manager:
        ticks = manager.Queue()
        threads = max(1, (os.cpu_count() or 1) // jobs)
        pool = ProcessPoolExecutor(jobs, context, _start, (ticks, threads))
        try:
            left = iter(enumerate(cells))
            waiting: dict[Future[tuple[dict[str, Any], float]], int] = {}
            while True:
                while len(waiting) < jobs and more() and (following := next(left, None)) is not None:
                    waiting[pool.submit(_work, probe, following[1], device)] = following[0]
                if not waiting:
                    break
                done, _ = wait(waiting, timeout=0.2, return_when=FIRST_COMPLETED)
                _drain(ticks, tick)
                for future in done:
                    yield waiting.pop(future), *future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()
            raise
        pool.shutdown()


def _timed(probe: str, settings: dict[str, Any], device: str, tick: Tick) -> tuple[dict[str, Any], float]:
    start = time.monotonic()
    result = probe_of(probe).run(settings, device, tick)
    return result, time.monotonic() - start


def _work(probe: str, settings: dict[str, Any], device: str) -> tuple[dict[str, Any], float]:
    gathered = Gathered(_ticks.put)
    try:
        return _timed(probe, settings, device, gathered)
    finally:
        gathered.hand_on()


class Gathered:
    """Progress handed on every `seconds` at most: a message between processes takes as long as a step."""

    def __init__(self, tick: Tick, seconds: float = 0.5) -> None:
        self.tick, self.seconds = tick, seconds
        self.total, self.last = 0.0, time.monotonic()

    def __call__(self, amount: float) -> None:
        """Take note of some work."""
        self.total += amount
        if time.monotonic() - self.last >= self.seconds:
            self.hand_on()

    def hand_on(self) -> None:
        """Tell all that was not told."""
        self.tick(self.total)
        self.total, self.last = 0.0, time.monotonic()


def _start(ticks: Any, threads: int) -> None:
    """Prepare a worker: its interrupts come from the first process."""
    import torch

    global _ticks
    _ticks = ticks
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(threads)


def _drain(ticks: Any, tick: Tick) -> None:
    total = 0.0
    try:
        while True:
            total += ticks.get_nowait()
    except queue.Empty:
        if total:
            tick(total)
