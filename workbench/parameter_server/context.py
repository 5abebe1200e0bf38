"""Where a piece of code runs: on which worker, in which closure; `get_current_worker_index`, `check_cancelled`."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from workbench.parameter_server.errors import CancelledError

PARTS = ("data_wait_s", "pull_s", "push_s")
"""What a function spends its time on, besides computing."""


class Alive(NamedTuple):
    """What a coordinator knew when it sent a closure: which of the closures that began may still run, or run again."""

    stamp: int  # rises whenever one begins or ends
    newest: int  # that has begun
    closures: tuple[int, ...]


class Run(NamedTuple):
    """A closure that runs, the same when it runs again elsewhere."""

    loop: int  # whose closure it is
    closure: int
    alive: Alive


class Token(NamedTuple):
    """The name of one write to one block, the same in a second run of its closure."""

    run: Run
    write: int  # of the closure's writes to this block, from 0


class Flag(Protocol):
    """What can be looked at, like a `threading.Event`."""

    def is_set(self) -> bool: ...  # noqa: D102


@dataclass
class WorkerContext:
    """What code on a worker may know about itself.

    Attributes:
        index: of the worker.
        cancel: set when the running closure shall stop.
        run: the closure that runs; None where none does.
        builds_dataset: whether a dataset function runs, which must not create variables (T5.4).
        spent: seconds by `PARTS`, which `taking` adds to; None where nobody takes the time.
    """

    index: int
    cancel: Flag = field(default_factory=threading.Event)
    run: Run | None = None
    builds_dataset: bool = False
    spent: dict[str, float] | None = None
    _writes: Counter[tuple[int, str]] = field(default_factory=Counter)

    def token(self, server: int, block: str) -> Token | None:
        """Return the name of this closure's next write to a block."""
        if self.run is None:
            return None
        self._writes[server, block] += 1
        return Token(self.run, self._writes[server, block] - 1)


_HERE = threading.local()


def current_worker() -> WorkerContext | None:
    """Return the context of the worker that runs this code; None on the coordinator."""
    found: WorkerContext | None = getattr(_HERE, "context", None)
    return found


def get_current_worker_index() -> int:
    """Return the index of the worker on which a scheduled function or dataset function runs (behaviour 25).

    Raises:
        RuntimeError: nothing of that kind runs here.
    """
    here = current_worker()
    if here is None:
        raise RuntimeError(
            "get_current_worker_index() was called outside of a worker. Call it inside a function that is given to schedule, or "
            "inside a dataset function."
        )
    return here.index


def check_cancelled() -> None:
    """Raise `CancelledError` if this closure shall stop; reading and writing variables, and next(iterator), do so by themselves.

    A closure that computes for long between them calls it now and then, so that nothing runs on after an error.
    """
    here = current_worker()
    if here is not None and here.cancel.is_set():
        raise CancelledError


@contextlib.contextmanager
def on_worker(context: WorkerContext) -> Iterator[None]:
    """Let the code inside know that it runs on a worker."""
    before = current_worker()
    _HERE.context = context
    try:
        yield
    finally:
        _HERE.context = before


@contextlib.contextmanager
def taking(part: str) -> Iterator[None]:
    """Count the time that the code inside takes on a worker as one of `PARTS`; what is inside of another one counts there."""
    here = current_worker()
    if here is None or here.spent is None:
        yield
        return
    spent, here.spent = here.spent, None
    begun = time.perf_counter()
    try:
        yield
    finally:
        spent[part] += time.perf_counter() - begun
        here.spent = spent


@contextlib.contextmanager
def building_dataset() -> Iterator[None]:
    """Let the code inside know that a dataset function runs."""
    here = current_worker() or WorkerContext(-1)
    before, here.builds_dataset = here.builds_dataset, True
    try:
        yield
    finally:
        here.builds_dataset = before
