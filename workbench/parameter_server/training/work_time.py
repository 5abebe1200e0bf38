"""What workers do with their time, and how many updates a worker should make each time it is asked (T13.5, T13.7, T14.3)."""

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from workbench.parameter_server.context import PARTS

MEASURED = 4  # updates a worker, one by one, before a size is chosen (rule of thumb)
SIZES = 32  # sizes of a closure that are tried, in even ratios from 1 to all updates


class Update(NamedTuple):
    """What one update was like, as the worker that made it saw it."""

    step: int  # how many updates the servers had applied before it
    worker: int
    loss: float  # weighted mean over the batch, before the update
    loss_se: float
    grad_norm: float  # before clipping
    clipped: bool
    staleness_steps: int  # updates of others between reading the parameters and applying this one
    data_wait_s: float  # for its batch
    pull_s: float
    compute_s: float  # forward and backward pass
    push_s: float  # until every server had applied the gradient


class WorkTime:
    """Sums over the stretches of a trial, from one wait for everybody to the next; what is left of `workers * training_s` the workers were idle."""

    def __init__(self, workers: int) -> None:
        self.training_s, self.closures, self.stretches = 0.0, 0, 0
        self.by_worker = [dict.fromkeys((*PARTS, "updates"), 0.0) for _ in range(workers)]

    def add(self, seconds: float, closures: int, updates: Iterable[tuple[int, Mapping[str, Any]]]) -> None:
        """Count one stretch; of each update who made it, and the seconds of its `PARTS`, 0 where one is missing."""
        self.training_s += seconds
        self.closures += closures
        self.stretches += 1
        for worker, spent in updates:
            mine = self.by_worker[worker]
            mine["updates"] += 1
            for part in PARTS:
                mine[part] += spent.get(part, 0.0)

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
        busy = sum(mine[part] for mine in self.by_worker for part in PARTS)
        idle = max(0.0, len(self.by_worker) * self.training_s - busy)
        return idle / self.closures if self.closures else math.nan

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return {
            "training_s": self.training_s, "updates": self.updates, "closures_timed": self.closures, "stretches": self.stretches,
            "work": self.by_worker,
        }  # fmt: skip


class ClosureSize:
    """How many updates a closure has: as asked, or "auto", which takes `closure_size` of what the first updates cost, one a closure."""

    def __init__(self, asked: int | Literal["auto"], spent: WorkTime) -> None:
        self._asked, self._spent, self._begun = asked, spent, False
        self._costs: tuple[float, list[float]] | None = None

    def note(self, seconds: float, closures: int, updates: Iterable[tuple[int, Mapping[str, Any]]]) -> None:
        """Count one stretch, as `WorkTime.add` does, but for the first, which makes what workers keep."""
        if self._begun:
            self._spent.add(seconds, closures, updates)
        self._begun = True

    def plan(self, updates: int) -> tuple[int, int]:
        """Return how many of these updates to make before everybody waits for everybody, and how many a closure."""
        if not self._begun:
            return 1, 1
        if self._asked != "auto":
            return updates, self._asked
        if self._costs is None and self._spent.updates:
            self._costs = self._spent.dispatch_s, self._spent.step_s
        if self._costs is None:
            return min(updates, MEASURED * len(self._spent.by_worker)), 1
        return updates, closure_size(*self._costs, updates)


def closure_size(dispatch_s: float, step_s: Sequence[float], updates: int, *, jitter: float = 0.1) -> int:
    """Return the number of updates a closure, from 1 to `updates`, with which a stretch is over soonest; 1 where nothing was measured.

    Small closures lose time to their dispatch. At the end of a stretch, before everybody waits for everybody, large ones leave workers
    idle that find nothing left to take while a slower one works off its last. So the stretch is played with each of some sizes,
    every worker being slower than measured by `jitter` once, and the size with the smallest mean is taken.

    Args:
        dispatch_s: what a closure costs a worker beside its updates; `step_s` is an update on each worker that was measured.
        updates: until everybody waits for everybody (an evaluation, a checkpoint).
        jitter: how much slower a worker may turn out to be (rule of thumb).

    Source: T14.3; the way is ours.
    """
    steps = [step for step in step_s if step > 0 and math.isfinite(step)]
    if not (dispatch_s > 0 and math.isfinite(dispatch_s) and steps and updates > 1):
        return 1
    sizes = sorted({math.ceil(updates ** (k / SIZES) - 1e-9) for k in range(SIZES)} | {math.ceil(updates / len(steps))})
    played = [[step * (1 + jitter * (k == slow)) for k, step in enumerate(steps)] for slow in range(len(steps))]
    return min(sizes, key=lambda size: sum(stretch_seconds(size, dispatch_s, each, updates) for each in played))


def stretch_seconds(size: int, dispatch_s: float, step_s: Sequence[float], updates: int) -> float:
    """Return how long `updates` take in closures of `size`, each taken by whoever is free first."""
    free = [(0.0, worker) for worker in range(len(step_s))]
    for done in range(0, updates, size):
        begun, worker = free[0]
        heapq.heapreplace(free, (begun + dispatch_s + min(size, updates - done) * step_s[worker], worker))
    return max(free)[0]
