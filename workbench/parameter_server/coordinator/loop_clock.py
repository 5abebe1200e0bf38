"""`LoopClock`: how long a training loop has worked, pauses of whoever runs it left out (T13.5)."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["PAUSE_S", "LoopClock"]

PAUSE_S = 5.0
"""Without anything to do for longer is a pause of the loop, not its own slowness (rule of thumb: evaluating and saving are shorter)."""


class LoopClock:
    """Told whenever there may be something to do for the workers, or nothing any more; the caller sees that it is told by one thread at a time.

    Time between two functions counts when it is shorter than `PAUSE_S`: a loop that fetches one result after the other, or computes
    between them, keeps its workers waiting.

    Args:
        now: seconds of a clock that never goes back.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._since: float | None = None  # the newest change
        self._busy = False
        self._seconds = 0.0

    def tell(self, busy: bool) -> None:
        """Note whether any function waits or runs."""
        if busy == self._busy:
            return
        now = self._now()
        if self._since is not None and (self._busy or now - self._since < PAUSE_S):
            self._seconds += now - self._since
        self._since, self._busy = now, busy

    def seconds(self) -> float:
        """Return the time so far, up to the end of the newest function where none runs."""
        return self._seconds + (self._now() - self._since if self._busy and self._since is not None else 0.0)
