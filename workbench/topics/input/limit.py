"""`time_limit`: what takes longer than it may is interrupted and named, down to the line that it was in."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from workbench.errors import DataError

__all__ = ["TimedOut", "time_limit"]


class TimedOut(DataError):
    """No batch came within the time limit."""


@contextmanager
def time_limit(seconds: float, what: str) -> Iterator[Callable[[], None]]:
    """Raise `TimedOut` in a block that gives no sign of life for `seconds`; the yielded function is the sign.

    It works by an alarm signal, so in the main thread of a process alone, and not on Windows; elsewhere there is no limit. What
    never returns to Python, inside a library, is interrupted as soon as it does.

    Args:
        seconds: between signs of life.
        what: for the message, such as "The loader gave no batch".
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield lambda: None
        return

    def stop(_: int, frame: FrameType | None) -> None:
        raise TimedOut(
            f"{what} for {seconds:g} s, which is the time limit (timeout_s). It was in {_place(frame)}. Look at what it waits "
            "for, or raise the limit."
        )

    before: Any = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield lambda: (signal.setitimer(signal.ITIMER_REAL, seconds), None)[1]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _place(frame: FrameType | None) -> str:
    """Name the innermost line that is the person's own, or the innermost one."""
    if frame is None:
        return "a place that is not known"
    innermost = frame
    walk: FrameType | None = frame
    while walk is not None:
        module = str(walk.f_globals.get("__name__", ""))
        if not module.startswith(
            ("torch", "workbench.", "threading", "multiprocessing", "queue", "selectors", "signal")
        ):
            innermost = walk
            break
        if module.startswith("torch.utils.data.dataloader"):
            return "its worker processes"
        walk = walk.f_back
    code = innermost.f_code
    return f"{code.co_qualname} ({code.co_filename.rsplit('/', 1)[-1]}:{innermost.f_lineno})"
