"""Where functions that train run, of `fit` and of trials: on the workers of a strategy, or one after the other in this process (T4.2)."""

import contextlib
import itertools
import queue
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import nn

from workbench.config import TrainConfig
from workbench.parameter_server.context import WorkerContext, on_worker
from workbench.parameter_server.coordinator.coordinator import ClusterCoordinator
from workbench.parameter_server.servers.layout import check_placeable, lay_out
from workbench.parameter_server.servers.links import forget_plane, set_plane
from workbench.parameter_server.servers.placed import PlacedModule
from workbench.parameter_server.servers.replicas import BufferLog, forget_replicas
from workbench.parameter_server.servers.server import DirectPlane, ServerRuntime
from workbench.parameter_server.servers.tables import Embeddings
from workbench.parameter_server.strategy import ParameterServerStrategy
from workbench.parameter_server.workers.closure import RemoteValue

AHEAD = 4  # functions under way for each worker, so that none waits for the coordinator (rule of thumb)
LOOK_S = 0.1  # how often it is looked whether a server died while no result comes

Task = tuple[Callable[..., Any], Sequence[Any]]  # A function and its arguments


class LocalExecutor:
    """One worker in this process, and the same update rules; no server and no thread. Its methods are those of `ClusterExecutor`."""

    num_workers = 1

    def place(self, module: nn.Module, config: TrainConfig, embeddings: Embeddings) -> PlacedModule:
        """Place a module here. Its values go when nobody holds the placed module any more."""
        check_placeable(module, config)
        identity, runtime = uuid.uuid4().hex, ServerRuntime(0)
        set_plane(identity, DirectPlane(lambda _: runtime))
        parts, tables = lay_out(module, embeddings, None, itertools.repeat(0), name="module", cluster=identity)
        placed = PlacedModule(module, config, parts, tables, name="module", cluster=identity)
        for forget in (forget_plane, forget_replicas):
            weakref.finalize(placed, forget, identity)
        return placed

    def hold(self, make: Callable[[], Any]) -> Any:
        """Return what `make` returns."""
        with on_worker(WorkerContext(0)):
            return make()

    def completed(self, tasks: Iterable[Task]) -> Iterator[tuple[int, Any]]:
        """Run the tasks one after the other."""
        for number, (function, args) in enumerate(tasks):
            with on_worker(WorkerContext(0)):
                result = function(*args)
            yield number, result


class ClusterExecutor:
    """The workers of a strategy, by its coordinator, which is the user's own where there is one (behaviour 83)."""

    def __init__(self, strategy: ParameterServerStrategy) -> None:
        self.strategy, self.num_workers = strategy, strategy.num_workers
        self.coordinator = ClusterCoordinator(strategy)

    def place(self, module: nn.Module, config: TrainConfig, embeddings: Embeddings) -> PlacedModule:
        """Let the parameters of a module live on the servers."""
        return self.strategy.place(module, config, embeddings=embeddings)

    def hold(self, make: Callable[[], Any]) -> Any:
        """Let every worker make a value of its own, and return what stands for it among the arguments of a task."""
        return self.coordinator.per_worker(make)

    def completed(self, tasks: Iterable[Task]) -> Iterator[tuple[int, Any]]:
        """Run the tasks and yield (place in `tasks`, result) in order of completion; few more are begun than were yielded.

        Raises:
            Exception: the first error of a task. Nothing runs any more when it is raised.
        """
        left = enumerate(tasks)
        finished: queue.SimpleQueue[int] = queue.SimpleQueue()
        pending: dict[int, RemoteValue[Any]] = {}
        try:
            while True:
                while len(pending) < AHEAD * self.num_workers and (task := next(left, None)) is not None:
                    number, (function, args) = task
                    pending[number] = self.coordinator.schedule(function, args=list(args))
                    pending[number].add_done_callback(partial(finished.put, number))
                if not pending:
                    return
                try:
                    number = finished.get(timeout=LOOK_S)
                except queue.Empty:
                    self.coordinator.done()  # raises where a server is gone
                    continue
                yield number, self._result(pending.pop(number))
        finally:
            if pending:
                with contextlib.suppress(Exception):
                    self.coordinator.join()

    def _result(self, value: RemoteValue[Any]) -> Any:
        try:
            return self.coordinator.fetch(value)
        except Exception:
            self.coordinator.join()  # raises the first error, which this one may follow from
            raise


Executor = LocalExecutor | ClusterExecutor


def trained(executor: Executor, tasks: Iterable[Task], buffers: BufferLog) -> Iterator[tuple[int, Any]]:
    """Run tasks that return `Made`, note the workers' buffers, and yield (place in `tasks`, what it made) in order of completion."""
    with contextlib.closing(executor.completed(tasks)) as results:  # type: ignore[type-var]
        for number, made in results:
            buffers.note(made.worker, len(made.updates), made.buffers)
            yield number, made
