"""`WorkerTask`: what the actor of a worker holds, around the runtime that every engine has; `RayTask`: what servers have in common with it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch

from workbench import __version__
from workbench.parameter_server.engines.sendable import Kept, NotKept, Sent
from workbench.parameter_server.errors import CancelledError
from workbench.parameter_server.links.link import LinkedPlane
from workbench.parameter_server.links.shared_memory import machine, shared_memory_missing
from workbench.parameter_server.links.ways import Ways
from workbench.parameter_server.servers.plane import set_plane
from workbench.parameter_server.workers.closure import map_structure
from workbench.parameter_server.workers.wire import from_wire, to_bytes, to_wire
from workbench.parameter_server.workers.worker import Call, WorkerRuntime
from workbench.ray.cluster import RayCluster

SEVERAL_S = 0.005  # rule of thumb: what others may have to wait because a function turned out to be long


class Hello(NamedTuple):
    """How a task introduces itself.

    Attributes:
        life: another one each time that it was started.
        pid: of its process.
        machine: see `shared_memory.machine`.
        version: of this package.
        no_memory: why it cannot share memory; None where it can.
    """

    life: str
    pid: int
    machine: str
    version: str
    no_memory: str | None


class Request(NamedTuple):
    """What a worker is to run.

    Attributes:
        life: of the worker that is meant: another one lacks what the function needs.
        ticket: of this call, for `cancel`.
        function: to run.
        args: for it.
        kwargs: for it.
        number: of the closure.
        loop: whose time it takes.
        new: what is to be kept from now on.
        drop: resources to forget.
    """

    life: str
    ticket: int
    function: Sent
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    number: int | None
    loop: int | None
    new: Mapping[int, bytes]
    drop: Sequence[int]


class Outcome(NamedTuple):
    """What became of a call.

    Attributes:
        how: "done"; "failed" with the error in `value`; "other life" and "not kept" where the call did not begin.
        value: result, or error, pickled.
        trace: of an error.
        seconds: that the function took.
    """

    how: Literal["done", "failed", "other life", "not kept"]
    value: Any = None
    trace: str = ""
    seconds: float = float("inf")


class RayTask:
    """What workers and servers have in common."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._hello = Hello(uuid.uuid4().hex, os.getpid(), machine(), __version__, shared_memory_missing())

    def hello(self) -> Hello:
        """Introduce itself."""
        return self._hello


class WorkerTask(RayTask):
    """A worker that is called through Ray, one call at a time; `cancel` and `hello` are answered meanwhile.

    Args:
        cluster: id.
        ways: how it reaches the servers.
        grace_s: how long a cancelled function may take to notice before an exception is raised inside it.
    """

    def __init__(self, index: int, cluster: str, ways: Ways, grace_s: float) -> None:
        super().__init__()
        self._grace_s = grace_s
        self._runtime = WorkerRuntime(index)
        self._kept = Kept()
        self._pack = RayCluster.joined().pack
        self._lock = threading.Lock()
        self._running: tuple[int, int, threading.Event] | None = None  # call, thread, flag
        set_plane(cluster, LinkedPlane(len(ways.names), ways.connector()))

    def execute(self, content: bytes) -> bytes:
        """Run a function.

        Args:
            content: a `Request`, tensors packed, what is kept here by number.

        Returns:
            An `Outcome`.
        """
        return self._executed(content)[0]

    def execute_several(self, contents: Sequence[bytes]) -> list[bytes]:
        """Run functions one after the other and return what became of each, up to one that fails or takes its time."""
        found: list[bytes] = []
        begun = time.perf_counter()
        for content in contents:
            done, how = self._executed(content)
            found.append(done)
            if how != "done" or time.perf_counter() - begun > SEVERAL_S:
                break
        return found

    def _executed(self, content: bytes) -> tuple[bytes, str]:
        flag = threading.Event()

        def work() -> Outcome:
            request = Request(*pickle.loads(content))
            if request.life != self._hello.life:
                return Outcome("other life")
            self._runtime.drop(request.drop)
            self._kept.add(request.new)
            try:
                function = self._kept.get(request.function)
                args, kwargs = (
                    map_structure(self._received, request.args),
                    map_structure(self._received, request.kwargs),
                )
            except NotKept:
                return Outcome("not kept")
            with self._cancellable(request.ticket, flag):
                begun = time.perf_counter()
                call = Call(function, args, kwargs, request.number, request.loop)
                value = to_wire(self._runtime.execute(call, flag))
                return Outcome("done", value, seconds=time.perf_counter() - begun)

        return self._outcome(work)

    def build(self, life: str, resource: int, recipe: bytes, needs: Mapping[str, int] | None) -> bytes:
        """Make a resource, for the life that is meant."""

        def work() -> Outcome:
            if life != self._hello.life:
                return Outcome("other life")
            self._runtime.build(resource, pickle.loads(recipe), needs)
            return Outcome("done")

        return self._outcome(work)[0]

    def held(self, drop: Sequence[int]) -> int:
        """Forget resources and return how many there are."""
        self._runtime.drop(drop)
        return self._runtime.held()

    def cancel(self, ticket: int) -> None:
        """Ask a call to stop; insist where it does not notice."""
        with self._lock:
            running = self._running
        if running is None or running[0] != ticket:
            return
        running[2].set()
        ended = threading.Event()
        while not ended.wait(self._grace_s):
            with self._lock:
                if self._running is not running:
                    return
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(running[1]), ctypes.py_object(CancelledError))

    @contextlib.contextmanager
    def _cancellable(self, ticket: int, flag: threading.Event) -> Iterator[None]:
        with self._lock:
            self._running = (ticket, threading.get_ident(), flag)
        try:
            yield
        finally:
            with self._lock:
                self._running = None
            for _ in range(8):  # an exception that was raised from outside arrives here at the latest
                flag.is_set()

    def _outcome(self, work: Callable[[], Outcome]) -> tuple[bytes, str]:
        try:
            outcome = work()
            return to_bytes(tuple(outcome), self._pack), outcome.how
        except BaseException as error:
            outcome = Outcome("failed", _pickled(error, self._pack), traceback.format_exc())
            return to_bytes(tuple(outcome), self._pack), outcome.how

    def _received(self, leaf: Any) -> Any:
        return self._kept.get(leaf) if isinstance(leaf, Sent) else from_wire(leaf)


def _pickled(error: BaseException, pack: Callable[[Any], bytes]) -> bytes:
    """Return an error in bytes that can be read again; what cannot be is told by its name and text."""
    try:
        content = pack(error)
        pickle.loads(content)
    except Exception:
        content = pack(RuntimeError(f"{type(error).__name__}: {error}"))
    return content
