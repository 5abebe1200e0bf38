"""Inline evaluation: on the coordinator, or shared out to the workers with each example exactly once (T8.1 to T8.5)."""

import contextlib
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

from workbench.checks import check_integer
from workbench.errors import UsageError
from workbench.parameter_server.data.datasets import DatasetCreator, DatasetRecipe, InputContext
from workbench.parameter_server.data.feed import as_data, evaluation_feed
from workbench.parameter_server.servers.placed import PlacedModule
from workbench.parameter_server.strategy import ParameterServerStrategy
from workbench.parameter_server.training.executor import ClusterExecutor, Executor, LocalExecutor
from workbench.parameter_server.training.steps import AdditiveMetric, StepRunner, total
from workbench.workloads.base import Workload

Where = Literal["workers", "coordinator"]


class InlineEvaluation:
    """A dataset that is evaluated between epochs, prepared once.

    "workers" cuts a finite dataset into shards, of which each function returns its sums; the coordinator adds them up. A worker that
    dies loses its shard alone, which another one takes over: each example counts exactly once (behaviour 86). "coordinator" pulls
    the model and evaluates here, for small models and data (T8.3).

    Args: those of `evaluate_distributed`, and `held`, which stands for the runner on the workers; None lets them make one.
    """

    def __init__(
        self,
        executor: Executor,
        runner: StepRunner,
        data: Any,
        y: Any = None,
        *,
        held: Any = None,
        batch_size: int,
        steps: int | None = None,
        shards: int | None = None,
        where: Where = "workers",
    ) -> None:
        if where not in ("workers", "coordinator"):
            raise UsageError(f"where={where!r} is not known. Allowed: 'workers', 'coordinator'.")
        for name, count in (("batch_size", batch_size), ("steps", steps), ("shards", shards)):
            if count is not None:
                check_integer(name, count, error=UsageError)
        data = as_data(data, y, precision=runner.placed.config.precision)
        self._executor, self._runner, self._here = executor, runner, where == "coordinator"
        if self._here and isinstance(data, DatasetCreator):
            data = DatasetRecipe(partial(data, InputContext()))
        workers = executor.num_workers
        self._feed = evaluation_feed(
            data, batch_size, runner.workload.collate, num_workers=workers, shards=shards, steps=steps
        )
        self._source = self._feed.make() if self._here else executor.hold(self._feed.make)
        self._held = runner if self._here else executor.hold(runner.itself) if held is None else held

    def run(self) -> dict[str, float]:
        """Return loss and metrics by name; call it while nothing trains."""
        return self._runner.metrics.result(total(self._results(StepRunner.evaluate)))

    def predict(self) -> list[Any]:
        """Return the outputs batch by batch, in the order of the dataset."""
        return [output for outputs in self._results(StepRunner.predict) for output in outputs]

    def _results(self, function: Any) -> list[Any]:
        """Return what a method of the runner returns for each share, in their order."""
        buffers = self._runner.placed.buffers()
        tasks = ((function, (self._held, self._source, plan, buffers)) for plan in self._feed.plans(0))
        if self._here:
            return [work(*args) for work, args in tasks]
        with contextlib.closing(self._executor.completed(tasks)) as results:  # type: ignore[type-var]
            return [result for _, result in sorted(results, key=lambda each: each[0])]


def evaluate_distributed(
    strategy: ParameterServerStrategy,
    placed: PlacedModule,
    workload: Workload,
    data: Any,
    y: Any = None,
    *,
    batch_size: int = 32,
    metrics: Mapping[str, AdditiveMetric] | None = None,
    steps: int | None = None,
    shards: int | None = None,
) -> dict[str, float]:
    """Evaluate a placed module on the workers and return loss and metrics, for a training loop of one's own (T8.4).

    Args:
        workload: loss, weights, forward and metrics; its datasets are not used.
        data: anything that `StrategyModel.fit` takes; `y` are targets beside arrays.
        metrics: additive ones, beside the workload's.
        steps: so many batches of an endless dataset; None is each example exactly once.
        shards: None is 5 a worker.
    """
    how: dict[str, Any] = {"batch_size": batch_size, "steps": steps, "shards": shards}
    return InlineEvaluation(ClusterExecutor(strategy), _runner(placed, workload, metrics), data, y, **how).run()


def evaluate_direct(
    placed: PlacedModule,
    workload: Workload,
    data: Any,
    y: Any = None,
    *,
    batch_size: int = 32,
    metrics: Mapping[str, AdditiveMetric] | None = None,
    steps: int | None = None,
) -> dict[str, float]:
    """Evaluate a placed module here and return loss and metrics; the arguments are those of `evaluate_distributed` (T8.3)."""
    how: dict[str, Any] = {"batch_size": batch_size, "steps": steps, "where": "coordinator"}
    return InlineEvaluation(LocalExecutor(), _runner(placed, workload, metrics), data, y, **how).run()


def _runner(placed: PlacedModule, workload: Workload, metrics: Mapping[str, AdditiveMetric] | None) -> StepRunner:
    if not isinstance(placed, PlacedModule):
        raise UsageError(f"placed must be what strategy.place(module, config) returned, not {type(placed).__name__}.")
    placed.check_statistics()
    return StepRunner(placed, workload, metrics or {})
