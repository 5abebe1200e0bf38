"""`WorkerTask` and `ServerTask`: what an actor of a Ray cluster holds, around the runtimes that every engine has."""

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
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from workbench import __version__
from workbench.hosts.gloo_pair import GlooPair
from workbench.hosts.ray_cluster import RayCluster, address_of_this_worker
from workbench.parameter_server.engines.sendable import Kept, NotKept, Sent
from workbench.parameter_server.errors import CancelledError
from workbench.parameter_server.links.gloo import CONNECT_S, waiting
from workbench.parameter_server.links.link import LinkedPlane
from workbench.parameter_server.links.shared_block import Located, SharedBlock
from workbench.parameter_server.links.shared_memory import Where, machine, share, shared_memory_missing
from workbench.parameter_server.links.ways import Ways
from workbench.parameter_server.servers.layout import Lying, laid_out, taken
from workbench.parameter_server.servers.planes import set_plane
from workbench.parameter_server.servers.server import Push, ServerRuntime
from workbench.parameter_server.workers.closure import map_structure
from workbench.parameter_server.workers.wire import from_wire, to_bytes, to_wire
from workbench.parameter_server.workers.worker import Call, WorkerRuntime

__all__ = ["Hello", "Outcome", "Request", "ServerTask", "WorkerTask"]


SEVERAL_S = 0.005  # rule of thumb: what others may have to wait because a function turned out to be long


class Hello(NamedTuple):
    """How a task introduces itself.

    Attributes:
        life: another one each time that it was started.
        pid: of its process.
        machine: see `shared_memory.machine`.
        version: of this package.
        address: of its machine, as others of the cluster reach it.
        no_memory: why it cannot share memory; None where it can.
    """

    life: str
    pid: int
    machine: str
    version: str
    address: str
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


class _Task:
    """What both have in common."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._hello = Hello(
            uuid.uuid4().hex, os.getpid(), machine(), __version__, address_of_this_worker(), shared_memory_missing()
        )

    def hello(self) -> Hello:
        """Introduce itself."""
        return self._hello


class ServerTask(_Task):
    """A server that is called through Ray, one call at a time.

    Args:
        index: of the server.
        readers: processes that may read its blocks where they lie: workers and coordinator.
        may_share: whether blocks lie in memory that others can see.
    """

    def __init__(self, index: int, readers: int, may_share: bool) -> None:
        super().__init__()
        self._readers = readers
        self._may_share = may_share and self._hello.no_memory is None
        self._shared: dict[str, SharedBlock] = {}
        self._pairs: dict[int, GlooPair] = {}
        self._notes: dict[tuple[str, str], bytes] = {}
        self._attempts: dict[int, str] = {}
        self._outboxes: dict[int, tuple[Where, Tensor]] = {}
        self._runtime = ServerRuntime(index, self._memory)

    def ask(self, method: str, arguments: Sequence[Any]) -> Any:
        """Call a method of the runtime by its name."""
        given = from_wire(arguments)
        if method in ("write", "push", "load"):
            return to_wire(self._written(given[0], lambda: getattr(self._runtime, method)(*given)))
        found = getattr(self._runtime, method)(*given)
        if method == "load_report":
            self._add_what_was_read(found)
        if method == "delete":
            self._forget(given[0])
        return to_wire(found)

    def small(self, content: bytes) -> Any:
        """Call a method of this class by its name, with arguments that came as bytes."""
        method, arguments = pickle.loads(content)
        return getattr(self, method)(*arguments)

    def locate(self, name: str) -> Located | None:
        """Return where a block lies; None where others cannot see it.

        Raises:
            UnavailableError: there is no such block.
        """
        self._runtime.version(name)
        block = self._shared.get(name)
        return None if block is None else block.located

    def pull(self, blocks: Sequence[str]) -> Any:
        """Return values and versions."""
        return to_wire([self._runtime.read(block) for block in blocks])

    def push(self, blocks: Sequence[str], pushes: Sequence[Push], grads: Sequence[Any]) -> list[int]:
        """Apply gradients that came with the call."""
        return self._pushed(blocks, pushes, from_wire(grads))

    def push_pull(self, blocks: Sequence[str], pushes: Sequence[Push], grads: Sequence[Any]) -> Any:
        """Apply gradients that came with the call and return what came of it."""
        self.push(blocks, pushes, grads)
        return self.pull(blocks)

    def push_shared(
        self,
        blocks: Sequence[str],
        pushes: Sequence[Push],
        outbox: Where,
        lying: Sequence[Lying],
    ) -> list[int]:
        """Apply gradients that lie in the caller's memory, which waits meanwhile."""
        where, content = self._outboxes.get(outbox.pid, (None, None))
        if where != outbox or content is None:
            content = share(outbox)
            self._outboxes[outbox.pid] = (outbox, content)
            for pid in [pid for pid in self._outboxes if not os.path.exists(f"/proc/{pid}")]:
                del self._outboxes[pid]
        return self._pushed(blocks, pushes, taken(content, lying))

    def join_pair(self, reader: int, attempt: str, address: str) -> None:
        """Wait for one of the readers and connect with it."""
        for old in [each for each in self._notes if each[0] == self._attempts.get(reader)]:
            self._notes.pop(old)
        self._attempts[reader] = attempt

        def put(key: str, content: bytes) -> None:
            self.put_note(attempt, key, content)

        self._pairs[reader] = GlooPair(0, put, lambda key: waiting(lambda: self.note(attempt, key)), address, CONNECT_S)

    def put_note(self, attempt: str, key: str, content: bytes) -> None:
        """Keep what one end of a pair has to tell the other, which may be slower."""
        self._notes[attempt, key] = content

    def note(self, attempt: str, key: str) -> bytes | None:
        """Return what was kept."""
        return self._notes.get((attempt, key))

    def size(self, name: str) -> tuple[int, torch.dtype]:
        """Return number and dtype of a block's values."""
        return self._runtime.size(name)

    def pull_gloo(self, reader: int, blocks: Sequence[str], lying: Sequence[Lying], size: int) -> list[int]:
        """Send values to a reader and return their versions."""
        read = [self._runtime.read(block) for block in blocks]
        content = torch.empty(size, dtype=torch.uint8)
        laid_out([values for values, _ in read], lying, content)
        self._pairs[reader].send(content)()
        return [version for _, version in read]

    def push_gloo(
        self, reader: int, blocks: Sequence[str], pushes: Sequence[Push], lying: Sequence[Lying], size: int
    ) -> list[int]:
        """Apply gradients that a reader sends."""
        content = torch.empty(size, dtype=torch.uint8)
        self._pairs[reader].receive(content)()
        return self._pushed(blocks, pushes, taken(content, lying))

    def _pushed(self, blocks: Sequence[str], pushes: Sequence[Push], grads: Sequence[Tensor]) -> list[int]:
        return [
            self._written(block, partial(self._runtime.push, block, grad, push))
            for block, push, grad in zip(blocks, pushes, grads, strict=True)
        ]

    def _written(self, name: str, write: Callable[[], Any]) -> Any:
        shared = self._shared.get(name)
        if shared is None:
            return write()
        with shared.writing(lambda: self._runtime.version(name)):
            return write()

    def _memory(self, name: str, count: int, dtype: torch.dtype) -> Tensor:
        self._forget(name)
        if self._may_share:
            try:
                self._shared[name] = SharedBlock(count, dtype, self._readers)
            except OSError:  # not that much: this block is read by calls
                return torch.empty(count, dtype=dtype)
            return self._shared[name].values
        return torch.empty(count, dtype=dtype)

    def _forget(self, name: str) -> None:
        block = self._shared.pop(name, None)
        if block is not None:
            block.close()

    def _add_what_was_read(self, report: Mapping[str, dict[str, Any]]) -> None:
        for name, block in self._shared.items():
            for key, count in block.counts().items():
                report[name][key] += count


class WorkerTask(_Task):
    """A worker that is called through Ray, one call at a time; `cancel` and `hello` are answered meanwhile.

    Args:
        index: of the worker.
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
