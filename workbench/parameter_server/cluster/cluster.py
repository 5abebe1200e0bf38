"""Clusters: on this machine in one call (T2), or of tasks on several, which find each other by a description (T3.1, T9)."""

import atexit
import contextlib
import json
import logging
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain, count, repeat
from typing import Literal, Self

from workbench.errors import ClusterError, UsageError
from workbench.parameter_server.cluster.cluster_resolver import ClusterResolver, split_address
from workbench.parameter_server.engines.ray_engine import RayEngine
from workbench.parameter_server.engines.ray_task import emptied
from workbench.parameter_server.engines.threads import ThreadEngine
from workbench.parameter_server.errors import Job
from workbench.parameter_server.servers.links import forget_plane, set_plane
from workbench.parameter_server.servers.replicas import forget_replicas
from workbench.parameter_server.servers.server import Place
from workbench.ray.cluster import RayCluster
from workbench.ray.node import RayNode

CHIEF_POLL_S = 0.2
TASK_POLL_S = 0.5
LOST = 4  # looks in a row without an answer before the chief counts as gone (rule of thumb)
_DESCRIPTION = "cluster"  # under which the chief writes down what it takes for the cluster


class Cluster:
    """Workers and parameter servers that are up; as a context manager it ends with the block, and leaves nothing behind.

    `leave` is called at the end, with whether all is done; after an error other processes wait for the coordinator to come again.
    """

    def __init__(
        self,
        engine: ThreadEngine | RayEngine,
        *,
        leave: Callable[[bool], None] | None = None,
    ) -> None:
        self.engine, self.id = engine, engine.id
        self._leave = leave
        self._names: set[str] = set()
        self._ends: list[Callable[[], object]] = []
        self._deleted: deque[tuple[str, list[Place]]] = deque()
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

    def frees(self, thing: object, name: str, places: Sequence[Place]) -> None:
        """Free blocks, and the replicas of a module of this name, some time after nobody holds `thing` any more."""
        weakref.finalize(thing, self._deleted.append, (name, list(places))).atexit = False

    def sweep(self) -> None:
        """Free what nobody holds; not while Python collects garbage, where nothing can be waited for."""
        for name, places in emptied(self._deleted):
            for place in places:
                with contextlib.suppress(Exception):  # what is gone is free
                    self.engine.plane.ask(place.server, "delete", place.block)
            self.engine.forget(self.id, name)

    def ends_with(self, end: Callable[[], object]) -> None:
        """Call this when the cluster ends: what has threads for its sake needs them no longer."""
        self._ends.append(end)

    def shutdown(self, *, done: bool = True) -> None:
        """End every worker and server; where not all is `done` processes of other machines wait for a coordinator that begins anew."""
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
    return Cluster((ThreadEngine if engine == "threads" else RayEngine)(num_workers, num_ps))


def connect_to_cluster(
    where: ClusterResolver | str | None = None,
    *,
    num_workers: int | None = None,
    num_ps: int | None = None,
    wait_s: float = 300.0,
) -> Cluster:
    """Return the cluster whose coordinator this process is.

    As a context manager it tells the other processes at the end that all is done, and they end too. Left by an error, or killed,
    it leaves them waiting for the next coordinator.

    Args:
        where: a description of the cluster, in which this is the chief: the tasks run where `serve_task` or `workbench ps` was started.
            Or "host:port" of a Ray cluster that is there ("auto" for the one on this machine), which chooses the machines itself and
            stays as it was. None reads WORKBENCH_CLUSTER or TF_CONFIG.
        num_workers: with the address of a Ray cluster: at least 1. A description says so itself.
        num_ps: likewise.
        wait_s: for every task to be there.

    Raises:
        UsageError: this process is another task, or the numbers are missing, or given twice.
        ClusterError: tasks did not come in time (they are named), or the Ray cluster does not answer.
    """
    if isinstance(where, str):
        if num_workers is None or num_ps is None:
            raise UsageError(
                f"connect_to_cluster({where!r}) needs num_workers and num_ps: a Ray cluster does not say how many of its "
                "processes are to be which."
            )
        return Cluster(RayEngine(num_workers, num_ps, address=where))
    if num_workers is not None or num_ps is not None:
        raise UsageError(
            "num_workers and num_ps are for the address of a Ray cluster; a description of the cluster has its own."
        )
    resolver = where or ClusterResolver.from_environment()
    if resolver.role != "chief":
        does = (
            "calls serve_task()"
            if resolver.role in ("worker", "ps")
            else "reads checkpoints and never joins (SidecarEvaluator)"
        )
        raise UsageError(f"{resolver.source}: this process is {resolver.task}, which {does}; only the chief connects.")
    spec = resolver.cluster_spec
    assert spec is not None
    node = RayNode.start(*resolver.chief_address, "workbench-chief", wait_s=wait_s)
    with contextlib.ExitStack() as undone:
        undone.callback(node.close)
        node.write(_DESCRIPTION, json.dumps(spec.to_dict()))
        ray = node.connect()
        undone.callback(ray.close)
        _wait_for_tasks(ray, resolver, wait_s)
        engine = RayEngine(len(spec.worker), len(spec.ps), ray=ray, resource=_offered)
        undone.pop_all()

    def leave(done: bool) -> None:
        try:
            if done:
                node.say_ended()
        finally:
            node.close()

    cluster = Cluster(engine, leave=leave)
    atexit.register(_at_exit, weakref.ref(cluster))
    return cluster


def _wait_for_tasks(ray: RayCluster, resolver: ClusterResolver, wait_s: float) -> None:
    spec, until = resolver.cluster_spec, time.monotonic() + wait_s
    assert spec is not None
    tasks = [task for task in spec.tasks if task.type != "chief"]
    told = None
    while missing := [task for task in tasks if not ray.total(_offered(task.type, task.index))]:  # type: ignore[arg-type]
        if missing != told:
            names = ", ".join(map(str, missing))
            logging.getLogger(__name__).info("chief: waiting for %s, up to %g s", names, wait_s)
            told = missing
        if time.monotonic() > until:
            named = ", ".join(f"{task} at {spec.address(task)}" for task in missing)
            raise ClusterError(
                f"{len(missing)} of {len(tasks)} tasks did not come within {wait_s:g} s: {named}. Is `workbench ps` running there, with "
                "the same description of the cluster and the same token, and what does it print?"
            )
        time.sleep(CHIEF_POLL_S)


def _at_exit(cluster_of: weakref.ref[Cluster]) -> None:
    """End a cluster that nobody ended; after an error that nobody caught the others wait for the next coordinator."""
    cluster = cluster_of()
    if cluster is not None:
        cluster.shutdown(done=not hasattr(sys, "last_value"))


def serve_task(resolver: ClusterResolver | None = None, *, wait_s: float = 300.0) -> None:
    """Offer this process to the cluster as the task that it is, and return when the chief says that all is done.

    Start it in any order with the others. Where the chief is gone without a word, because it was killed or its program failed,
    this waits for it to come again: what a server held is then lost, and the chief restores it from its checkpoint (T10.2).

    Args:
        resolver: says which task this is; None reads WORKBENCH_CLUSTER or TF_CONFIG.
        wait_s: for the chief, at the start and whenever it is gone.

    Raises:
        UsageError: this is no worker and no server, the cluster has no chief to listen to, or the chief has another description.
        ClusterError: the chief did not come, cannot be reached from here, or this machine does not have the task's address.
    """
    resolver = resolver or ClusterResolver.from_environment()
    if resolver.role not in ("worker", "ps"):
        raise UsageError(
            f"{resolver.source}: this process is the {resolver.role}, and only a worker or ps serves. The chief calls "
            "connect_to_cluster(); an evaluator needs no cluster."
        )
    task, address = resolver.task, resolver.address
    assert task is not None
    assert address is not None
    head = resolver.chief_address
    log = logging.getLogger(__name__)
    log.info("%s: waiting for the chief at %s:%d, up to %g s", task, *head, wait_s)
    for seen in chain([False], repeat(True)):
        offered = _offered(task.type, task.index)  # type: ignore[arg-type]
        node = RayNode.join(head, *split_address(address), offered, wait_s=wait_s, seen=seen)
        try:
            log.info("%s: in the cluster of the chief at %s:%d", task, *head)
            silent, agreed = 0, False
            while silent < LOST and not node.broken:
                state = node.state()
                if state == "ended":
                    return
                silent = silent + 1 if state == "lost" else 0
                agreed = agreed or _same_description(resolver, node)
                time.sleep(TASK_POLL_S)
        finally:
            node.close()
        log.warning(
            "%s: the chief at %s:%d is gone; waiting %g s for it to come again. Ctrl-C ends this task.", task, *head, wait_s,
        )  # fmt: skip


def _same_description(resolver: ClusterResolver, node: RayNode) -> bool:
    """Return whether the chief has the same description, False while it has not said which; raises `UsageError` where it has another."""
    assert resolver.cluster_spec is not None
    own, chiefs = json.dumps(resolver.cluster_spec.to_dict()), node.read(_DESCRIPTION)
    if chiefs is not None and chiefs != own:
        raise UsageError(
            f"{resolver.source}: {resolver.task} and the chief have different descriptions of the cluster: {own} here, {chiefs} there. "
            "Give every task the same."
        )
    return chiefs is not None


def _offered(job: Job, index: int) -> str:
    """Return what the machine of a task offers to Ray, so that it runs this task and no other."""
    return f"workbench-{job}-{index}"
