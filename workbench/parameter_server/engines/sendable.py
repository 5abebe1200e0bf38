"""`SendOnce`: what is sent to a worker once and then named by a number: functions, recipes of datasets, placed modules."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from workbench.parameter_server.servers.placed import PlacedModule
from workbench.parameter_server.servers.variable import RemoteTensor
from workbench.parameter_server.workers.closure import Closure, map_structure
from workbench.parameter_server.workers.worker import PerWorkerValues, PerWorkerVariable, ResourceRef

_PLAIN = (
    int, float, complex, str, bytes, bool, type(None), Tensor, np.ndarray, np.generic,
    ResourceRef, PerWorkerValues, PerWorkerVariable, RemoteTensor, PlacedModule,
)  # fmt: skip


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


class _Entry(NamedTuple):
    thing: Any  # a weak reference, or the thing itself
    captured: tuple[Any, ...]
    sendable: Sendable


class SendOnce:
    """Packs a thing the first time that it is sent, and again where what it took along from outside was replaced since.

    Things are told apart by identity. What is changed in place after the first time is not seen: as with any function that is sent
    elsewhere, state belongs in its arguments, in variables or in what the workers hold.

    Args:
        pack: returns the bytes of a thing.
        drop: told the number of a thing that will not be sent again; maybe while Python collects garbage.
    """

    def __init__(self, pack: Callable[[Any], bytes], drop: Callable[[int], object]) -> None:
        self._pack, self._drop = pack, drop
        self._entries: dict[int, _Entry] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def packed(self, thing: Any) -> Sendable:
        """Return a thing's number and bytes; raises `TypeError` where it cannot be sent."""
        captured = _captured(thing)
        entry = self._entries.get(id(thing))
        if entry is not None and _still_is(entry.thing, thing) and _all_still_are(entry.captured, captured):
            return entry.sendable
        try:
            content = self._pack(thing)
        except Exception as error:
            name = f"The function {thing.__qualname__!r}" if hasattr(thing, "__qualname__") else type(thing).__name__
            raise TypeError(
                f"{name} cannot be sent to a worker: {error}. Locks, open files, generators, clusters and coordinators stay "
                "where they are: make what the function needs inside of it, in a dataset function, or give it as an argument."
            ) from error
        with self._lock:
            before, sendable = self._entries.get(id(thing)), Sendable(next(self._numbers), content)
            held = _weak(thing, partial(self._forget, id(thing), sendable.number))
            self._entries[id(thing)] = _Entry(held, tuple(map(_weak, captured)), sendable)
        if before is not None:
            self._drop(before.sendable.number)
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
        if entry is not None and entry.sendable.number == number:
            self._entries.pop(key, None)
            self._drop(number)


def _captured(thing: Any) -> tuple[Any, ...]:
    """Return what a function reads from outside of itself: free variables and globals."""
    code = getattr(thing, "__code__", None)
    if code is None:
        return ()
    cells = tuple(_content(cell) for cell in getattr(thing, "__closure__", None) or ())
    outside = thing.__globals__
    return (*cells, *(outside[name] for name in code.co_names if name in outside))


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


def _all_still_are(held: tuple[Any, ...], things: tuple[Any, ...]) -> bool:
    return len(held) == len(things) and all(map(_still_is, held, things))
