"""Clusters of processes that tests take, may harm, and give back: to start one takes longer than most tests."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

from tests.helpers.killed_programs import lives, wait_until
from workbench.parameter_server.cluster.cluster import Cluster, create_in_process_cluster
from workbench.parameter_server.errors import UnavailableError
from workbench.parameter_server.servers.links import plane_of
from workbench.parameter_server.workers.worker import Call

MOST = 12  # processes kept for later tests


class ClusterPool:
    """What is given back is up again, the servers of what was killed empty; one that was shut down is not used again."""

    def __init__(self) -> None:
        self._free: list[Cluster] = []

    def take(self, engine: str, num_workers: int, num_ps: int) -> Cluster:
        """A cluster of which a test may do what it wants; each takes another one."""
        for cluster in reversed(self._free):
            if (engine, num_workers, num_ps) == ("ray", cluster.num_workers, cluster.num_ps):
                self._free.remove(cluster)
                return cluster
        while engine == "ray" and self._free and self._size() + num_workers + num_ps > MOST:
            self._free.pop(0).shutdown()
        return create_in_process_cluster(num_workers, num_ps, engine=engine)  # type: ignore[arg-type]

    def give_back(self, cluster: Cluster) -> None:
        """Keep a cluster for a later test where it is one of processes that was not shut down, else end it."""
        engine: Any = cluster.engine
        if engine.name != "ray" or engine._closed:
            cluster.shutdown()
            return
        tasks = [("ps", k) for k in range(cluster.num_ps)] + [("worker", k) for k in range(cluster.num_workers)]
        for job, index in tasks:
            engine.restart(job, index)
            wait_until(
                lambda job=job, index=index: engine.check(job, index) is None and lives(engine._tasks[job, index].pid),
                what=f"the return of {job} {index}",
            )
        _look(cluster.id, cluster.num_ps)
        for worker in range(cluster.num_workers):
            engine.execute(worker, [Call(_look, (cluster.id, cluster.num_ps))], threading.Event())
        self._free.append(cluster)

    def close(self) -> None:
        """End them all."""
        while self._free:
            self._free.pop().shutdown()

    def _size(self) -> int:
        return sum(cluster.num_workers + cluster.num_ps for cluster in self._free)


def _look(cluster: str, num_ps: int) -> None:
    """Notice which servers were started anew, so that the next test does not."""
    for server in range(num_ps):
        with contextlib.suppress(UnavailableError):
            plane_of(cluster).ask(server, "load_report")
