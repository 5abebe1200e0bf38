"""One progress bar per study, never one per epoch; Ctrl-C and the Interrupt button: the step in progress is finished first."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from workbench.errors import StudyInterrupted

Progress = Callable[[int], None]
_OF_STAGES = (
    "{l_bar}{bar:20}| {elapsed}<{remaining}{postfix}"  # counts and rate would leave no room for what is trained
)
_UNKNOWN = "{desc}: {elapsed}{postfix}"  # before anything is counted
_SMOOTHING = 0.01
"""Of the pace by which the time left is told: over some ten seconds, as parts are trained at different ones (rule of thumb)."""
_BEYOND = _OF_STAGES.replace("<{remaining}", "")  # nobody knows how much more there is
_ELSE = 46
"""Columns of a bar beside label and status."""
TOLD = "application/vnd.workbench.progress+json"
"""Type of the message by which a kernel says how far it is to `workbench run`, which sets `WORKBENCH_PROGRESS`."""
_TOLD_S = 1.0


class ProgressBar:
    """A tqdm bar and its status line, or a line for each part, or nothing.

    Args:
        bar: of tqdm; None writes lines.
        label: what a line begins with; "" writes none.
        tell: is given label and part, and the share and time left, as a part begins and then at most once a second.
    """

    def __init__(self, bar: Any = None, *, label: str = "", tell: Callable[[str, str], None] | None = None) -> None:
        self._bar, self._label, self._said, self._tell, self._told_at = bar, label, "", tell, 0.0
        self._total, self._done, self._skipped, self._began = 0, 0, 0, time.monotonic()

    @property
    def done(self) -> int:
        """Updates that were counted."""
        return self._done

    def skip(self, steps: int) -> None:
        """Count updates that an earlier call has made: they say nothing of how fast this one is."""
        self._skipped += steps
        if self._bar is not None:
            self._bar.initial += steps
        self.advance(steps)

    def expect(self, steps: int) -> None:
        """Say how many updates there will be, about; more only make it longer."""
        self._total = steps
        if self._bar is not None:
            self._bar.total = max(steps, self._bar.n)
            self._bar.bar_format = _OF_STAGES if self._bar.n < steps else _BEYOND

    def advance(self, steps: int) -> None:
        """Count `steps` more updates."""
        first = self._done == self._skipped
        self._done += steps
        if self._bar is not None:
            if first:
                self._bar.bar_format = self._bar.bar_format if self._bar.total is not None else None
                self._bar.last_print_t = (
                    time.time()
                )  # what came before the first update says nothing of how long one takes
            if self._bar.total is not None and self._bar.n + steps > self._bar.total:
                self._bar.total = self._bar.n + steps
                self._bar.bar_format = _BEYOND
            self._bar.update(steps)
        elif self._tell is not None and self._said and time.monotonic() - self._told_at > _TOLD_S:
            self._say()

    def status(self, part: str, more: str = "") -> None:
        """Say which part is being trained, and, where there is a bar, `more` of it."""
        if self._bar is not None:
            text = part + more
            wide = self._bar.format_dict["ncols"]
            room = max((wide or 200) - len(self._bar.desc or "") - _ELSE, 12)
            self._bar.set_postfix_str(textwrap.shorten(text, room, placeholder=" …"))
        elif self._label and part != self._said:
            self._said = part
            self._say()

    def _say(self) -> None:
        what, left = f"{self._label}: {self._said}", self._left()
        if self._tell is None:
            print(what + left, file=sys.stderr, flush=True)
        else:
            self._told_at = time.monotonic()
            self._tell(what, left)

    def _left(self) -> str:
        """Return the share that is done and the time that is left, in brackets; "" where neither is known."""
        made = self._done - self._skipped
        if not made or not self._done < self._total:
            return f" ({self._done / self._total:.0%})" if 0 < self._done < self._total else ""
        left = (time.monotonic() - self._began) * (self._total - self._done) / made
        told = f"{left / 60:.0f} min" if left >= 90 else f"{left:.0f} s"
        return f" ({self._done / self._total:.0%}, about {told} left)"


@contextmanager
def progress_bar(total: int | None, label: str, *, show: bool) -> Iterator[ProgressBar]:
    """Yield the bar of one study of `total` updates, None where it decides as it goes; silent with `WORKBENCH_LIVE=0`.

    Where standard error is neither a terminal nor a notebook's, as in a log of a batch job, each part is a line of its own.
    """
    if _told:
        yield ProgressBar(label=label, tell=_told[-1])
        return
    if not show or os.environ.get("WORKBENCH_LIVE") == "0":
        yield ProgressBar()
        return
    if "ipykernel" not in sys.modules and not sys.stderr.isatty():
        yield ProgressBar(label=label)
        return
    from tqdm.auto import tqdm

    look: dict[str, Any] = {
        "bar_format": None if total else _UNKNOWN,
        "dynamic_ncols": True,
        "leave": False,
        "smoothing": _SMOOTHING,
    }
    ended = threading.Event()
    with tqdm(total=total, desc=label, unit=" steps", file=sys.stderr, **look) as bar:
        if total is None and sys.stderr.isatty():
            threading.Thread(target=_tick, args=(bar, ended), daemon=True).start()
        try:
            yield ProgressBar(bar)
        finally:
            ended.set()


def _tick(bar: Any, ended: threading.Event) -> None:
    """Show the time that goes by where no update is counted."""
    while not ended.wait(1.0):
        bar.refresh()


@contextmanager
def progress_to(tell: Callable[[str, str], None]) -> Iterator[None]:
    """Give the progress of every study within the block to `tell`, as `ProgressBar` does."""
    _told.append(tell)
    try:
        yield
    finally:
        _told.remove(tell)


_told: list[Callable[[str, str], None]] = []


def in_script() -> bool:
    """Whether progress is shown without being asked for: in a script, and not in a notebook, which has the live view."""
    return "ipykernel" not in sys.modules and os.environ.get("WORKBENCH_LIVE") != "0"


class StopRequest:
    """Whether a stop was requested; the training loop looks at it once a step."""

    def __init__(self) -> None:
        self.requested = False


@contextmanager
def interruptible(path: Path | None = None) -> Iterator[None]:
    """Say of Ctrl-C in one line, and without a traceback, that what was measured is kept, and in which folder."""
    try:
        yield
    except StudyInterrupted:
        raise
    except KeyboardInterrupt:
        kept = (
            "goes on from what is kept, or begins anew where nothing is"
            if path is None
            else f"resumes from what is kept in {path}"
        )
        raise StudyInterrupted(f"stopped; the same command or cell {kept}.") from None


@contextmanager
def finished_first() -> Iterator[None]:
    """Hold SIGINT back until the block is done: a compiled package whose import was broken off cannot be imported again in this process."""
    held: list[int] = []
    in_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, lambda number, _: held.append(number)) if in_main else None
    try:
        yield
    finally:
        if in_main:
            signal.signal(signal.SIGINT, before)
        if held:
            signal.raise_signal(signal.SIGINT)


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
