"""`WorkerActor` and `ServerActor`: what the processes of a Ray cluster hold, around the runtimes that every engine has."""

import os
import pickle
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from workbench import __version__
from workbench.parameter_server.context import Run
from workbench.parameter_server.engines.ray_task import Deleted, Dropped, Hello, Sent
from workbench.parameter_server.servers.links import Plane, RayPlane, connector, set_plane
from workbench.parameter_server.servers.replicas import forget_replicas
from workbench.parameter_server.servers.server import Push, ServerRuntime
from workbench.parameter_server.workers.closure import from_wire, map_structure, returning, to_bytes, to_wire
from workbench.parameter_server.workers.worker import Call, WorkerRuntime
from workbench.ray.cluster import RayCluster
from workbench.ray.shared_memory import Where, attach, machine, shared_memory_missing, unpack

SEVERAL_S = 0.1  # that calls of one request may take together: sending it costs 1 to 2 ms, so that larger ones gain 2 % (rule of thumb)


class Request(NamedTuple):
    """What a worker is to run: a `Call` with tensors packed, and what is kept on the worker by its number."""

    life: str  # of the worker that is meant: another one lacks what the function needs
    ticket: int  # of this request, for `cancel`
    function: Sent
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    run: Run | None
    scheduled: bool
    new: Mapping[int, bytes]  # to be kept from now on
    drop: Sequence[Dropped]  # resources to forget, what is not to be kept any more, and replicas


class Outcome(NamedTuple):
    """What became of a request; it did not begin in another life than the one that was meant."""

    how: Literal["done", "failed", "other life"]
    value: Any = None  # the result, or the error, pickled
    trace: str = ""  # of an error
    seconds: float = float("inf")  # that the function took


class _Actor:
    """What workers and servers have in common."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._hello = Hello(uuid.uuid4().hex, os.getpid(), machine(), __version__, shared_memory_missing())

    def hello(self) -> Hello:
        """Introduce itself."""
        return self._hello


class WorkerActor(_Actor):
    """A worker that is called through Ray, one call at a time; `cancel` and `hello` are answered meanwhile."""

    def __init__(self, index: int, cluster: str, servers: Sequence[str], plane: Plane) -> None:
        super().__init__()
        self._runtime = WorkerRuntime(index)
        self._kept: dict[int, Any] = {}
        self._pack = RayCluster.joined().pack
        self._running: tuple[int, threading.Event] | None = None  # ticket, flag
        set_plane(cluster, RayPlane(len(servers), connector(servers, plane, index)))

    def execute(self, requests: Sequence[bytes]) -> list[bytes]:
        """Run functions one after the other and return what became of each, up to one that fails or takes its time."""
        found: list[bytes] = []
        begun = time.perf_counter()
        for content in requests:
            outcome, packed = self._outcome(lambda content=content: self._run(Request(*pickle.loads(content))))  # type: ignore[misc]
            found.append(packed)
            if outcome.how != "done" or time.perf_counter() - begun > SEVERAL_S:
                break
        return found

    def build(self, life: str, resource: int, make: bytes) -> bytes:
        """Make a resource, for the life that is meant."""

        def work() -> Outcome:
            if life != self._hello.life:
                return Outcome("other life")
            self._runtime.build(resource, lambda: pickle.loads(make)())  # noqa: PLW0108 - what cannot be loaded here cannot be made
            return Outcome("done")

        return self._outcome(work)[1]

    def cancel(self, ticket: int) -> None:
        """Ask a request to stop."""
        running = self._running
        if running is not None and running[0] == ticket:
            running[1].set()

    def _run(self, request: Request) -> Outcome:
        if request.life != self._hello.life:
            return Outcome("other life")
        self._forget(request.drop)
        self._kept.update({number: pickle.loads(content) for number, content in request.new.items()})
        received = lambda leaf: self._kept[leaf.number] if isinstance(leaf, Sent) else from_wire(leaf)  # noqa: E731
        args, kwargs = (map_structure(received, given) for given in (request.args, request.kwargs))
        call = Call(self._kept[request.function.number], args, kwargs, request.run, request.scheduled)
        flag = threading.Event()
        self._running = (request.ticket, flag)
        begun = time.perf_counter()
        try:
            value = to_wire(self._runtime.execute(call, flag.is_set))
        finally:
            self._running = None
        return Outcome("done", value, seconds=time.perf_counter() - begun)

    def _forget(self, drop: Sequence[Dropped]) -> None:
        for each in drop:
            if isinstance(each, Sent):
                self._kept.pop(each.number, None)
            elif isinstance(each, Deleted):
                forget_replicas(*each)
            else:
                self._runtime.drop(each)

    def _outcome(self, work: Callable[[], Outcome]) -> tuple[Outcome, bytes]:
        try:
            outcome = work()
            with returning():
                return outcome, to_bytes(tuple(outcome), self._pack)
        except BaseException as error:
            outcome = Outcome("failed", _pickled(error, self._pack), traceback.format_exc())
            return outcome, to_bytes(tuple(outcome), self._pack)


def _pickled(error: BaseException, pack: Callable[[Any], bytes]) -> bytes:
    """Return an error in bytes that can be read again; what cannot be is told by its name and text."""
    try:
        content = pack(error)
        pickle.loads(content)
    except Exception:
        content = pack(RuntimeError(f"{type(error).__name__}: {error}"))
    return content


class ServerActor(_Actor):
    """A server that is called through Ray, one call at a time; so many `readers` may read its blocks where they lie."""

    def __init__(self, index: int, readers: int) -> None:
        super().__init__()
        self._runtime = ServerRuntime(index, readers if self._hello.no_memory is None else 0)
        self._outboxes: dict[int, tuple[Where, Tensor]] = {}

    def ask(self, method: str, arguments: Sequence[Any]) -> Any:
        """Call a method of the runtime by its name."""
        return to_wire(getattr(self._runtime, method)(*from_wire(arguments)))

    def pull(self, blocks: Sequence[str]) -> Any:
        """Return values and versions."""
        return to_wire([self._runtime.read(block) for block in blocks])

    def push(self, blocks: Sequence[str], pushes: Sequence[Push], grads: Any) -> list[int]:
        """Apply gradients that came with the call; returns the new versions."""
        return [self._runtime.push(*each) for each in zip(blocks, from_wire(grads), pushes, strict=True)]

    def push_shared(self, content: bytes) -> list[int]:
        """Apply gradients that lie in the caller's memory, which waits meanwhile; returns the new versions."""
        blocks, pushes, outbox, offsets = pickle.loads(content)
        where, memory = self._outboxes.get(outbox.pid, (None, None))
        if where != outbox or memory is None:
            memory = attach(outbox)
            self._outboxes[outbox.pid] = (outbox, memory)
            for pid in [pid for pid in self._outboxes if not os.path.exists(f"/proc/{pid}")]:
                del self._outboxes[pid]
        return self.push(blocks, pushes, unpack(memory, offsets))
