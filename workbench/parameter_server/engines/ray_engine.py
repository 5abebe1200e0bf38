"""`RayEngine`: each worker and each server is an actor of a Ray cluster, a process of its own (T2.4, T9)."""

import contextlib
import itertools
import pickle
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from workbench.checks import check_integer
from workbench.errors import UsageError
from workbench.parameter_server.context import Alive, Run
from workbench.parameter_server.engines.ray_actors import SEVERAL_S, Outcome, Request, ServerActor, WorkerActor
from workbench.parameter_server.engines.ray_task import POLL_S, START_S, Deleted, RayTask, SendOnce, Sent, emptied
from workbench.parameter_server.engines.threads import Ended
from workbench.parameter_server.errors import CancelledError, Job, UnavailableError, refuse
from workbench.parameter_server.servers.links import CONTROL, PLANES, Plane, RayPlane, connector
from workbench.parameter_server.servers.placed import PlacedModule
from workbench.parameter_server.servers.replicas import forget_replicas
from workbench.parameter_server.workers.closure import from_wire, map_structure, to_bytes, to_wire
from workbench.parameter_server.workers.worker import Call, ResourceRef
from workbench.ray.cluster import RayCluster

AT_ONCE = 8  # calls in one request, as long as they take less than `SEVERAL_S` together (rule of thumb)
AGAIN_S = 0.2  # how often a call is asked to stop: it may not have begun
ANSWER_S = 1.0  # how long a task may take to say that it is well, before it counts as busy
END_S = 5.0  # until the processes of a cluster that was shut down are gone


class RayEngine:
    """Workers and servers as actors. One that dies is started again by Ray, empty; who was killed by `kill` is left alone until `restart`.

    Args:
        data_plane: how values travel: "shm" within one machine, "plasma" by Ray's object store between any two; "auto" takes the first that the places of both ends allow, and `plane.why` tells it.
        address: of a Ray cluster that is there, see `RayCluster.connect`; None takes the one of this process, or starts one here.
        ray: the cluster itself, in place of its address; it is left at the end.
        resource: what the machine of a task offers, see `RayCluster.place`; None lets Ray choose the machines.

    Raises:
        ClusterError: there is no cluster, its processes do not start, or have another version of this package.
    """

    name: str = "ray"
    plane: RayPlane

    def __init__(
        self,
        num_workers: int,
        num_ps: int,
        *,
        data_plane: Plane = "auto",
        address: str | None = None,
        ray: RayCluster | None = None,
        resource: Callable[[Job, int], str] | None = None,
        grace_s: float = 3.0,
    ) -> None:
        self.num_workers = check_integer("num_workers", num_workers)
        self.num_servers = check_integer("num_ps", num_ps)
        if data_plane not in PLANES:
            raise UsageError(f"data_plane={data_plane!r} is not known. Allowed: {', '.join(map(repr, PLANES))}.")
        self.grace_s = grace_s
        self._tickets = itertools.count()
        self._closed = False
        self._ray = RayCluster.connect(address) if ray is None else ray
        self._tasks: dict[tuple[Job, int], RayTask] = {}
        self.id = uuid.uuid4().hex
        names = [f"workbench-{self.id}-ps{k}" for k in range(num_ps)]
        self.plane = RayPlane(num_ps, connector(names, data_plane, num_workers))
        self.sent = SendOnce(self._ray.pack, self._drop_everywhere)

        def start(job: Job, index: int, kind: type, *arguments: Any, name: str | None = None) -> None:
            there = None if resource is None else resource(job, index)
            actor = self._ray.place(
                kind, *arguments, name=name, cpus=0, comes_back=True, groups={CONTROL: 1}, resource=there
            )
            self._tasks[job, index] = RayTask(self._ray, job, index, actor)

        try:
            for k, name in enumerate(names):
                start("ps", k, ServerActor, k, 0 if data_plane == "plasma" else num_workers + 1, name=name)
            for k in range(num_workers):
                start("worker", k, WorkerActor, k, self.id, names, data_plane)
            for task in self._tasks.values():
                task.meet_first()
            self.plane.connect()
        except BaseException:
            self.close()
            raise

    def at_once(self, worker: int) -> int:
        """See `ThreadEngine`; so many as what the worker ran last lets expect in `SEVERAL_S`."""
        return max(1, min(AT_ONCE, int(SEVERAL_S / max(self._tasks["worker", worker].seconds, 1e-6))))

    def execute(self, worker: int, calls: Sequence[Call], cancel: threading.Event) -> list[Ended]:
        task, ticket = self._task("worker", worker), next(self._tickets)
        first, last = 0.0, 0.0  # when it was asked to stop

        def stop_where_cancelled() -> None:
            nonlocal first, last
            now = time.monotonic()
            if not cancel.is_set() or now - last < AGAIN_S:
                return
            first, last = first or now, now
            if now - first > self.grace_s:
                self._ray.kill(task.actor, for_good=False)
                raise CancelledError
            self._ray.call(task.actor, "cancel", ticket, group=CONTROL)

        try:
            requests = self._requests(task, calls, ticket)
            answers = task.wait(self._ray.call(task.actor, "execute", requests), stop_where_cancelled)
        except BaseException:
            task.known.clear()  # nobody knows how far it came
            raise
        outcomes = [Outcome(*pickle.loads(answer)) for answer in answers]
        if len(outcomes) < len(calls) or outcomes[-1].how != "done":
            task.known.clear()
        task.seconds = max(outcome.seconds for outcome in outcomes)
        found: list[Ended] = []
        for outcome in outcomes:
            try:
                found.append((from_wire(self._result(task, outcome)), None))
            except BaseException as error:
                found.append((None, error))
        return found

    def build(self, worker: int, resource: int, make: Callable[[], Any]) -> None:
        task = self._task("worker", worker)
        try:
            sendable = self.sent.packed(make)
        except TypeError as error:
            sendable = self.sent.packed(partial(refuse, TypeError(str(error))))
        call = self._ray.call(task.actor, "build", task.life, resource, sendable.content)
        self._result(task, Outcome(*pickle.loads(task.wait(call))))

    def drop(self, worker: int, resource: int) -> None:
        """See `ThreadEngine`. The worker is told with its next call: this may run while Python collects garbage."""
        self._tasks["worker", worker].drop.append(resource)

    def forget(self, cluster: str, name: str) -> None:
        """See `ThreadEngine`. Each worker is told with its next call."""
        forget_replicas(cluster, name)
        for worker in range(self.num_workers):
            self._tasks["worker", worker].drop.append(Deleted(cluster, name))

    def wait_for_worker(self, worker: int, timeout_s: float) -> bool:
        task = self._tasks["worker", worker]
        until = time.monotonic() + timeout_s
        if not task.released.wait(timeout_s):
            return False
        while (left := until - time.monotonic()) > 0:
            if not self._closed and task.meet(left) is None and not task.silent:
                return True
            time.sleep(min(POLL_S, left))
        return False

    def check(self, job: Job, index: int) -> UnavailableError | None:
        """See `ThreadEngine`. A task that is busy is healthy."""
        task = self._tasks[job, index]
        if not task.released.is_set() or self._closed:
            return task.unavailable()
        before = task.incarnation
        gone = task.meet(0.0 if task.silent else ANSWER_S)  # who waited once for an answer looks whether it has come
        if job == "ps" and task.incarnation != before:
            self.plane.forget(index)
        return gone

    def incarnation(self, job: Job, index: int) -> int:
        return self._tasks[job, index].incarnation

    def kill(self, job: Job, index: int) -> None:
        self._tasks[job, index].kill()

    def restart(self, job: Job, index: int) -> None:
        """See `ThreadEngine`. Returns when it answers."""
        task = self._tasks[job, index]
        if task.released.is_set():
            return
        before, until = task.hello, time.monotonic() + START_S
        while task.meet(ANSWER_S) is not None or task.hello is before:
            if self._closed:
                return
            if time.monotonic() > until:
                raise task.unavailable(f"it was not back within {START_S:g} s")
            time.sleep(POLL_S)
        if job == "ps":
            self.plane.forget(index)
        task.released.set()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.plane.close()
        for task in self._tasks.values():
            task.released.clear()  # whoever waits for it stops
            with contextlib.suppress(Exception):
                self._ray.kill(task.actor)
        until = time.monotonic() + END_S
        for task in self._tasks.values():
            while task.local and not task.gone() and time.monotonic() < until:
                time.sleep(0.01)
        self._ray.close()

    def _task(self, job: Job, index: int) -> RayTask:
        task = self._tasks[job, index]
        if self._closed:
            raise task.unavailable("the cluster was shut down")
        if not task.released.is_set():
            raise task.unavailable()
        return task

    def _requests(self, task: RayTask, calls: Sequence[Call], ticket: int) -> list[bytes]:
        """Return what to send for these calls, with what the worker does not know of them yet."""
        drop = list(emptied(task.drop))
        task.known.difference_update(each.number for each in drop if isinstance(each, Sent))
        new: dict[int, bytes] = {}

        def named(thing: Any) -> Sent:
            sendable = self.sent.packed(thing)
            if sendable.number not in task.known:
                new[sendable.number] = sendable.content
            return Sent(sendable.number)

        def outgoing(leaf: Any) -> Any:
            return named(leaf) if isinstance(leaf, PlacedModule) else to_wire(leaf)

        requests = []
        for call in calls:
            function = named(call.function)
            args, kwargs = map_structure(outgoing, list(call.args)), map_structure(outgoing, dict(call.kwargs))
            request = Request(task.life, ticket, function, args, kwargs, call.run, call.scheduled, dict(new), drop)
            requests.append(to_bytes(tuple(request), self._ray.pack, (Sent, Deleted, ResourceRef, Run, Alive)))
            task.known.update(new)
            new.clear()
            drop = []
        return requests

    def _result(self, task: RayTask, outcome: Outcome) -> Any:
        if outcome.how == "done":
            return outcome.value
        if outcome.how == "failed":
            error: BaseException = pickle.loads(outcome.value)
            error.add_note(f"On {task.job} {task.index}:\n{outcome.trace}")
            raise error
        raise task.unavailable("it was started anew")

    def _drop_everywhere(self, number: int) -> None:
        for task in self._tasks.values():
            if task.job == "worker" and not self._closed:  # at the program's end there is no `Sent` any more
                task.drop.append(Sent(number))
