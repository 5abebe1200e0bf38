"""`ended_like_ctrl_c`: whoever ends this process lets it save what it has."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def ended_like_ctrl_c() -> Iterator[None]:
    """Have a closed terminal and SIGTERM do what Ctrl-C does, where they would end this process alone and leave the person's program running."""
    names = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {name: signal.signal(name, _as_ctrl_c) for name in names if signal.getsignal(name) == signal.SIG_DFL}
    try:
        yield
    finally:
        for name, does in before.items():
            signal.signal(name, does)


def _as_ctrl_c(_: int, frame: FrameType | None) -> None:
    """Do what Ctrl-C does now: a trainer finishes its step and saves everything. Background jobs of a shell ignore Ctrl-C, but not this."""
    does = signal.getsignal(signal.SIGINT)
    if callable(does):
        does(signal.SIGINT, frame)
    else:
        raise KeyboardInterrupt
