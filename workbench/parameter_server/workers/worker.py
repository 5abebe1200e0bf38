"""`WorkerRuntime`: what a worker does when it is asked, whichever engine asks (T1.6)."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from workbench.errors import UsageError
from workbench.parameter_server.context import (
    PARTS,
    Run,
    WorkerContext,
    building_dataset,
    check_cancelled,
    current_worker,
    on_worker,
    taking,
)
from workbench.parameter_server.errors import ClosureInputError, NotHeldError, OutOfRangeError
from workbench.parameter_server.workers.closure import map_structure


@dataclass(frozen=True)
class ResourceRef:
    """Stands in the arguments of a call for what the worker holds under that id."""

    resource: int


@dataclass(frozen=True)
class Call:
    """A function with its arguments, `ResourceRef`s in place of what workers hold themselves."""

    function: Callable[..., Any]
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    run: Run | None = None  # which closure it is
    scheduled: bool = True  # False where it was asked of every worker, and takes nobody's time


class WorkerRuntime:
    """Runs calls one at a time, and holds this worker's share of datasets, iterators and other resources."""

    def __init__(self, index: int) -> None:
        self.index = index
        self._resources: dict[int, Any] = {}  # where one could not be made, a `_Failed`
        self._spent: dict[int, dict[str, float]] = {}

    def execute(self, call: Call, cancelled: Callable[[], bool] = bool) -> Any:
        """Run a call and return its result, tensors copied to the host's memory.

        Raises:
            ClosureInputError: a resource that it needs could not be built here, or, as `NotHeldError`, was asked of another life of this worker.
        """
        spent = None if call.run is None else self._spent.setdefault(call.run.loop, _no_time())
        context = WorkerContext(self.index, cancelled, run=call.run, spent=spent)
        with on_worker(context), _without_exit(self.index):
            check_cancelled()
            args = map_structure(self._resolved, list(call.args))
            kwargs = map_structure(self._resolved, dict(call.kwargs))
            with contextlib.nullcontext() if spent is None or not call.scheduled else _computing(spent):
                return to_host(call.function(*args, **kwargs))

    def build(self, resource: int, make: Callable[[], Any]) -> None:
        """Make a resource; an error is kept for the closure that needs it (behaviour 40)."""
        self.drop(resource)
        with on_worker(WorkerContext(self.index)), building_dataset():
            try:
                with _without_exit(self.index):
                    self._resources[resource] = make()
            except Exception as error:
                self._resources[resource] = _Failed(error)

    def drop(self, resource: int) -> None:
        """Forget a resource, if it is there."""
        self._resources.pop(resource, None)

    def _resolved(self, value: Any) -> Any:
        if not isinstance(value, ResourceRef):
            return value
        if value.resource not in self._resources:
            raise NotHeldError(self.index, value.resource)
        held = self._resources[value.resource]
        if isinstance(held, _Failed):
            raise ClosureInputError(
                f"A per-worker dataset or value could not be built on worker {self.index}: {type(held.error).__name__}: {held.error}"
            ) from held.error
        return held


@dataclass(frozen=True)
class _Failed:
    error: Exception


class WorkerIterator:
    """An iterator of a worker's own over its dataset; its end is an error that says what to do (T7.5)."""

    def __init__(self, items: Iterator[Any]) -> None:
        self._items = items
        self._count = 0

    def __iter__(self) -> WorkerIterator:
        """Return itself."""
        return self

    def __next__(self) -> Any:
        """Return the next batch."""
        try:
            with taking("data_wait_s"):
                batch = next(self._items)
        except StopIteration:
            raise OutOfRangeError(
                f"The per-worker dataset ended after {self._count:,} batches. Repeat it endlessly and schedule as many steps as "
                "you want (T7.5)."
            ) from None
        self._count += 1
        return batch


def spent_here() -> dict[str, float]:
    """Return what the worker that runs this has spent on scheduled functions of this loop since it was started: seconds by `PARTS`, closures."""
    here = current_worker()
    return _no_time() if here is None or here.spent is None else dict(here.spent)


def _no_time() -> dict[str, float]:
    return dict.fromkeys((*PARTS, "closures"), 0.0)


@contextlib.contextmanager
def _without_exit(worker: int) -> Iterator[None]:
    """Let what ends a program be an error: raised on the coordinator it would end that program, by exit(0) as if all were well."""
    try:
        yield
    except (SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError(
            f"{error!r} on worker {worker}: a function that runs there returns, or raises an error."
        ) from error


@contextlib.contextmanager
def _computing(spent: dict[str, float]) -> Iterator[None]:
    """Count a closure, and what `taking` does not account for as computing."""
    before, begun = sum(spent[part] for part in PARTS), time.perf_counter()
    try:
        yield
    finally:
        others = sum(spent[part] for part in PARTS) - before
        spent["compute_s"] += max(0.0, time.perf_counter() - begun - others)
        spent["closures"] += 1


def to_host(value: Any) -> Any:
    """Return `value` with its tensors detached and copied to the host's memory."""

    def host(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.detach().cpu().clone()
        read = getattr(leaf, "read_for_fetch", None)
        return read() if read is not None else leaf

    return map_structure(host, value)


class PerWorkerValues:
    """A container with one value a worker, each of which stays on its worker (T7.1).

    As an argument of a scheduled function it is replaced by what the worker that runs the function holds (T7.2). When nobody holds
    the container any more, the workers forget their values.
    """

    def __init__(self, resource: int, what: str, count: int, forget: Callable[[int], None]) -> None:
        self.ref = ResourceRef(resource)
        self._what, self._count = what, count
        self._finalizer = weakref.finalize(self, forget, resource)

    def __repr__(self) -> str:
        """Say what it holds."""
        return f"PerWorkerValues({self._what}, one on each of {self._count} workers)"

    def __len__(self) -> int:
        """Return the number of workers."""
        return self._count

    def __next__(self) -> Any:
        """Refuse: the values are on the workers (behaviour 29)."""
        raise UsageError(
            f"next() of a container of {self._what}: its values are on the workers. Give the container to schedule(function, "
            "args=(container,)) and call next() inside the function."
        )
