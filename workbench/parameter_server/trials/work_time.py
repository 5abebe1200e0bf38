"""`WorkTime`: what workers do with their time while updates are asked for (T13.5)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from workbench.parameter_server.trials.worker_trial import Update

PARTS = ("data_wait_s", "pull_s", "compute_s", "push_s")
"""Of an update, on the worker that makes it; the rest of a worker's time it has nothing to do."""


@dataclass
class WorkTime:
    """Sums over the stretches of a trial; what is left of `workers * training_s` the workers were idle.

    Attributes:
        workers: how many.
        training_s: from the first function of a stretch that is scheduled to the end of its last one, summed.
        closures: functions that were scheduled in them.
        stretches: how often everybody waited for everybody.
        by_worker: for each worker `PARTS` and "updates".
    """

    workers: int
    training_s: float = 0.0
    closures: int = 0
    stretches: int = 0
    by_worker: list[dict[str, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Begin with zeros."""
        self.by_worker = [dict.fromkeys((*PARTS, "updates"), 0.0) for _ in range(self.workers)]

    def add(self, seconds: float, closures: int, updates: Sequence[Update]) -> None:
        """Count one stretch."""
        self.training_s += seconds
        self.closures += closures
        self.stretches += 1
        for update in updates:
            mine = self.by_worker[update.worker]
            mine["updates"] += 1
            for part in PARTS:
                mine[part] += getattr(update, part)

    @property
    def updates(self) -> int:
        """How many updates were made."""
        return int(sum(mine["updates"] for mine in self.by_worker))

    @property
    def step_s(self) -> list[float]:
        """Mean time of an update on each worker that made one."""
        return [sum(mine[part] for part in PARTS) / mine["updates"] for mine in self.by_worker if mine["updates"]]

    @property
    def dispatch_s(self) -> float:
        """Mean time that a closure costs a worker beside its updates; NaN before the first."""
        idle = max(0.0, self.workers * self.training_s - self._busy_s)
        return idle / self.closures if self.closures else math.nan

    @property
    def _busy_s(self) -> float:
        return sum(mine[part] for mine in self.by_worker for part in PARTS)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return {
            "training_s": self.training_s,
            "updates": self.updates,
            "closures_timed": self.closures,
            "stretches": self.stretches,
            "work": self.by_worker,
        }
