"""`create_in_process_cluster`: a cluster on this machine, in one call (T2)."""

from __future__ import annotations

import uuid
from typing import Literal

from workbench.errors import UsageError
from workbench.parameter_server.cluster.cluster import Cluster
from workbench.parameter_server.engines.threads import ThreadEngine

__all__ = ["create_in_process_cluster"]


def create_in_process_cluster(
    num_workers: int = 3, num_ps: int = 2, *, engine: Literal["threads", "ray"] = "threads"
) -> Cluster:
    """Start a cluster on this machine (T2.1, T2.2).

    Args:
        num_workers: at least 1.
        num_ps: at least 1.
        engine: "threads" lets all live in this process; "ray" gives each a process of its own.
    """
    if engine not in ("threads", "ray"):
        raise UsageError(f"engine={engine!r} is not known. Allowed: 'threads', 'ray'.")
    if engine == "ray":
        from workbench.parameter_server.engines.ray_engine import RayEngine

        identity = uuid.uuid4().hex
        return Cluster(RayEngine(num_workers, num_ps, cluster=identity), identity)
    return Cluster(ThreadEngine(num_workers, num_ps))
