"""`load_facts`: who did how much, for `diagnose_parameter_server` (T13)."""

from __future__ import annotations

from typing import Any

from workbench.parameter_server.coordinator import ClusterCoordinator
from workbench.parameter_server.placed import PlacedModule

__all__ = ["load_facts", "server_loads"]


def load_facts(coordinator: ClusterCoordinator, placed: PlacedModule, *, seconds: float) -> dict[str, Any]:
    """Return JSON values on one trial.

    Returns:
        seconds, workers, servers (each: bytes_in, bytes_out, requests, apply_s and the same by block), staleness_steps (a histogram,
        by server), busy_s and closures by worker, worker_failures, engine and data_plane with the reason for it.
    """
    cluster = coordinator.strategy.cluster
    metrics = coordinator.metrics()
    own = {place.block for place in placed.places}
    servers = server_loads(coordinator)
    return {
        "seconds": seconds,
        "workers": cluster.num_workers,
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
    }


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
