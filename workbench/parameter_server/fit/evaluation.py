"""Inline evaluation: on the coordinator, or shared out to the workers with each example exactly once (T8.1 to T8.5)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Literal

from workbench.errors import UsageError
from workbench.parameter_server.data.datasets import DatasetRecipe
from workbench.parameter_server.data.distributed_dataset import DatasetCreator, InputContext
from workbench.parameter_server.data.feed import Feed, as_data, evaluation_feed
from workbench.parameter_server.fit.executor import ClusterExecutor, Executor, LocalExecutor
from workbench.parameter_server.fit.step_runner import (
    AdditiveMetric,
    MetricSet,
    StepRunner,
    evaluate_plan,
    predict_plan,
    total,
    train_step,
)
from workbench.parameter_server.servers.placed import PlacedModule
from workbench.parameter_server.strategy import ParameterServerStrategy
from workbench.workloads.base import Workload

Where = Literal["workers", "coordinator"]


class InlineEvaluation:
    """A dataset that is evaluated between epochs, prepared once.

    "workers" cuts a finite dataset into shards, of which each function returns its sums; the coordinator adds them up. A worker that
    dies loses its shard alone, which another one takes over: each example counts exactly once (behaviour 86). "coordinator" pulls
    the model and evaluates here, for small models and data (T8.3).

    Args:
        executor: runs it.
        runner: placed module, workload and metrics.
        held: what stands for the runner on the workers; None lets them make one.
        data: anything that `fit` takes.
        y: targets beside arrays.
        batch_size: examples in a forward pass, for datasets and arrays.
        steps: so many batches of an endless dataset instead of each example once (T8.4).
        shards: None is 5 a worker.
        where: who evaluates.
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
            if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
                raise UsageError(f"{name}={count!r} must be an integer of at least 1.")
        data = as_data(data, y, precision=runner.placed.config.precision)
        if where == "coordinator" and isinstance(data, DatasetCreator):
            data = DatasetRecipe(partial(data, InputContext()))
        self._executor, self._runner = executor, runner
        self._feed: Feed = evaluation_feed(
            data, batch_size, runner.workload.collate, num_workers=executor.num_workers, shards=shards, steps=steps
        )
        self._here = where == "coordinator"
        self._source = self._feed.make() if self._here else executor.hold(self._feed.make)
        self._held = runner if self._here else executor.hold(runner.itself) if held is None else held

    def run(self) -> dict[str, float]:
        """Return loss and metrics by name; call it while nothing trains.

        Raises:
            UsageError: a dataset that a function made has no length (behaviour 87).
            Exception: the first error of a function.
        """
        states = (state for _, state in sorted(self._results(evaluate_plan)) if state is not None)
        return self._runner.metrics.result(total(states))

    def predict(self) -> list[Any]:
        """Return the outputs batch by batch, in the order of the dataset."""
        return [output for _, outputs in sorted(self._results(predict_plan)) for output in outputs]

    def _results(self, function: Any) -> Iterator[tuple[int, Any]]:
        buffers = self._runner.placed.buffers()
        tasks = ((function, (self._held, self._source, plan, buffers)) for plan in self._feed.plans(0))
        if self._here:
            return enumerate([work(*args) for work, args in tasks])
        with contextlib.closing(self._executor.completed(tasks)) as results:  # type: ignore[type-var]
            return iter(list(results))


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
        strategy: whose workers evaluate.
        placed: module that is evaluated.
        workload: loss, weights, forward and metrics; its datasets are not used.
        data: anything that `StrategyModel.fit` takes.
        y: targets beside arrays.
        metrics: additive ones, beside the workload's.
        steps: so many batches of an endless dataset; None is each example exactly once.
        shards: None is 5 a worker.

    Raises:
        UsageError: the dataset has no length, and `steps` is not given (behaviour 87).
    """
    return InlineEvaluation(
        ClusterExecutor(strategy),
        _runner(placed, workload, metrics),
        data,
        y,
        batch_size=batch_size,
        steps=steps,
        shards=shards,
    ).run()


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
    return InlineEvaluation(
        LocalExecutor(),
        _runner(placed, workload, metrics),
        data,
        y,
        batch_size=batch_size,
        steps=steps,
        where="coordinator",
    ).run()


def without_data(workload: Workload) -> Workload:
    """Return the workload as it travels to the workers: data takes its own way."""
    return workload.replace(train_data=(), validation_data=(), test_data=None)


def _runner(placed: PlacedModule, workload: Workload, metrics: Mapping[str, AdditiveMetric] | None) -> StepRunner:
    if not isinstance(placed, PlacedModule):
        raise UsageError(f"placed must be what strategy.place(module, config) returned, not {type(placed).__name__}.")
    placed.check_statistics()
    return StepRunner(placed, without_data(workload), MetricSet(workload.metrics, metrics or {}), train_step)
