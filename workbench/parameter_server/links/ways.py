"""`Ways`: which link leads from this process to each server, by where the two are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from workbench.parameter_server.errors import UnavailableError
from workbench.parameter_server.links.link import Link
from workbench.parameter_server.links.plasma import PlasmaLink
from workbench.parameter_server.links.shared_memory import machine, shared_memory_missing
from workbench.parameter_server.links.shm import ShmLink
from workbench.ray.cluster import RayCluster, WorkerLost

Plane = Literal["auto", "shm", "plasma"]
PLANES = ("auto", "shm", "plasma")


@dataclass(frozen=True)
class Ways:
    """What a process has to know to reach the servers.

    Attributes:
        names: of the servers.
        plane: which way is wanted; "auto" takes the fastest.
        reader: which of the processes this is: a worker by its index, the coordinator comes after them.
    """

    names: Sequence[str]
    plane: Plane
    reader: int

    def connector(self) -> Callable[[int], Link]:
        """Return what makes the link to a server, in the process that calls this."""
        cluster = RayCluster.joined()
        return lambda server: self._link(cluster, server)

    def _link(self, cluster: RayCluster, server: int) -> Link:
        try:
            actor = cluster.find(self.names[server])
            hello = cluster.answer(cluster.call(actor, "hello"))
        except WorkerLost:
            raise UnavailableError("ps", server) from None
        if self.plane == "plasma":
            return PlasmaLink(cluster, actor, server, "it was asked for")
        calls = PlasmaLink(cluster, actor, server, "")
        why = shared_memory_missing() or hello.no_memory or ""
        if hello.machine != machine():
            why = f"ps {server} is on another machine, or in another container"
        if not why:
            try:
                return ShmLink(calls, server, hello.pid, self.reader)
            except OSError as error:
                why = f"this process cannot see that of ps {server} ({error})"
        return PlasmaLink(cluster, actor, server, f"{why}; values travel through Ray's object store")
