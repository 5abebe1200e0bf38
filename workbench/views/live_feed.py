"""`LiveFeed`: what this process writes, as messages to a page, at most five a second."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from workbench.record.watch import SHOW_SECONDS, Watcher
from workbench.views.study_curves import Message, StudyCurves

__all__ = ["LiveFeed"]

WHOLE_AGAIN = (0.5, 1.5, 4.0)
"""Seconds after which a page that was not ready yet is given all of it once more, in case it could not ask."""


class LiveFeed(Watcher):
    """Sends the newest open study to a page.

    Args:
        send: takes JSON values and buffers.
        clock: in seconds.
    """

    def __init__(
        self, send: Callable[[dict[str, Any], list[Any]], object], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._send, self._clock = send, clock
        self._studies: dict[Path, StudyCurves] = {}
        self._open: list[Path] = []
        self._shown: StudyCurves | None = None
        self._again: list[float] = []
        self._sent_at = -SHOW_SECONDS
        self._number = 0
        self._lock = threading.RLock()  # a page may ask from another thread

    def everything(self) -> None:
        """Send all of the study that is shown, to a page that has just been opened."""
        with self._lock:
            if self._shown is not None:
                self._out(self._shown.everything())

    def on_study(self, path: Path, *, created: bool) -> None:
        """Show the study that was opened last."""
        with self._lock:
            if path not in self._studies:
                self._studies[path] = StudyCurves(path, loaded=not created)
            self._open.append(path)
            self._show(path)

    def on_closed(self, path: Path) -> None:
        """Go back to the study that this one was a part of."""
        with self._lock:
            if path in self._open:
                self._open.remove(path)
            if self._open:
                self._show(self._open[-1])
            self._tick(now=True)

    def on_trial(self, path: Path, number: int, *, stage: str, config: Mapping[str, Any]) -> None:
        """Note a trial."""
        with self._lock:
            if path in self._studies:
                self._studies[path].trial(number, stage, config)

    def on_rows(self, path: Path, table: str, columns: Mapping[str, Any]) -> None:
        """Note rows of steps; others only remind of the time."""
        with self._lock:
            if table == "steps" and path in self._studies:
                self._studies[path].rows(columns)
            self._tick()

    def on_event(self, path: Path, number: int, event: Mapping[str, Any]) -> None:
        """Note how a trial stands."""
        with self._lock:
            if path in self._studies and "state" in event:
                self._studies[path].state(number, str(event["state"]))
            self._tick()

    def on_rewind(self, path: Path, number: int, step: int) -> None:
        """Forget rows that come again."""
        with self._lock:
            if path in self._studies:
                self._studies[path].rewind(number, step)

    def _show(self, path: Path) -> None:
        if self._shown is not self._studies[path]:
            self._shown = self._studies[path]
            self._shown.whole = True
            now = self._clock()
            self._again = [now + seconds for seconds in WHOLE_AGAIN]

    def _tick(self, *, now: bool = False) -> None:
        time_s = self._clock()
        if self._shown is None or (time_s - self._sent_at < SHOW_SECONDS and not now):
            return
        self._sent_at = time_s
        if self._again and time_s >= self._again[0]:
            del self._again[0]
            self._shown.whole = True
        self._out(self._shown.message(time_s))

    def _out(self, message: Message) -> None:
        content, buffers = message
        self._send({**content, "number": self._number}, buffers)
        self._number += 1
