"""Clusters of processes that tests take, may harm, and give back: to start one takes longer than most tests."""

from __future__ import annotations

from typing import Any

from tests.helpers.killed_programs import lives, wait_until
from workbench.parameter_server.cluster.cluster import Cluster
from workbench.parameter_server.cluster.in_process import create_in_process_cluster

MOST = 12  # processes kept for later tests


class ClusterPool:
    """What is given back has all its workers up again; one that lost a server, or was shut down, is not used again."""

    def __init__(self) -> None:
        self._free: list[Cluster] = []
        self._servers: dict[str, list[int]] = {}

    def take(self, engine: str, num_workers: int, num_ps: int) -> Cluster:
        """A cluster of which a test may do what it wants; each takes another one."""
        for cluster in reversed(self._free):
            if (engine, num_workers, num_ps) == ("ray", cluster.num_workers, cluster.num_ps):
                self._free.remove(cluster)
                return cluster
        while engine == "ray" and self._free and self._size() + num_workers + num_ps > MOST:
            self._free.pop(0).shutdown()
        made = create_in_process_cluster(num_workers, num_ps, engine=engine)  # type: ignore[arg-type]
        if engine == "ray":
            self._servers[made.id] = _servers(made)
        return made

    def give_back(self, cluster: Cluster) -> None:
        """Keep a cluster for a later test where it can be mended, else end it."""
        engine: Any = cluster.engine
        whole = engine.name == "ray" and not engine._closed and all(map(lives, self._servers[cluster.id]))
        if not whole or _servers(cluster) != self._servers[cluster.id]:
            cluster.shutdown()
            return
        for worker in range(cluster.num_workers):
            engine.restart("worker", worker)
            wait_until(
                lambda worker=worker: engine.check("worker", worker) is None and lives(engine.pid("worker", worker)),
                what=f"the return of worker {worker}",
            )
        self._free.append(cluster)

    def close(self) -> None:
        """End them all."""
        while self._free:
            self._free.pop().shutdown()

    def _size(self) -> int:
        return sum(cluster.num_workers + cluster.num_ps for cluster in self._free)


def _servers(cluster: Cluster) -> list[int]:
    engine: Any = cluster.engine
    return [engine.pid("ps", k) for k in range(cluster.num_ps)]
