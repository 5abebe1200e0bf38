"""`Cluster`: workers and servers that are up, and `create_in_process_cluster`, which starts them here (T2)."""

from __future__ import annotations

import uuid
from itertools import count
from typing import Literal, Self

from workbench.errors import UsageError
from workbench.parameter_server.engines.engine import Engine
from workbench.parameter_server.engines.threads import ThreadEngine
from workbench.parameter_server.servers.planes import forget_plane, set_plane
from workbench.parameter_server.servers.replicas import forget_replicas

__all__ = ["Cluster", "create_in_process_cluster"]


class Cluster:
    """Workers and parameter servers that are up; as a context manager it ends with the block, and leaves nothing behind.

    Args:
        engine: what runs them.
        identity: of the cluster; None makes one.
    """

    def __init__(self, engine: Engine, identity: str | None = None) -> None:
        self.engine = engine
        self.id = identity or uuid.uuid4().hex
        self._names: set[str] = set()
        set_plane(self.id, engine.plane)

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the cluster."""
        self.shutdown()

    def __repr__(self) -> str:
        """Say how large it is, and how values travel."""
        plane = self.engine.plane
        return f"Cluster({self.num_workers} workers, {self.num_ps} parameter servers, engine {self.engine.name}, data plane {plane.name}: {plane.why})"

    @property
    def num_workers(self) -> int:
        """How many workers it has."""
        return self.engine.num_workers

    @property
    def num_ps(self) -> int:
        """How many parameter servers it has."""
        return self.engine.num_servers

    def unique(self, name: str) -> str:
        """Return `name`, with a number behind it where a variable of this cluster has it already."""
        found = (
            name if name not in self._names else next(n for k in count(1) if (n := f"{name}_{k}") not in self._names)
        )
        self._names.add(found)
        return found

    def shutdown(self) -> None:
        """End every worker and server; a second call does nothing."""
        self.engine.close()
        forget_plane(self.id)
        forget_replicas(self.id)


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
