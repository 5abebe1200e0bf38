"""Ctrl-C and the Interrupt button: the step in progress is finished, then everything is saved."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """Whether a stop was asked for; the training loop looks at it once a step."""

    def __init__(self) -> None:
        self.requested = False


_listening: list[StopRequest] = []


def ask_to_stop() -> None:
    """Set the request of all that now train in this process, in whichever thread, as Ctrl-C does in the main one."""
    for stop in tuple(_listening):
        stop.requested = True


@contextmanager
def catch_interrupt() -> Iterator[StopRequest]:
    """Turn the first SIGINT into a request; a second one raises `KeyboardInterrupt` at once.

    Outside the main thread, where signals cannot be caught, only `ask_to_stop` sets the request.
    """
    stop = StopRequest()

    def on_signal(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        if stop.requested:
            raise KeyboardInterrupt
        stop.requested = True

    in_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, on_signal) if in_main else None
    _listening.append(stop)
    try:
        yield stop
    finally:
        _listening.remove(stop)
        if in_main:
            signal.signal(signal.SIGINT, before)
