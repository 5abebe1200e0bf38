"""Where a piece of code runs: on which worker, in which closure; `get_current_worker_index`, `check_cancelled`."""

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from workbench.parameter_server.errors import CancelledError

PARTS = ("data_wait_s", "pull_s", "compute_s", "push_s")
"""What a worker spends the time of an update on; the rest of its time it has nothing to do."""


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


@dataclass
class WorkerContext:
    """What code on a worker may know about itself."""

    index: int
    cancelled: Callable[[], bool] = bool  # whether the running closure shall stop
    run: Run | None = None  # the closure that runs
    builds_dataset: bool = False  # a dataset function runs, which must not create variables (T5.4)
    spent: dict[str, float] | None = None  # seconds by `PARTS`, where somebody takes the time
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
    if here is not None and here.cancelled():
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
    """Count the time that the code inside takes on a worker as one of `PARTS`; what is inside of another one counts there.

    Raises `CancelledError` before, if this closure shall stop.
    """
    check_cancelled()
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


def building_dataset() -> contextlib.AbstractContextManager[None]:
    """Let the code inside know that a dataset function runs, where it runs on a worker."""
    here = current_worker()
    return contextlib.nullcontext() if here is None else on_worker(replace(here, builds_dataset=True))
