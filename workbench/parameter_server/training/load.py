"""What workers do with their time and how many updates each should make when it is asked (T13.5, T13.7, T14.3); `load_facts`, `time_facts`: who did how much (T13)."""

import contextlib
import heapq
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from workbench.errors import UsageError
from workbench.parameter_server.coordinator.coordinator import ClusterCoordinator
from workbench.parameter_server.errors import UnavailableError
from workbench.parameter_server.servers.placed import PlacedModule
from workbench.parameter_server.workers.worker import spent_here

PARTS = ("data_wait_s", "pull_s", "compute_s", "push_s")
"""Of an update, on the worker that makes it; the rest of a worker's time it has nothing to do."""
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
        busy = sum(mine[part] for mine in self.by_worker for part in PARTS)
        idle = max(0.0, len(self.by_worker) * self.training_s - busy)
        return idle / self.closures if self.closures else math.nan

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return {
            "training_s": self.training_s, "updates": self.updates, "closures_timed": self.closures, "stretches": self.stretches,
            "work": self.by_worker,
        }  # fmt: skip


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


LEAST_KNOWN = 0.9  # of the functions that ran, workers have to know (rule of thumb); one that was started anew does not
TOTALS = ("requests", "bytes_in", "bytes_out", "apply_s")


def load_facts(
    coordinator: ClusterCoordinator, placed: PlacedModule | None = None, *, seconds: float, asked: int | str = 1
) -> dict[str, Any]:
    """Return JSON values on one trial, or on a training loop of your own; `asked` is steps_per_closure as it was asked for.

    Returns:
        seconds, workers, steps (updates; closures where no module is placed), servers (each: bytes_in, bytes_out, requests, apply_s and the same by block, with the parameters that lie in it),
        staleness_steps (a histogram, by server), busy_s and closures by worker, worker_failures, engine and data_plane with the
        reason for it.
    """
    cluster, metrics, servers = coordinator.strategy.cluster, coordinator.metrics(), server_loads(coordinator)
    own = {} if placed is None else placed.blocks()
    pushes, ages = [0], []
    for load in servers:
        trained = {name: block for name, block in load["blocks"].items() if name in own}
        for name, block in trained.items():
            block["parameters"] = own[name]
            pushes.append(sum(block["staleness_steps"].values()))
        ages.append({str(lag): count for b in trained.values() for lag, count in b["staleness_steps"].items()})
    # a block's version counts the pushes of a checkpoint too, its staleness those that were made here
    return {
        "seconds": seconds,
        "workers": cluster.num_workers,
        "steps": sum(metrics["closures"].values()) if placed is None else max(pushes),
        "steps_per_closure": asked,
        "engine": cluster.engine.name,
        "data_plane": cluster.engine.plane.name,
        "why": cluster.engine.plane.why,
        "servers": servers,
        "staleness_steps": ages,
        "busy_s": [metrics["busy_s"].get(worker, 0.0) for worker in range(cluster.num_workers)],
        "closures": [metrics["closures"].get(worker, 0) for worker in range(cluster.num_workers)],
        "worker_failures": metrics["worker_failures"],
    }


def server_loads(coordinator: ClusterCoordinator) -> list[dict[str, Any]]:
    """Return what each server has done so far, in total and by block."""
    cluster = coordinator.strategy.cluster
    reports = [cluster.engine.plane.ask(server, "load_report") for server in range(cluster.num_ps)]
    return [{name: sum(b[name] for b in report.values()) for name in TOTALS} | {"blocks": report} for report in reports]


def time_facts(coordinator: ClusterCoordinator, *, seconds: float, updates: int) -> dict[str, Any]:
    """Return how the workers spent their time in a loop of your own, which they take themselves, in the names of `WorkTime.to_dict`.

    What a function takes beside its iterator and the servers counts as computing.

    Args:
        seconds: that the loop took; NaN is what the coordinator saw, see `LoopClock`.
        updates: that were made.

    Returns:
        training_s, updates, closures_timed, stretches (how often everybody waited for everybody) and work; or only time_missing,
        which says why there is none.
    """
    cluster, metrics = coordinator.strategy.cluster, coordinator.metrics()
    if any(cluster.engine.check("worker", worker) is not None for worker in range(cluster.num_workers)):
        return {"time_missing": "a worker is away, and its times with it"}
    spent: list[dict[str, float]] = []
    with contextlib.suppress(UsageError, UnavailableError):
        spent = coordinator.on_every_worker(spent_here)
    if not spent:
        return {"time_missing": "the coordinator was shut down before anybody asked the workers for their times"}
    known, ran = sum(mine["closures"] for mine in spent), sum(metrics["closures"].values())
    if known < LEAST_KNOWN * ran:
        return {"time_missing": f"workers that were started anew know of {known:.0f} of the {ran} functions alone"}
    per_function = updates / known if known else math.nan
    return {
        "training_s": seconds if math.isfinite(seconds) else metrics["worked_s"],
        "updates": updates,
        "closures_timed": ran,
        "stretches": max(1, metrics["joins"]),
        "work": [{part: mine[part] for part in PARTS} | {"updates": mine["closures"] * per_function} for mine in spent],
    }
