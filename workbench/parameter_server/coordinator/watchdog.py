"""`WatchDog`: says so, with the stacks of all threads, when nothing has finished for a while."""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from typing import TextIO

from workbench.errors import UsageError

JOIN_S = 5.0  # rule of thumb: how long `stop` waits for a callback that is running


class WatchDog:
    """A thread that looks whether closures still finish; it starts at once and ends with `stop`, or with its owner.

    After `timeout_s` without progress it writes the stacks of all threads, calls `on_stall`, and begins to wait anew.

    Args:
        timeout_s: without a closure finished, in seconds.
        on_stall: called in the thread of the watch, after the stacks were written; what it raises is logged.
        busy: returns whether there is anything to finish; while there is not, no time passes. None is always.
        stream: where the stacks go; None is the log, as a warning.
        clock: seconds that only grow.
        wait: sleeps for so many seconds, less where it shall end, and returns whether it shall; None is the usual one.

    Raises:
        UsageError: `timeout_s` is no positive time. To have no watch, make none.
    """

    def __init__(
        self,
        timeout_s: float,
        on_stall: Callable[[], object] | None = None,
        *,
        busy: Callable[[], bool] | None = None,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], bool] | None = None,
    ) -> None:
        if isinstance(timeout_s, bool) or not 0 < timeout_s <= threading.TIMEOUT_MAX:
            raise UsageError(
                f"timeout_s={timeout_s!r} of the watchdog must be a number of seconds above 0. Leave the watchdog out to "
                "have none."
            )
        self.timeout_s = timeout_s
        self.stalls = 0
        self._on_stall, self._busy, self._stream, self._clock = on_stall, busy, stream, clock
        self._since = clock()
        self._end = threading.Event()
        weakref.finalize(
            self, self._end.set
        )  # an owner that is forgotten, and with it this object, ends the thread too
        self._thread = threading.Thread(
            target=_watch,
            args=(weakref.ref(self), self._end, wait or self._end.wait),
            name="workbench-watchdog",
            daemon=True,
        )
        self._thread.start()

    def report_progress(self) -> None:
        """Say that a closure finished."""
        self._since = self._clock()

    def stop(self) -> None:
        """End the watch; nothing is left of it, however often this is called."""
        self._end.set()
        if self._thread is not threading.current_thread():
            self._thread.join(JOIN_S)

    def _look(self) -> float:
        """Return the seconds until there is something to say, after saying it if it is due."""
        now = self._clock()
        left = self._since + self.timeout_s - now
        if left > 0:
            return left
        if self._busy is not None and not self._busy():
            self._since = now
            return self.timeout_s
        self._since = now
        self.stalls += 1
        try:
            self._say(f"No closure finished for {self.timeout_s:g} s. Where all threads stand:\n{all_stacks()}")
            if self._on_stall is not None:
                self._on_stall()
        except Exception:
            logging.getLogger(__name__).exception("what the watchdog does about a stall failed; it goes on watching")
        return self.timeout_s

    def _say(self, text: str) -> None:
        if self._stream is None:
            logging.getLogger(__name__).warning("%s", text)
        else:
            self._stream.write(text + "\n")
            self._stream.flush()


def _watch(dog_of: weakref.ref[WatchDog], end: threading.Event, wait: Callable[[float], bool]) -> None:
    """Look, sleep, and look again, holding on to the dog only while it looks."""
    while not end.is_set():
        dog = dog_of()
        if dog is None:
            return
        left = dog._look()
        del dog
        if wait(left):
            return


def all_stacks() -> str:
    """Return where each thread of this process stands, by its name, the most recent call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"Thread {names.get(ident, 'unknown')} ({ident}):\n{''.join(traceback.format_stack(frame)).rstrip()}"
        for ident, frame in sys._current_frames().items()
    )
