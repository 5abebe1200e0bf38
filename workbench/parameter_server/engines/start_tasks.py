"""`start_tasks`: the actors of an engine, where they are to be, and `meet_first`: what they say of themselves (behaviour 66)."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from workbench import __version__
from workbench.errors import ClusterError
from workbench.parameter_server.engines.ray_server import ServerTask
from workbench.parameter_server.engines.ray_tasks import Hello, WorkerTask
from workbench.parameter_server.errors import Job
from workbench.parameter_server.links.plasma import CONTROL
from workbench.parameter_server.links.shared_memory import Witness, machine
from workbench.parameter_server.links.ways import Plane, Ways
from workbench.ray.cluster import RayCluster, WorkerLost


class KnownTask:
    """A worker or server as the engine knows it.

    Args:
        index: among those of its job.
        actor: by which Ray calls it.
    """

    def __init__(self, job: Job, index: int, actor: Any) -> None:
        self.job, self.index, self.actor = job, index, actor
        self.hello: Hello | None = None
        self.witness: Witness | None = None  # of its process, where that is on this machine
        self.incarnation = 0
        self.free = threading.Event()  # not held down
        self.free.set()
        self.known: set[int] = set()  # what this life of a worker keeps
        self.drop: deque[int] = deque()
        self.seconds = float("inf")  # that a worker's last call took there
        self.asked: tuple[Any, float] | None = None  # whether it is well, and when
        self.lock = threading.Lock()

    @property
    def life(self) -> str:
        """Which life of the task it knows."""
        return "" if self.hello is None else self.hello.life

    def met(self, hello: Hello) -> None:
        """Note who answers; a new life knows nothing."""
        if self.hello is None or self.hello.life != hello.life:
            if self.hello is not None:
                self.incarnation += 1
            self.known.clear()
            self.drop.clear()
            self.hello = hello
            self.witness = None
            if hello.machine == machine():
                with contextlib.suppress(OSError):  # it has ended since, or cannot be seen: Ray will tell
                    self.witness = Witness(hello.pid)

    def gone(self) -> bool:
        """Whether the life that it knows is seen to have ended, which Ray may take seconds to notice."""
        witness = self.witness
        return witness is not None and witness.gone()

    def taken_drop(self) -> list[int]:
        """Empty `drop`, to which others append."""
        found = []
        with contextlib.suppress(IndexError):
            while True:
                found.append(self.drop.popleft())
        return found


def lives(pid: int) -> bool:
    """Return whether a process of this machine is there, and no zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


START_S = 120.0  # until every task has answered for the first time; importing torch takes seconds where others compute


def start_tasks(
    ray: RayCluster,
    num_workers: int,
    num_ps: int,
    *,
    cluster: str,
    data_plane: Plane,
    resource: Callable[[Job, int], str] | None,
    grace_s: float,
) -> tuple[dict[tuple[Job, int], KnownTask], list[str]]:
    """Ask for the processes of all tasks, without waiting for them.

    Args:
        ray: where they are to run.
        num_workers: how many workers.
        num_ps: how many servers.
        cluster: id of the cluster.

    Returns:
        The tasks, servers first, and the names by which workers find the servers.
    """

    def placed(job: Job, index: int, kind: type, *arguments: Any, name: str | None = None) -> KnownTask:
        there = None if resource is None else resource(job, index)
        actor = ray.place(kind, *arguments, name=name, cpus=0, comes_back=True, groups={CONTROL: 1}, resource=there)
        return KnownTask(job, index, actor)

    may_share = data_plane in ("auto", "shm")
    names = [f"workbench-{cluster}-ps{k}" for k in range(num_ps)]
    tasks: dict[tuple[Job, int], KnownTask] = {}
    for k, name in enumerate(names):
        tasks["ps", k] = placed("ps", k, ServerTask, k, num_workers + 1, may_share, name=name)
    for k in range(num_workers):
        tasks["worker", k] = placed("worker", k, WorkerTask, k, cluster, Ways(names, data_plane, k), grace_s)
    return tasks, names


def meet_first(ray: RayCluster, task: KnownTask, timeout_s: float = START_S) -> None:
    """Wait until a task has introduced itself.

    Raises:
        ClusterError: it cannot be started, or has another version of this package.
    """
    try:
        hello = ray.answer(ray.call(task.actor, "hello"), timeout_s)
    except (WorkerLost, TimeoutError) as error:
        raise ClusterError(f"{task.job} {task.index} cannot be started: {error}") from error
    if hello.version != __version__:
        raise ClusterError(
            f"{task.job} {task.index} runs workbench {hello.version}, and this process {__version__}: install the same "
            "version on every machine of the cluster."
        )
    task.met(hello)
