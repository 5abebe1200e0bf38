"""`RayTask`: a worker or server as the coordinator knows it (behaviours 60, 64); `SendOnce`: what a worker is sent once and then named by a number."""

import contextlib
import dis
import functools
import itertools
import os
import signal
import threading
import time
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
from torch import Tensor

from workbench import __version__
from workbench.errors import ClusterError
from workbench.parameter_server.errors import Job, UnavailableError
from workbench.parameter_server.servers.links import CONTROL
from workbench.parameter_server.servers.placed import PlacedModule
from workbench.parameter_server.servers.variable import RemoteTensor
from workbench.parameter_server.workers.closure import Closure, map_structure
from workbench.parameter_server.workers.worker import PerWorkerValues, ResourceRef
from workbench.ray.cluster import NotYet, RayCluster, WorkerLost
from workbench.ray.shared_memory import Witness, machine

_PLAIN = (
    int, float, complex, str, bytes, bool, type(None), Tensor, np.ndarray, np.generic,
    ResourceRef, PerWorkerValues, RemoteTensor, PlacedModule,
)  # fmt: skip


class Hello(NamedTuple):
    """How a process introduces itself."""

    life: str  # another one each time that it was started
    pid: int
    machine: str  # see `workbench.ray.shared_memory.machine`
    version: str  # of this package
    no_memory: str | None  # why it cannot share memory


@dataclass(frozen=True)
class Sent:
    """Stands for a thing by its number."""

    number: int


class Deleted(NamedTuple):
    """A placed module that nobody holds any more."""

    cluster: str
    name: str


Dropped = int | Sent | Deleted
"""What a worker need not hold any more: a resource, something that was sent, the replica of a module."""


class Sendable(NamedTuple):
    """A thing's number and content, as `pickle.loads` reads it."""

    number: int
    content: bytes
    thing: Any  # a weak reference, or the thing itself
    captured: tuple[Any, ...]  # what it takes along, likewise


class SendOnce:
    """Packs a thing the first time that it is sent, and again where what it took along from outside was replaced since.

    Things are told apart by identity. What is changed in place after the first time is not seen: as with any function that is sent
    elsewhere, state belongs in its arguments, in variables or in what the workers hold. `drop` is told the number of a thing that will
    not be sent again, maybe while Python collects garbage.
    """

    def __init__(self, pack: Callable[[Any], bytes], drop: Callable[[int], object]) -> None:
        self._pack, self._drop = pack, drop
        self._entries: dict[int, Sendable] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def packed(self, thing: Any) -> Sendable:
        """Return a thing's number and bytes; raises `TypeError` where it cannot be sent."""
        captured = taken_along(thing)
        entry = self._entries.get(id(thing))
        if (
            entry is not None
            and _still_is(entry.thing, thing)
            and len(entry.captured) == len(captured)
            and all(map(_still_is, entry.captured, captured))
        ):
            return entry
        try:
            content = self._pack(thing)
        except Exception as error:
            name = f"The function {thing.__qualname__!r}" if hasattr(thing, "__qualname__") else type(thing).__name__
            raise TypeError(
                f"{name} cannot be sent to a worker: {error}. Locks, open files, generators, clusters and coordinators stay "
                "where they are: make what the function needs inside of it, in a dataset function, or give it as an argument."
            ) from error
        with self._lock:
            before, number = self._entries.get(id(thing)), next(self._numbers)
            held = _weak(thing, functools.partial(self._forget, id(thing), number))
            sendable = Sendable(number, content, held, tuple(map(_weak, captured)))
            self._entries[id(thing)] = sendable
        if before is not None:
            self._drop(before.number)
        return sendable

    def check(self, closure: Closure) -> None:
        """Refuse a closure that cannot be sent, by a `TypeError` that says what to do (behaviour 20)."""
        self.packed(closure.function)
        map_structure(self._check_argument, [list(closure.args), dict(closure.kwargs)])

    def _check_argument(self, leaf: Any) -> None:
        if not isinstance(leaf, _PLAIN):
            try:
                self._pack(leaf)
            except Exception as error:
                raise TypeError(
                    f"An argument of type {type(leaf).__name__} cannot be sent to a worker: {error}. Make it inside of the function, or "
                    "let every worker hold one of its own: coordinator.create_per_worker_dataset."
                ) from error

    def _forget(self, key: int, number: int, _: Any) -> None:
        entry = self._entries.get(key)
        if entry is not None and entry.number == number:
            self._entries.pop(key, None)
            self._drop(number)


def taken_along(thing: Any) -> tuple[Any, ...]:
    """Return what a function is sent with from outside of itself: defaults, free variables, and the globals that it reads."""
    code = getattr(thing, "__code__", None)
    if code is None:
        return ()
    cells = tuple(_content(cell) for cell in getattr(thing, "__closure__", None) or ())
    outside = thing.__globals__
    return (
        thing.__defaults__,
        thing.__kwdefaults__,
        *cells,
        *(outside[name] for name in _globals(code) if name in outside),
    )


@functools.lru_cache(1024)
def _globals(code: types.CodeType) -> tuple[str, ...]:
    """Return the names of globals that a function reads, and those that functions inside of it read."""
    own = [each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL"]
    inside = [name for const in code.co_consts if isinstance(const, types.CodeType) for name in _globals(const)]
    return tuple(dict.fromkeys(own + inside))


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _weak(thing: Any, when_gone: Callable[[Any], None] | None = None) -> Any:
    try:
        return weakref.ref(thing, when_gone)
    except TypeError:
        return thing


def _still_is(held: Any, thing: Any) -> bool:
    return (held() if isinstance(held, weakref.ref) else held) is thing


Item = TypeVar("Item")


def emptied(waiting: deque[Item]) -> Iterator[Item]:
    """Take out one after the other, also what others append or take meanwhile."""
    with contextlib.suppress(IndexError):
        while True:
            yield waiting.popleft()


START_S = 120.0  # until every task has answered for the first time; importing torch takes seconds where others compute
POLL_S = 0.05  # how soon it is seen that a closure was cancelled or its worker killed
SILENT_S = 5.0  # without an answer before a task counts as gone, so that a machine that is cut off is told within 10 s, 3 of them for what still asks it (rule of thumb)


class RayTask:
    """An actor, and which life of it is known."""

    def __init__(self, ray: RayCluster, job: Job, index: int, actor: Any) -> None:
        self._ray, self.job, self.index, self.actor = ray, job, index, actor
        self.hello: Hello | None = None
        self.incarnation = 0
        self.released = threading.Event()  # cleared while it was killed and is to stay away
        self.released.set()
        self.known: set[int] = set()  # numbers of what this life of a worker keeps
        self.seconds = float("inf")  # that a worker's last call took there
        self.drop: deque[Dropped] = deque()
        self._witness: Witness | None = None  # of its process, where that is on this machine
        self._asked: tuple[Any, float] | None = None  # whether it is well, and when
        self._lock = threading.Lock()

    @property
    def life(self) -> str:
        """Which life of the task is known."""
        return "" if self.hello is None else self.hello.life

    @property
    def local(self) -> bool:
        """Whether its process is on this machine."""
        return self.hello is not None and self.hello.machine == machine()

    @property
    def pid(self) -> int:
        """Its process, on its machine."""
        if self.hello is None:
            raise self.unavailable()
        return self.hello.pid

    @property
    def silent(self) -> bool:
        """Whether it has not answered yet what `meet` asked: it is busy, or its machine is cut off."""
        return self._asked is not None

    def unavailable(self, why: str = "its process is gone") -> UnavailableError:
        """Return the error that names it."""
        return UnavailableError(self.job, self.index, why)

    def meet_first(self) -> None:
        """Wait until it has introduced itself; raises `ClusterError` where it cannot be started, or has another version of this package."""
        try:
            hello = self._ray.answer(self._ray.call(self.actor, "hello"), START_S)
        except (WorkerLost, TimeoutError) as error:
            raise ClusterError(f"{self.job} {self.index} cannot be started: {error}") from error
        if hello.version != __version__:
            raise ClusterError(
                f"{self.job} {self.index} runs workbench {hello.version}, and this process {__version__}: install the same "
                "version on every machine of the cluster."
            )
        self._met(hello)

    def meet(self, timeout_s: float) -> UnavailableError | None:
        """Ask whether it is well, and return None where it answers, or is busy; one that has not answered yet is asked no second time."""
        with self._lock:
            if self._asked is None:
                self._asked = (self._ray.call(self.actor, "hello", group=CONTROL), time.monotonic())
            call, since = self._asked
            until = time.monotonic() + timeout_s
            while True:
                try:
                    hello = self._ray.answer(call, max(0.0, min(POLL_S, until - time.monotonic())))
                except WorkerLost:
                    self._asked = None
                    return self.unavailable()
                except NotYet:
                    now = time.monotonic()
                    if now - since > SILENT_S:
                        self._asked = None
                        return self.unavailable(f"no answer within {SILENT_S:g} s")
                    if self.gone():
                        return self.unavailable()
                    if now > until:
                        return None
                else:
                    self._asked = None
                    self._met(hello)
                    return None

    def wait(self, call: Any, between: Callable[[], object] | None = None) -> Any:
        """Return the answer to a call; `between` is called now and then until it is there, and a task that ended is unavailable."""
        while True:
            try:
                return self._ray.answer(call, POLL_S)
            except WorkerLost:
                raise self.unavailable() from None
            except NotYet:
                if not self.released.is_set() or self.gone():
                    raise self.unavailable() from None
                if between is not None:
                    between()

    def kill(self) -> None:
        """End it, and let it stay away until `released` is set: by SIGKILL where it is on this machine, else through Ray."""
        self.released.clear()
        if self.local:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        else:
            self._ray.kill(self.actor, for_good=False)

    def _met(self, hello: Hello) -> None:
        """Note who answers; a new life knows nothing."""
        if self.life == hello.life:
            return
        self.incarnation += self.hello is not None
        self.known.clear()
        self.drop.clear()
        self.hello, self._witness = hello, None
        if self.local:
            with contextlib.suppress(OSError):  # it has ended since, or cannot be seen: Ray will tell
                self._witness = Witness(hello.pid)

    def gone(self) -> bool:
        """Return whether the life that is known is seen to have ended, which Ray may take seconds to notice."""
        witness = self._witness
        return witness is not None and witness.gone()
