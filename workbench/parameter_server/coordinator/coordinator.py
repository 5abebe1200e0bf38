"""`ClusterCoordinator`: sends functions to whichever worker is free, and brings their results and errors back (T5.1, T6)."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from workbench.errors import UsageError
from workbench.parameter_server.coordinator.closure_queue import MAX_WAITING
from workbench.parameter_server.coordinator.dispatch import MAX_ATTEMPTS, Dispatcher
from workbench.parameter_server.data.datasets import DatasetCreator, IteratorRecipe, as_dataset_recipe, takes_context
from workbench.parameter_server.servers.links import reach_anew
from workbench.parameter_server.servers.placed import PlacedModule
from workbench.parameter_server.servers.replicas import merged_buffers
from workbench.parameter_server.strategy import ParameterServerStrategy
from workbench.parameter_server.workers.closure import Closure, RemoteValue, map_structure
from workbench.parameter_server.workers.worker import PerWorkerValues

if TYPE_CHECKING:
    from collections.abc import Iterator

_ONLY_ONE = threading.Lock()

WATCHDOG_S = 600.0  # rule of thumb: longer than a function should take, shorter than a person waits in vain


class PerWorkerDataset:
    """A dataset that every worker builds for itself.

    `iter` starts it anew on every worker; the iterators live there (T7.1).
    """

    not_an_argument: ClassVar[str] = (
        "schedule got a per-worker dataset as an argument. Give an iterator over it, made once by iter(dataset), or dataset.build() for the "
        "datasets themselves."
    )

    def __init__(self, coordinator: ClusterCoordinator, source: Any) -> None:
        if isinstance(source, DatasetCreator) or (callable(source) and takes_context(source)):
            source = coordinator.strategy.distribute_datasets_from_function(source)
        self._coordinator, self._recipe = coordinator, as_dataset_recipe(source)

    def __iter__(self) -> Iterator[Any]:
        """Return a container of iterators, one a worker, each at the start of its dataset (behaviour 30)."""
        return self._coordinator.per_worker(IteratorRecipe(self._recipe), what="iterators")  # type: ignore[return-value]

    def build(self) -> PerWorkerValues:
        """Return a container of the datasets themselves (behaviour 39)."""
        return self._coordinator.per_worker(self._recipe, what="datasets")


class ClusterCoordinator:
    """Schedules functions on the workers of a strategy. A strategy has one: making a second returns the first (behaviour 15)."""

    strategy: ParameterServerStrategy

    def __new__(
        cls,
        strategy: ParameterServerStrategy,
        *,
        max_waiting: int = MAX_WAITING,
        max_attempts: int = MAX_ATTEMPTS,
        watchdog_s: float | None = WATCHDOG_S,
        on_stall: Callable[[], object] | None = None,
    ) -> ClusterCoordinator:
        """Return the strategy's coordinator, which is made where there is none.

        Args:
            strategy: says which cluster, and where variables live.
            max_waiting: how many functions may wait before `schedule` blocks.
            max_attempts: a function that lost so many workers while it ran is given up, by a `GivenUpError`.
            watchdog_s: where something runs or waits and nothing has ended for so long, the stacks of all threads are logged, and again
                after as long (behaviour 26); None never does.
            on_stall: called then.

        Raises:
            UsageError: `strategy` is no `ParameterServerStrategy` (T5.1).
        """
        if not isinstance(strategy, ParameterServerStrategy):
            raise UsageError(
                f"wb.ps.ClusterCoordinator takes a wb.ps.Strategy, not {type(strategy).__name__}. Other ways of training have "
                "nothing to coordinate."
            )
        with _ONLY_ONE:
            there = strategy.coordinator()
            if isinstance(there, ClusterCoordinator) and there._finalizer.alive:
                return there
            self = super().__new__(cls)
            self.strategy = strategy
            self._dispatcher = Dispatcher(
                strategy.cluster.engine, max_waiting=max_waiting, max_attempts=max_attempts, watchdog_s=watchdog_s,
                on_stall=on_stall, sweep=strategy.cluster.sweep,
            )  # fmt: skip
            self._finalizer = weakref.finalize(self, self._dispatcher.stop)
            strategy.coordinator = weakref.ref(self)
            strategy.cluster.ends_with(self._finalizer)
            return self

    _dispatcher: Dispatcher
    _finalizer: Any

    def schedule(
        self, function: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> RemoteValue[Any]:
        """Queue a function for any worker that is free and return at once (T6.1, T6.2).

        It runs at least once: where its worker dies, another one takes it over (T6.3, T6.4), up to `max_attempts`. Writes of its own
        thread are applied once all the same, unless the strategy was made with exactly_once=False.

        Args:
            function: called on the worker.
            args: for it; a `PerWorkerValues` is replaced by what that worker holds.
            kwargs: for it, likewise.

        Raises:
            TypeError: `function` cannot be called, or cannot be sent to a worker.
            UsageError: a `RemoteValue` is among the arguments.
            Exception: the first error of a function that was scheduled before; all others are cancelled then (T12).
        """
        if isinstance(args, (str, bytes)) or not isinstance(args, Sequence):
            raise UsageError(f"args={args!r} must be a tuple or list with one entry an argument: args=(iterator,).")
        closure = Closure(function, list(args), dict(kwargs or {}))
        self._dispatcher.engine.sent.check(closure)
        self._dispatcher.queue.put(closure)
        return closure.output

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until every scheduled function has ended (T6.5).

        Raises:
            TimeoutError: that took longer than `timeout_s`; None waits for ever.
            Exception: the first error of a function; it is raised once, when nothing runs any more (behaviour 46).
        """
        if not self._dispatcher.queue.wait(timeout_s):
            queue = self._dispatcher.queue
            raise TimeoutError(
                f"After {timeout_s:g} s {queue.waiting:,} functions wait and {queue.in_flight} run; the watchdog's stacks, or "
                "coordinator.metrics(), say where."
            )

    def done(self) -> bool:
        """Return at once whether every scheduled function has ended; raises as `join` does (T6.8)."""
        return self._dispatcher.queue.done()

    def fetch(self, values: Any) -> Any:
        """Wait for the results in any nesting of tuples, lists and dicts and return it with the values in place (behaviour 16)."""

        def fetched(value: Any) -> Any:
            if not isinstance(value, RemoteValue):
                return value
            result = value.fetch()
            self._dispatcher.metrics.count("remote_value_fetch")
            return result

        return map_structure(fetched, values)

    def create_per_worker_dataset(self, source: Any) -> PerWorkerDataset:
        """Let every worker build a dataset of its own, and again when it comes back from a failure (T7.1, T7.7).

        Args:
            source: a function that builds the whole dataset, called on each worker, with its `InputContext` where it takes an argument;
                or a dataset (anything to iterate over), which is copied there.
        """
        return PerWorkerDataset(self, source)

    def per_worker(self, make: Callable[..., Any], *, what: str = "values") -> PerWorkerValues:
        """Let every worker hold what `make()` returns there."""
        forget = partial(_forget, weakref.ref(self._dispatcher))
        return PerWorkerValues(self._dispatcher.build_everywhere(make), what, self.strategy.num_workers, forget)

    def on_every_worker(self, function: Callable[..., Any], args: Sequence[Any] = ()) -> list[Any]:
        """Run a function once on each worker, before what waits, and return the results by the workers' indices.

        A worker that is away is waited for.
        """
        return self._dispatcher.on_every_worker(function, list(args))

    def meet_servers(self, make: Callable[[], object], wait_s: float) -> None:
        """Wait until the servers that died are there again, and hold what `make` makes; see `CheckpointManager.recover`."""
        self._dispatcher.meet_servers(make, wait_s)
        self.on_every_worker(reach_anew, [self.strategy.cluster.id])

    def metrics(self) -> dict[str, Any]:
        """Return what happened so far: counts of closures, fetches, joins and worker failures, queued, in flight, recovery_s and worked_s."""
        return self._dispatcher.report()

    @property
    def running(self) -> bool:
        """Whether it takes functions: False after its own shutdown, or that of the cluster."""
        return bool(self._finalizer.alive)

    def shutdown(self) -> None:
        """Cancel what waits and end the threads; the cluster stays up."""
        self._finalizer()


def _forget(dispatcher: weakref.ref[Dispatcher], resource: int) -> None:
    there = dispatcher()
    if there is not None:
        there.forget(resource)


def merge_buffers(coordinator: ClusterCoordinator, placed: PlacedModule) -> dict[str, Tensor]:
    """Bring the buffers of all workers' replicas together, and give them to the coordinator's, from which `placed.module()` is made.

    Parameters are on the servers, buffers are each worker's own: without this call a module with batch norm is evaluated, exported and
    saved with the statistics that it had before training. Call it after `join`; `StrategyModel.fit` does so by itself. It returns the
    merged buffers by name; see `merged_buffers`.

    Source: P6.7, P7.3.
    """
    found = coordinator.on_every_worker(PlacedModule.replica_buffers, args=(placed,))
    merged = merged_buffers(placed.start_buffers(), dict(enumerate(found)))
    placed.take_buffers(merged)
    return merged
