"""`WatchDog`: tells where all threads stand when no closure ends; `CoordinatorMetrics`: what happened so far (behaviours 26, 27)."""

import logging
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

from workbench.checks import check_number


class WatchDog(threading.Thread):
    """A thread that looks whether closures still finish, from its making to `stop`.

    After `timeout_s` without progress while `busy()` it logs the stacks of all threads, calls `on_stall`, and begins to wait anew.
    """

    def __init__(
        self, timeout_s: float, on_stall: Callable[[], object] | None = None, *, busy: Callable[[], bool]
    ) -> None:
        check_number("watchdog_s", timeout_s, below=threading.TIMEOUT_MAX)
        super().__init__(name="workbench-watchdog", daemon=True)
        self._timeout_s, self._on_stall, self._busy = timeout_s, on_stall, busy
        self._progress_at = time.monotonic()
        self._end = threading.Event()
        self.start()

    def report_progress(self) -> None:
        """Say that a closure finished."""
        self._progress_at = time.monotonic()

    def stop(self) -> None:
        """End the watch, however often this is called."""
        self._end.set()
        if self is not threading.current_thread():
            self.join(timeout=5.0)

    def run(self) -> None:
        """Look, sleep for what is left of the time, and look again."""
        log = logging.getLogger(__name__)
        while not self._end.wait(max(0.0, self._progress_at + self._timeout_s - time.monotonic())):
            if time.monotonic() < self._progress_at + self._timeout_s:
                continue
            self.report_progress()
            if not self._busy():
                continue
            try:
                log.warning("No closure finished for %g s. Where all threads stand:\n%s", self._timeout_s, _stacks())
                if self._on_stall is not None:
                    self._on_stall()
            except Exception:
                log.exception("what the watchdog does about a stall failed; it goes on watching")


def _stacks() -> str:
    """Return where each thread of this process stands, by its name, the most recent call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"Thread {names.get(ident, 'unknown')} ({ident}):\n{''.join(traceback.format_stack(frame)).rstrip()}"
        for ident, frame in sys._current_frames().items()
    )


class CoordinatorMetrics:
    """Counts that threads add to, and one report of them all."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = Counter(closures_executed=0, closures_failed=0, remote_value_fetch=0, worker_failures=0)
        self._busy_s: Counter[int] = Counter()
        self._closures: Counter[int] = Counter()
        self._recovery_s: list[float] = []

    def count(self, name: str) -> None:
        """Add one."""
        with self._lock:
            self._counts[name] += 1

    def ended(self, worker: int, seconds: float, *, failed: bool = False) -> None:
        """Note a closure that ended on a worker."""
        with self._lock:
            self._counts["closures_failed" if failed else "closures_executed"] += 1
            self._closures[worker] += 1
            self._busy_s[worker] += seconds  # type: ignore[assignment]

    def recovered(self, seconds: float) -> None:
        """Note a worker that is back."""
        with self._lock:
            self._recovery_s.append(seconds)

    def report(self) -> dict[str, Any]:
        """Return closures_executed, closures_failed, remote_value_fetch, worker_failures, and by worker closures and busy_s."""
        with self._lock:
            return dict(self._counts) | {
                "closures": dict(self._closures), "busy_s": dict(self._busy_s), "recovery_s": list(self._recovery_s),
            }  # fmt: skip
