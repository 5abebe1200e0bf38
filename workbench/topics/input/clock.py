"""`now`: wall time, processor time, time in the scheduler's queue and sleeps: waiting is told from working on a busy machine."""

from __future__ import annotations

import math
import time
from typing import NamedTuple

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

__all__ = ["Spent", "now", "queued_s"]

_SCHEDSTAT = "/proc/thread-self/schedstat"


class Spent(NamedTuple):
    """Seconds that were spent, or, as a moment, since some fixed point in the past.

    Attributes:
        wall_s: on the wall clock.
        cpu_s: on processors, by all threads of the process.
        queued_s: that this thread was ready to run and other processes had the processors; 0 where the system does not tell.
        sleeps: times that this thread gave its processor up to wait for something; NaN where the system does not tell.
    """

    wall_s: float
    cpu_s: float
    queued_s: float
    sleeps: float = math.nan

    @property
    def blocked_s(self) -> float:
        """Seconds that the thread waited for something else than a processor: a disk, a network, a lock, a sleep."""
        return 0.0 if self.sleeps == 0 else self._idle_s

    @property
    def others_s(self) -> float:
        """Seconds that other programs had the processor: in the queue, or taken from a thread that never went to sleep."""
        return self.queued_s + (self._idle_s if self.sleeps == 0 else 0.0)

    @property
    def _idle_s(self) -> float:
        return max(0.0, self.wall_s - self.cpu_s - self.queued_s)

    def since(self, earlier: Spent) -> Spent:
        """Return what passed between two moments of one thread."""
        return Spent(
            self.wall_s - earlier.wall_s,
            self.cpu_s - earlier.cpu_s,
            max(0.0, self.queued_s - earlier.queued_s),
            self.sleeps - earlier.sleeps,
        )


def now() -> Spent:
    """Return this moment; it takes about 20 microseconds."""
    return Spent(time.perf_counter(), time.process_time(), queued_s(), _sleeps())


def _sleeps() -> float:
    if not hasattr(resource, "RUSAGE_THREAD"):
        return math.nan
    return float(resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw)


def queued_s() -> float:
    """Return the seconds that this thread has been ready to run without a processor; 0 where the system does not tell."""
    try:
        with open(_SCHEDSTAT, "rb") as file:
            return int(file.read().split()[1]) * 1e-9
    except (OSError, IndexError, ValueError):
        return 0.0
