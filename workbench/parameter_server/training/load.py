"""`load_facts` and `time_facts`: who did how much, for `diagnose_parameter_server` (T13)."""

import contextlib
import math
from typing import Any

from workbench.errors import UsageError
from workbench.parameter_server.context import PARTS
from workbench.parameter_server.coordinator.coordinator import ClusterCoordinator
from workbench.parameter_server.errors import UnavailableError
from workbench.parameter_server.servers.placed import PlacedModule
from workbench.parameter_server.workers.worker import spent_here

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
