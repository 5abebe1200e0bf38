"""`RayEngine`: each worker and each server is an actor of a Ray cluster, a process of its own (T2.4, T9)."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from workbench.errors import UsageError
from workbench.parameter_server.engines.ray_tasks import Hello, Outcome, Request
from workbench.parameter_server.engines.sendable import SendOnce, Sent
from workbench.parameter_server.engines.start_tasks import START_S, KnownTask, lives, meet_first, start_tasks
from workbench.parameter_server.errors import CancelledError, Job, UnavailableError
from workbench.parameter_server.links.link import LinkedPlane
from workbench.parameter_server.links.plasma import CONTROL
from workbench.parameter_server.links.shared_memory import machine
from workbench.parameter_server.links.ways import PLANES, Plane, Ways
from workbench.parameter_server.servers.placed import PlacedModule
from workbench.parameter_server.servers.plane import DataPlane
from workbench.parameter_server.workers.closure import Closure, map_structure
from workbench.parameter_server.workers.wire import from_wire, to_bytes, to_wire
from workbench.parameter_server.workers.worker import Call, ResourceRef
from workbench.ray.cluster import NotYet, RayCluster, WorkerLost

BRIEF_S = 0.001  # rule of thumb: what it takes to send a call
POLL_S = 0.05  # how soon it is seen that a closure was cancelled or its worker killed
ANSWER_S = 1.0  # how long a task may take to say that it is well, before it counts as busy
SILENT_S = 10.0  # and how long before it counts as gone (rule of thumb)
END_S = 5.0  # until the processes of a cluster that was shut down are gone


class RayEngine:
    """Workers and servers as actors. One that dies is started again by Ray, empty; who was killed by `kill` is left alone until `restart`.

    Args:
        num_workers: at least 1.
        num_ps: at least 1.
        cluster: id of the cluster.
        data_plane: how values travel: "shm" within one machine, "plasma" by Ray's object store between any two; "auto" takes the first that the places of both ends allow, and `plane.why` tells it.
        address: of a Ray cluster that is there, see `RayCluster.connect`; None takes the one of this process, or starts one here.
        ray: the cluster itself, in place of its address; it is left at the end.
        resource: what the machine of a task offers, see `RayCluster.place`; None lets Ray choose the machines.
        grace_s: how long a cancelled closure may take to notice before an exception is raised inside it; after three times that
            long its worker is ended.

    Raises:
        UsageError: a number or name that is not allowed.
        ClusterError: there is no cluster, its processes do not start, or have another version of this package.
    """

    name: str = "ray"
    plane: DataPlane

    def __init__(
        self,
        num_workers: int,
        num_ps: int,
        *,
        cluster: str,
        data_plane: Plane = "auto",
        address: str | None = None,
        ray: RayCluster | None = None,
        resource: Callable[[Job, int], str] | None = None,
        grace_s: float = 1.0,
    ) -> None:
        for name, count in (("num_workers", num_workers), ("num_ps", num_ps)):
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise UsageError(f"{name}={count!r} must be an integer of at least 1.")
        if data_plane not in PLANES:
            raise UsageError(f"data_plane={data_plane!r} is not known. Allowed: {', '.join(map(repr, PLANES))}.")
        self.num_workers, self.num_servers, self.grace_s = num_workers, num_ps, grace_s
        self._tickets = itertools.count()
        self._closed = False
        self._ray = RayCluster.connect(address) if ray is None else ray
        self._tasks: dict[tuple[Job, int], KnownTask] = {}
        self._plane: LinkedPlane | None = None
        self._sent = SendOnce(self._ray.pack)
        try:
            self._tasks, names = start_tasks(
                self._ray,
                num_workers,
                num_ps,
                cluster=cluster,
                data_plane=data_plane,
                resource=resource,
                grace_s=grace_s,
            )
            for task in self._tasks.values():
                meet_first(self._ray, task)
            self.plane = self._plane = LinkedPlane(num_ps, Ways(names, data_plane, num_workers).connector())
            self._plane.connect()
        except BaseException:
            self.close()
            raise

    def check_sendable(self, closure: Closure) -> None:
        """Refuse a closure that cannot be sent (behaviour 20).

        Raises:
            TypeError: with what to do.
        """
        self._sent.check(closure)

    def execute(self, worker: int, call: Call, cancel: threading.Event) -> Any:
        """See `Engine`."""
        task = self._task("worker", worker)
        (outcome,) = self._asked(task, [call], cancel)
        if outcome.how == "not kept":  # it was dropped there for things that were used since
            task.known.clear()
            (outcome,) = self._asked(task, [call], cancel)
        return from_wire(self._result(task, outcome))

    def brief(self, worker: int) -> bool:
        """Return whether what a worker ran last took less time than sending it."""
        return self._tasks["worker", worker].seconds < BRIEF_S

    def execute_several(
        self, worker: int, calls: Sequence[Call], cancel: threading.Event
    ) -> list[tuple[Any, BaseException | None]]:
        """Run calls in their order by one request.

        Returns:
            Result or error of each that the worker came to: it stops where one fails, or takes its time.

        Raises:
            UnavailableError: the worker is gone.
            CancelledError: it had to be ended because it did not stop.
        """
        task = self._task("worker", worker)
        found: list[tuple[Any, BaseException | None]] = []
        for outcome in self._asked(task, calls, cancel):
            if outcome.how == "not kept":
                task.known.clear()
                break
            if outcome.how == "other life":
                self._result(task, outcome)
            try:
                found.append((from_wire(self._result(task, outcome)), None))
            except BaseException as error:
                found.append((None, error))
        return found

    def build(
        self, worker: int, resource: int, recipe: Callable[[], Any], needs: Mapping[str, int] | None = None
    ) -> None:
        """See `Engine`."""
        task = self._task("worker", worker)
        try:
            sendable = self._sent.packed(recipe)
        except TypeError as error:
            sendable = self._sent.packed(_Refusal(str(error)))
        sent = self._ray.call(task.actor, "build", task.life, resource, sendable.content, needs)
        self._result(task, Outcome(*pickle.loads(self._waited(task, sent))))

    def drop(self, worker: int, resources: Sequence[int]) -> None:
        """See `Engine`. The worker is told with its next call: this may run while Python collects garbage."""
        self._tasks["worker", worker].drop.extend(resources)

    def held(self, worker: int) -> int:
        """See `Engine`."""
        task = self._task("worker", worker)
        return int(self._waited(task, self._ray.call(task.actor, "held", task.taken_drop())))

    def wait_for_worker(self, worker: int, timeout_s: float) -> bool:
        """See `Engine`."""
        task = self._tasks["worker", worker]
        until = time.monotonic() + timeout_s
        if not task.free.wait(timeout_s):
            return False
        while not self._closed:
            left = until - time.monotonic()
            if left <= 0:
                return False
            if self._meet(task, left) is None:
                return True
            time.sleep(min(POLL_S, left))
        time.sleep(max(0.0, until - time.monotonic()))
        return False

    def check(self, job: Job, index: int) -> UnavailableError | None:
        """See `Engine`. A task that is busy is healthy."""
        task = self._tasks[job, index]
        if not task.free.is_set() or self._closed:
            return UnavailableError(job, index)
        return self._meet(task, ANSWER_S)

    def incarnation(self, job: Job, index: int) -> int:
        """See `Engine`."""
        return self._tasks[job, index].incarnation

    def pid(self, job: Job, index: int) -> int:
        """Return the process of a task, on its machine."""
        hello = self._tasks[job, index].hello
        if hello is None:
            raise UnavailableError(job, index)
        return hello.pid

    def kill(self, job: Job, index: int) -> None:
        """See `Engine`. The process gets SIGKILL where it is on this machine; Ray ends it elsewhere."""
        task = self._tasks[job, index]
        task.free.clear()
        if task.hello is not None and task.hello.machine == machine():
            with contextlib.suppress(ProcessLookupError):
                os.kill(task.hello.pid, signal.SIGKILL)
        else:
            self._ray.kill(task.actor, for_good=False)

    def restart(self, job: Job, index: int) -> None:
        """See `Engine`. Returns when it answers."""
        task = self._tasks[job, index]
        if task.free.is_set():
            return
        before = task.hello
        until = time.monotonic() + START_S
        while self._meet(task, ANSWER_S) is not None or task.hello is before:
            if self._closed:
                return
            if time.monotonic() > until:
                raise UnavailableError(job, index, f"it was not back within {START_S:g} s")
            time.sleep(POLL_S)
        task.free.set()

    def close(self) -> None:
        """See `Engine`."""
        if self._closed:
            return
        self._closed = True
        if self._plane is not None:
            self._plane.close()
        for task in self._tasks.values():
            with contextlib.suppress(Exception):
                self._ray.kill(task.actor)
        until = time.monotonic() + END_S
        for task in self._tasks.values():
            while task.hello is not None and task.hello.machine == machine() and lives(task.hello.pid):
                if time.monotonic() > until:
                    break
                time.sleep(0.01)
        self._ray.close()

    def _task(self, job: Job, index: int) -> KnownTask:
        task = self._tasks[job, index]
        if self._closed:
            raise UnavailableError(job, index, "the cluster was shut down")
        if not task.free.is_set():
            raise UnavailableError(job, index)
        return task

    def _asked(self, task: KnownTask, calls: Sequence[Call], cancel: threading.Event) -> list[Outcome]:
        """Send calls with what the worker does not know of them yet, and wait for what becomes of them."""
        new: dict[int, bytes] = {}

        def named(thing: Any) -> Sent:
            sendable = self._sent.packed(thing)
            if sendable.number not in task.known:
                new[sendable.number] = sendable.content
            return Sent(sendable.number)

        def outgoing(leaf: Any) -> Any:
            return named(leaf) if isinstance(leaf, PlacedModule) else to_wire(leaf)

        ticket, drop = next(self._tickets), task.taken_drop()
        contents = []
        for call in calls:
            function = named(call.function)
            args, kwargs = map_structure(outgoing, list(call.args)), map_structure(outgoing, dict(call.kwargs))
            request = Request(task.life, ticket, function, args, kwargs, call.number, call.loop, dict(new), drop)
            contents.append(to_bytes(tuple(request), self._ray.pack, (Sent, ResourceRef)))
            task.known.update(new)
            new.clear()
            drop = []
        try:
            if len(contents) == 1:
                answers = [self._waited(task, self._ray.call(task.actor, "execute", contents[0]), cancel, ticket)]
            else:
                sent = self._ray.call(task.actor, "execute_several", contents)
                answers = self._waited(task, sent, cancel, ticket)
        except BaseException:
            task.known.clear()  # nobody knows how far it came
            raise
        outcomes = [Outcome(*pickle.loads(answer)) for answer in answers]
        if len(outcomes) < len(contents):
            task.known.clear()
        task.seconds = max(outcome.seconds for outcome in outcomes)
        return outcomes

    def _waited(self, task: KnownTask, sent: Any, cancel: threading.Event | None = None, ticket: int = -1) -> Any:
        """Wait for an answer, and look meanwhile whether the task was killed or the call is to stop."""
        first: float | None = None  # when it was asked to stop
        last = 0.0
        while True:
            try:
                return self._ray.answer(sent, POLL_S)
            except WorkerLost:
                raise UnavailableError(task.job, task.index) from None
            except NotYet:
                if not task.free.is_set() or self._closed or task.gone():
                    raise UnavailableError(task.job, task.index) from None
            if cancel is None or not cancel.is_set():
                continue
            now = time.monotonic()
            first = first or now
            if now - first > 3 * self.grace_s:
                self._ray.kill(task.actor, for_good=False)
                raise CancelledError
            if now - last > self.grace_s:  # again, because the call may not have begun
                last = now
                self._ray.call(task.actor, "cancel", ticket, group=CONTROL)

    def _result(self, task: KnownTask, outcome: Outcome) -> Any:
        if outcome.how == "done":
            return outcome.value
        if outcome.how == "failed":
            error: BaseException = pickle.loads(outcome.value)
            error.add_note(f"On {task.job} {task.index}:\n{outcome.trace}")
            raise error
        raise UnavailableError(task.job, task.index, "it was started anew")

    def _meet(self, task: KnownTask, timeout_s: float) -> UnavailableError | None:
        """Ask whether a task is well; one that has not answered yet is asked no second time."""
        with task.lock:
            if task.asked is None:
                task.asked = (self._ray.call(task.actor, "hello", group=CONTROL), time.monotonic())
            call, since = task.asked
            until = time.monotonic() + timeout_s
            hello: Hello | None = None
            while hello is None:
                try:
                    hello = self._ray.answer(call, max(0.0, min(POLL_S, until - time.monotonic())))
                except WorkerLost:
                    task.asked = None
                    return UnavailableError(task.job, task.index)
                except NotYet:
                    now = time.monotonic()
                    if now - since > SILENT_S:
                        task.asked = None
                        return UnavailableError(task.job, task.index, f"no answer within {SILENT_S:g} s")
                    if task.gone():
                        return UnavailableError(task.job, task.index)
                    if now > until:
                        return None
            task.asked = None
            before = task.incarnation
            task.met(hello)
            if task.job == "ps" and task.incarnation != before and self._plane is not None:
                self._plane.forget(task.index)
            return None


class _Refusal:
    """A recipe that could not be sent, and says so where it is needed."""

    def __init__(self, why: str) -> None:
        self._why = why

    def __call__(self, **_: Any) -> Any:
        """Refuse."""
        raise TypeError(self._why)
