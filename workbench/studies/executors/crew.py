"""`Crew`: the workers of a study, from the moment they are asked for until they are dismissed."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from dataclasses import dataclass
from typing import Any

from workbench.errors import ClusterError
from workbench.ray.cluster import RayCluster, WorkerLost, node_of_this_worker
from workbench.studies.executors.worker import ChunkWorker

__all__ = ["Crew", "Worker"]

MOST_CPUS = 4  # rule of thumb: lanes in one process share each call; threads of one process get in each other's way
STARTS = 3  # rule of thumb: a worker that cannot be started so many times in a row never can
SETTLE_S = 2.0  # rule of thumb: a cluster that was started just now knows by then what is free
GONE_S = 5.0  # rule of thumb: a cluster without machines for so long gets none
PATIENCE_S = 30.0  # rule of thumb: whoever waits longer than this for a free CPU wants to know why


@dataclass(frozen=True, eq=False)
class Worker:
    """A process that has started.

    Attributes:
        handle: what the cluster calls it by.
        node: id of its machine.
        pid: of the process.
    """

    handle: Any
    node: str
    pid: int

    @property
    def place(self) -> str:
        """How an error calls it."""
        return f"node {self.node[:8]}, process {self.pid}"


class Crew:
    """Workers that are idle or still starting; one that is given out comes back by `rest`, or is gone.

    Attributes:
        cluster: where they are.
        gpu: whether each has one.
        idle: those that wait for a chunk.
    """

    def __init__(self, cluster: RayCluster, *, gpu: bool = False) -> None:
        self.cluster, self.gpu = cluster, gpu
        self._resource = "GPU" if gpu else "CPU"
        self.idle: list[Worker] = []
        self._starting: dict[Any, Any] = {}
        self._out: list[Worker] = []
        self._failures = 0
        self._waiting_since = time.monotonic()

    def begin(self) -> None:
        """Count waiting from now on."""
        self._waiting_since = time.monotonic()

    @property
    def calls(self) -> list[Any]:
        """What is answered when a worker has started."""
        return list(self._starting)

    def room(self) -> int:
        """Return how many chunks could train at once: on workers that are here, and on what is free on the cluster.

        Raises:
            ClusterError: no machine of the cluster has what a worker needs.
        """
        if not self.cluster.total(self._resource):
            raise ClusterError(
                f"the Ray cluster has no {self._resource}. Add a machine that has with `ray start --address=...`"
                f"{', or train with Trainer(device=' + repr('cpu') + ')' if self.gpu else ''}."
            )
        there = len(self.idle) + len(self._starting)
        end = time.monotonic() + SETTLE_S
        while not there and not self._free() and time.monotonic() < end:
            time.sleep(0.1)
        return max(1, there + len(self._free()))

    def ask_for(self, workers: int) -> None:
        """Have at least `workers` idle or starting, as far as there is room; one that has to wait for it where none is."""
        missing = workers - len(self.idle) - len(self._starting)
        if missing <= 0:
            return
        places: list[tuple[str | None, int]] = [*self._free()]
        if not places and not self._out and not self.idle and not self._starting:
            places = [(None, 1)]
        for node, cpus in places[:missing]:
            gpus = 1 if self.gpu else 0
            handle = self.cluster.place(ChunkWorker, node_of_this_worker, cpus, node=node, cpus=cpus, gpus=gpus)
            self._starting[self.cluster.call(handle, "where")] = handle

    def _free(self) -> list[tuple[str, int]]:
        """Return machine and CPUs of the workers that there is room for, machines in turn."""
        workers = []
        for node, count in self.cluster.free(self._resource).items():
            parts = count if self.gpu else math.ceil(count / MOST_CPUS)
            sizes = [1] * count if self.gpu else [count // parts + (i < count % parts) for i in range(parts)]
            workers += [(turn, node, size) for turn, size in enumerate(sizes)]
        return [(node, size) for _, node, size in sorted(workers, key=lambda worker: worker[0])]

    def greet(self, call: Any) -> None:
        """Take in a worker whose call is answered.

        Raises:
            ClusterError: workers cannot be started.
        """
        handle = self._starting.pop(call)
        try:
            where = self.cluster.result(call)
        except WorkerLost as lost:
            self._failures += 1
            if self._failures >= STARTS:
                raise ClusterError(
                    f"no worker can be started on the Ray cluster ({lost}). Every machine needs the same versions of Python, "
                    "Ray and this package, and `python -c 'import workbench'` must work there."
                ) from lost
            return
        self._failures = 0
        self.idle.append(Worker(handle, where["ray_node"], where["pid"]))

    def take(self) -> Worker:
        """Give out an idle worker."""
        worker = self.idle.pop(0)
        self._out.append(worker)
        self._waiting_since = time.monotonic()
        return worker

    def rest(self, worker: Worker) -> None:
        """Take back a worker that is done."""
        self._out.remove(worker)
        self.idle.append(worker)

    def lose(self, worker: Worker) -> None:
        """Forget a worker that is gone, or that nobody wants to wait for."""
        self._out.remove(worker)
        self._waiting_since = time.monotonic()
        self._end(worker.handle)

    def check(self) -> None:
        """Where no worker trains and none has started for a while, say why.

        Raises:
            ClusterError: the cluster has no machine left that could start one.
        """
        waited = time.monotonic() - self._waiting_since
        if self._out or self.idle or waited < GONE_S:
            return
        total = self.cluster.total(self._resource)
        if not total:
            raise ClusterError(
                f"the Ray cluster has no {self._resource} any more: its machines are gone, or were asleep for so long that "
                "Ray gave them up. Everything that arrived is saved, and the same call goes on on a cluster that has."
            )
        if waited < PATIENCE_S:
            return
        self._waiting_since = time.monotonic()
        logging.getLogger(__name__).warning(
            "waiting for a free %s on the Ray cluster: it has %d in all. `ray status` shows who uses them.",
            self._resource,
            total,
        )

    def dismiss(self) -> None:
        """End all workers."""
        for handle in [*self._starting.values(), *(worker.handle for worker in [*self.idle, *self._out])]:
            self._end(handle)
        self._starting.clear()
        self.idle, self._out = [], []

    def _end(self, handle: Any) -> None:
        with contextlib.suppress(Exception):  # it may be gone, and the cluster with it
            self.cluster.kill(handle)
