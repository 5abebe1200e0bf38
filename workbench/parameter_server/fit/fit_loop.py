"""`FitLoop`: epochs of steps that are sent to whichever worker is free, counted when they come back (T4.1, behaviours 80 to 84)."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from workbench.parameter_server.data.feed import Feed
from workbench.parameter_server.fit.callbacks import Callback, History
from workbench.parameter_server.fit.evaluation import InlineEvaluation
from workbench.parameter_server.fit.executor import Executor, Task
from workbench.parameter_server.fit.metric_state import MetricSet, State, total
from workbench.parameter_server.fit.step_runner import train_plans
from workbench.parameter_server.workers.replica_buffers import BufferLog
from workbench.train.progress import ProgressBar, progress_bar

__all__ = ["FitLoop"]


class FitModel(Protocol):
    """What the loop reads and writes of a `StrategyModel`."""

    executor: Executor
    placed: Any
    next_epoch: int
    stop_training: bool
    history: History

    @property
    def steps(self) -> int: ...

    @property
    def held(self) -> Any: ...

    @property
    def buffer_log(self) -> BufferLog: ...


class FitLoop:
    """One `fit`.

    An epoch: callbacks begin; steps go out, `steps_per_execution` in a function; as they come back, in whatever order, their sums
    are added up and callbacks hear of them; when all are back, the model is evaluated and callbacks end the epoch.

    Args:
        model: that is trained.
        metrics: of its steps.
        feed: batches.
        steps: of an epoch.
        steps_per_execution: of a function.
        callbacks: checked.
        validation: prepares what is evaluated after an epoch, when callbacks have restored what they restore; None is none.
        validation_freq: epochs between two of them.
        verbose: see `StrategyModel.fit`.
    """

    def __init__(
        self,
        model: FitModel,
        metrics: MetricSet,
        feed: Feed,
        *,
        steps: int,
        steps_per_execution: int,
        callbacks: Sequence[Callback],
        validation: Callable[[], InlineEvaluation] | None,
        validation_freq: int,
        verbose: int,
    ) -> None:
        self._model, self._metrics = model, metrics
        self._source, self._feed = model.executor.hold(feed.make), feed
        self._steps, self._per_execution = steps, steps_per_execution
        self._callbacks, self._validation, self._validation_freq = callbacks, validation, validation_freq
        self._verbose = verbose
        self._watchers = [
            each for each in callbacks if type(each).on_train_batch_end is not Callback.on_train_batch_end
        ]

    def run(self, epochs: int) -> None:
        """Train until `epochs` are done, or a callback ends it."""
        model = self._model
        for callback in self._callbacks:
            callback.model = model
            callback.on_train_begin()
        evaluation = None if self._validation is None else self._validation()
        plans = self._feed.plans(model.steps)
        while model.next_epoch < epochs and not model.stop_training:
            epoch = model.next_epoch
            for callback in self._callbacks:
                callback.on_epoch_begin(epoch)
            logs = self._metrics.result(self._epoch(epoch, epochs, plans))
            if evaluation is not None and (epoch + 1) % self._validation_freq == 0:
                logs |= {f"val_{name}": value for name, value in evaluation.run().items()}
            model.history.add(epoch, logs)
            model.next_epoch = epoch + 1
            if self._verbose == 2:
                said = ", ".join(f"{name} {value:.4g}" for name, value in logs.items())
                print(f"epoch {epoch + 1}/{epochs}: {self._steps} steps, {said}")
            for callback in self._callbacks:
                callback.on_epoch_end(epoch, logs)
        for callback in self._callbacks:
            callback.on_train_end()

    def _epoch(self, epoch: int, epochs: int, plans: Iterator[Any]) -> State:
        done, states = 0, total([])
        label = f"epoch {epoch + 1}/{epochs}"
        with (
            contextlib.closing(self._model.executor.completed(self._tasks(plans))) as results,  # type: ignore[type-var]
            progress_bar(self._steps, label, show=self._verbose == 1) as bar,
        ):
            for number, trained in results:
                first = epoch * self._steps + number * self._per_execution
                for offset, state in enumerate(trained.states):
                    states, done = total([states, state]), done + 1
                    self._step_done(first + offset, state, done, bar)
                self._model.buffer_log.note(trained.worker, len(trained.states), trained.buffers)
        self._model.placed.load_buffers(self._model.buffer_log.merged())
        return states

    def _tasks(self, plans: Iterator[Any]) -> Iterator[Task]:
        sizes = [min(self._per_execution, self._steps - begin) for begin in range(0, self._steps, self._per_execution)]
        for left, size in zip(range(len(sizes), 0, -1), sizes, strict=True):
            wants_buffers = left <= self._model.executor.num_workers
            yield train_plans, (self._model.held, self._source, list(itertools.islice(plans, size)), wants_buffers)

    def _step_done(self, step: int, state: State, done: int, bar: ProgressBar) -> None:
        due = [each for each in self._watchers if done % each.every_steps == 0]
        if due:
            logs = self._metrics.result(state)
            for callback in due:
                callback.on_train_batch_end(step, logs)
        if self._verbose == 1:
            bar.status(f"loss {float(state['loss'] / state['weight']):.4g}")
            bar.advance(1)
