"""`load_facts`: who did how much, for `diagnose_parameter_server` (T13)."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from workbench.errors import UsageError
from workbench.parameter_server.context import PARTS
from workbench.parameter_server.coordinator.coordinator import ClusterCoordinator
from workbench.parameter_server.errors import UnavailableError
from workbench.parameter_server.servers.placed import Part, PlacedModule
from workbench.parameter_server.trials.work_time import WorkTime
from workbench.parameter_server.workers.worker import spent_here

LEAST_KNOWN = 0.9  # of the functions that ran, workers have to know (rule of thumb); one that was started anew does not


def load_facts(
    coordinator: ClusterCoordinator,
    placed: PlacedModule | None = None,
    *,
    seconds: float,
    time: WorkTime | None = None,
    asked: int | str = 1,
) -> dict[str, Any]:
    """Return JSON values on one trial, or on a training loop of your own.

    Args:
        placed: the module that was trained; None where variables alone are on the servers.
        seconds: that it took.
        time: how the workers spent their time; None where nobody took it.
        asked: steps_per_closure as it was asked for.

    Returns:
        seconds, workers, steps (updates; closures where no module is placed), servers (each: bytes_in, bytes_out, requests, apply_s and the same by block, with the parameters that lie in it),
        staleness_steps (a histogram, by server), busy_s and closures by worker, worker_failures, engine and data_plane with the
        reason for it; and what `WorkTime` holds.
    """
    cluster = coordinator.strategy.cluster
    metrics = coordinator.metrics()
    own = {} if placed is None else {
        place.block: _parameters(held) for place, held in zip(placed.places, placed.parts.values(), strict=True)
    }  # fmt: skip
    servers = server_loads(coordinator)
    for load in servers:
        for name, block in load["blocks"].items():
            if name in own:
                block["parameters"] = own[name]
    return {
        "seconds": seconds,
        "workers": cluster.num_workers,
        "steps": sum(metrics["closures"].values()) if placed is None else _pushes(servers, own),
        "steps_per_closure": asked,
        "engine": cluster.engine.name,
        "data_plane": cluster.engine.plane.name,
        "why": cluster.engine.plane.why,
        "servers": servers,
        "staleness_steps": [
            {
                str(lag): count
                for name, block in load["blocks"].items()
                if name in own
                for lag, count in block["staleness_steps"].items()
            }
            for load in servers
        ],
        "busy_s": [metrics["busy_s"].get(worker, 0.0) for worker in range(cluster.num_workers)],
        "closures": [metrics["closures"].get(worker, 0) for worker in range(cluster.num_workers)],
        "worker_failures": metrics["worker_failures"],
    } | ({} if time is None else time.to_dict())


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
        "work": [
            {part: mine[part] for part in (*PARTS, "compute_s")} | {"updates": mine["closures"] * per_function}
            for mine in spent
        ],
    }


def _pushes(servers: Sequence[dict[str, Any]], own: Mapping[str, Any]) -> int:
    """Return how many gradients were applied since the blocks were made; a version counts those of a checkpoint, too."""
    return max(
        (
            sum(block["staleness_steps"].values())
            for load in servers
            for name, block in load["blocks"].items()
            if name in own
        ),
        default=0,
    )


def _parameters(held: Sequence[Part]) -> dict[str, int]:
    """Return how many values of each parameter lie in a block."""
    found: Counter[str] = Counter()
    for part in held:
        found[part.parameter] += part.size
    return dict(found)


def server_loads(coordinator: ClusterCoordinator) -> list[dict[str, Any]]:
    """Return what each server has done so far, in total and by block."""
    cluster = coordinator.strategy.cluster
    found = []
    for server in range(cluster.num_ps):
        blocks = cluster.engine.plane.ask(server, "load_report")
        totals = {
            name: sum(block[name] for block in blocks.values())
            for name in ("requests", "bytes_in", "bytes_out", "apply_s")
        }
        found.append(totals | {"blocks": blocks})
    return found
