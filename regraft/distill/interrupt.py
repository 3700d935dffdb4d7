"""Ctrl-C and a TERM end a run after the step in hand."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interruptible() -> Iterator[list[bool]]:
    """Turns the first Ctrl-C (or a TERM) into a wish to stop after this step; a second Ctrl-C stops at once.

    Yields a list of one flag. In a thread other than the main one, where no signal arrives, it stays False.
    """
    stop = [False]
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def wish(*_: object) -> None:
        stop[0] = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    old = {s: signal.signal(s, wish) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
