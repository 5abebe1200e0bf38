"""Ctrl-C and the Interrupt button: the step in progress is finished, then everything is saved."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["StopRequest", "catch_interrupt"]


class StopRequest:
    """Whether a stop was asked for; the training loop looks at it once a step."""

    def __init__(self) -> None:
        self.requested = False


@contextmanager
def catch_interrupt() -> Iterator[StopRequest]:
    """Turn the first SIGINT into a request; a second one raises `KeyboardInterrupt` at once.

    Outside the main thread, where signals cannot be caught, the request is never set.
    """
    stop = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def on_signal(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        if stop.requested:
            raise KeyboardInterrupt
        stop.requested = True

    before = signal.signal(signal.SIGINT, on_signal)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)
