"""`create_in_process_cluster`: a cluster on this machine, in one call (T2)."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING, Literal, Self

from workbench.errors import UsageError
from workbench.parameter_server.engines.threads import ThreadEngine
from workbench.parameter_server.servers.plane import forget_plane, set_plane
from workbench.parameter_server.servers.replicas import forget_replicas

if TYPE_CHECKING:
    from workbench.parameter_server.engines.ray_engine import RayEngine


class Cluster:
    """Workers and parameter servers that are up; as a context manager it ends with the block, and leaves nothing behind.

    Args:
        identity: of the cluster; None makes one.
        leave: called at the end, with whether all is done; after an error other processes wait for the coordinator to come again.
    """

    def __init__(
        self,
        engine: ThreadEngine | RayEngine,
        identity: str | None = None,
        *,
        leave: Callable[[bool], None] | None = None,
    ) -> None:
        self.engine = engine
        self.id = identity or uuid.uuid4().hex
        self._leave = leave
        self._names: set[str] = set()
        self._ends: list[Callable[[], object]] = []
        set_plane(self.id, engine.plane)

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End the cluster."""
        self.shutdown(done=kind is None)

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
        numbered = (f"{name}_{k}" if k else name for k in count())
        found = next(each for each in numbered if each not in self._names)
        self._names.add(found)
        return found

    def ends_with(self, end: Callable[[], object]) -> None:
        """Call this when the cluster ends: what has threads for its sake needs them no longer."""
        self._ends.append(end)

    def shutdown(self, *, done: bool = True) -> None:
        """End every worker and server; a second call does nothing.

        Args:
            done: False lets processes of other machines wait for a coordinator that begins anew.
        """
        self.engine.close()
        while self._ends:
            self._ends.pop()()
        forget_plane(self.id)
        forget_replicas(self.id)
        leave, self._leave = self._leave, None
        if leave is not None:
            leave(done)


def create_in_process_cluster(
    num_workers: int = 3, num_ps: int = 2, *, engine: Literal["threads", "ray"] = "threads"
) -> Cluster:
    """Start a cluster on this machine (T2.1, T2.2): "threads" lets all live in this process, "ray" gives each a process of its own."""
    if engine not in ("threads", "ray"):
        raise UsageError(f"engine={engine!r} is not known. Allowed: 'threads', 'ray'.")
    if engine == "threads":
        return Cluster(ThreadEngine(num_workers, num_ps))
    from workbench.parameter_server.engines.ray_engine import RayEngine

    identity = uuid.uuid4().hex
    return Cluster(RayEngine(num_workers, num_ps, cluster=identity), identity)
