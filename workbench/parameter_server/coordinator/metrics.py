"""`CoordinatorMetrics`: what the coordinator counts (behaviour 27)."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

__all__ = ["CoordinatorMetrics"]


class CoordinatorMetrics:
    """Counts that threads add to, and one report of them all."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
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

    def executed(self) -> int:
        """Return how many closures ended, failed ones too."""
        with self._lock:
            return self._counts["closures_executed"] + self._counts["closures_failed"]

    def report(self) -> dict[str, Any]:
        """Return closures_executed, closures_failed, remote_value_fetch, worker_failures, and by worker closures and busy_s."""
        names = ("closures_executed", "closures_failed", "remote_value_fetch", "worker_failures")
        with self._lock:
            return {name: self._counts[name] for name in names} | {
                "closures": dict(self._closures), "busy_s": dict(self._busy_s), "recovery_s": list(self._recovery_s),
            }  # fmt: skip
