"""`StrategyModel`: fit, evaluate and predict, on a cluster or in this process by one argument (T4, behaviours 80 to 87)."""

import contextlib
import copy
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from workbench.checks import check_integer
from workbench.config import TrainConfig
from workbench.errors import UsageError
from workbench.parameter_server.data.feed import Feed, as_data, training_feed
from workbench.parameter_server.errors import UnavailableError
from workbench.parameter_server.servers.replicas import BufferLog, quicken_batch_norm
from workbench.parameter_server.servers.tables import Embeddings
from workbench.parameter_server.strategy import ParameterServerStrategy
from workbench.parameter_server.training.callbacks import BackupAndRestore, Callback, History, check_callbacks
from workbench.parameter_server.training.evaluation import InlineEvaluation, Where
from workbench.parameter_server.training.executor import ClusterExecutor, Executor, LocalExecutor, trained
from workbench.parameter_server.training.steps import (
    CPU,
    AdditiveMetric,
    State,
    StepRunner,
    TrainStep,
    total,
    train_step,
)
from workbench.parameter_server.training.work_time import ClosureSize, WorkTime
from workbench.progress import progress_bar
from workbench.train.rng import isolated_rng
from workbench.train.stacked_weights import build_model
from workbench.workloads.base import Workload


class StrategyModel:
    """A workload's model under a strategy, with Keras's verbs.

    Made with a strategy, its parameters live on the parameter servers and steps run on the workers, each on a batch of its own,
    without waiting for each other. Made with None, the same steps run in this process, one after the other (T4.2).

    Batch norm's statistics and other buffers are each worker's own in training; at the end of an epoch the coordinator merges them,
    for evaluation, prediction and checkpoints. See `merged_buffers` and `quicken_batch_norm`.

    Args:
        workload: model, loss, weights, metrics, data and baseline config; see `Workload`.
        strategy: None is this process.
        config: of the updates; None is the workload's. total_steps is the length of the lr schedule, which stays at its end.
        metrics: additive ones, beside the workload's means.
        train_step: one update; see `TrainStep`.
        embeddings: how tables are kept and updated; see `ParameterServerStrategy.place`.

    Attributes:
        placed: the module on the servers.
        next_epoch: that `fit` would run next.
        stop_training: set it in a callback to end after the epoch.
        history: of the newest `fit`, also where it broke off.

    Raises:
        UsageError: the config asks for what servers cannot do, such as micro-batches or an optimizer factory.
    """

    def __init__(
        self,
        workload: Workload,
        strategy: ParameterServerStrategy | None = None,
        *,
        config: TrainConfig | None = None,
        metrics: Mapping[str, AdditiveMetric] | None = None,
        train_step: TrainStep = train_step,
        embeddings: Embeddings = None,
    ) -> None:
        if not isinstance(workload, Workload):
            raise UsageError(
                f"workload must be a Workload, not {type(workload).__name__}: model, loss, data and config together, "
                "Workload(name=..., build_model=..., loss=..., train_data=..., validation_data=..., config=TrainConfig(...))."
            )
        self.workload, self.strategy, self.config = workload, strategy, config or workload.config
        if strategy is not None and not isinstance(strategy, ParameterServerStrategy):
            raise UsageError(f"strategy={strategy!r} is no wb.ps.Strategy. Give one, or None to train in this process.")
        if self.config.accumulate_steps != 1:
            raise UsageError(
                f"accumulate_steps={self.config.accumulate_steps} must be 1: a step is one batch of one worker. Give a smaller batch_size."
            )
        if self.config.precision == "float16":
            raise UsageError("precision='float16' takes a scaled loss, which workers do not have; take 'bfloat16'.")
        if not callable(train_step):
            raise UsageError(f"train_step={train_step!r} must be a function (placed, batch, workload) -> Stepped.")
        self.executor: Executor = LocalExecutor() if strategy is None else ClusterExecutor(strategy)
        with isolated_rng():
            module = build_model(workload, self.config, CPU)
        quicken_batch_norm(module, self.executor.num_workers)
        self.placed = self.executor.place(module, self.config, embeddings)
        self._runner = StepRunner(self.placed, workload, metrics or {}, train_step)
        self.next_epoch, self.stop_training, self.history = 0, False, History()

    @cached_property
    def held(self) -> Any:
        """What stands for the runner on the workers; they get it when it is first needed, after a restore."""
        return self.executor.hold(self._runner.itself)

    @cached_property
    def buffer_log(self) -> BufferLog:
        """The workers' buffers since they were first needed."""
        return BufferLog(self.placed.buffers())

    @property
    def steps(self) -> int:
        """Updates that the servers have applied."""
        return self.placed.steps

    def fit(
        self,
        data: Any = None,
        y: Any = None,
        *,
        epochs: int = 1,
        steps_per_epoch: int | None = None,
        batch_size: int | None = None,
        validation_data: Any = None,
        validation_steps: int | None = None,
        validation_freq: int = 1,
        steps_per_execution: int | Literal["auto"] = 1,
        callbacks: Sequence[Callback] = (),
        verbose: Literal[0, 1, 2] = 2,
    ) -> History:
        """Train, and return loss and metrics of each epoch (behaviour 80).

        Args:
            data: a `DatasetCreator` or a function that makes a dataset, called on every worker, which reads all of what it made; a
                dataset, DataLoader or arrays, of which all workers together read each example once an epoch; None is the
                workload's training data. What a function makes is begun anew where it ends; a torch dataset is cut into batches
                of examples, anything else is taken for batches.
            y: targets beside arrays.
            epochs: in all, those counted that a callback restored.
            steps_per_epoch: updates of all workers together; None is what the data's length says (T14.8).
            batch_size: examples in a step, for datasets and arrays; None is the config's.
            validation_data: evaluated after an epoch, each example exactly once (T14.13); None is the workload's where `data` is, else none.
            validation_steps: so many batches of endless validation data.
            validation_freq: epochs between evaluations.
            steps_per_execution: updates in one function that is sent to a worker (T13.6); "auto" measures what sending costs and chooses (T14.3).
            verbose: 0 is silent, 1 a bar that moves during the epoch (T14.10), 2 a line an epoch.

        Raises:
            UsageError: an argument out of range; no length of an epoch is known (behaviour 81).
            UnavailableError: a parameter server is gone, and no `BackupAndRestore` is among the callbacks, or it did not come back (T10.2).
            Exception: the first error of a step, or of a callback. No step runs any more when it is raised.
        """
        config = self.config if batch_size is None else self.config.replace(batch_size=batch_size, eval_batch_size=None)
        check_integer("epochs", epochs, error=UsageError)
        if steps_per_execution != "auto":
            check_integer("steps_per_execution", steps_per_execution, error=UsageError)
        check_integer("validation_freq", validation_freq, error=UsageError)
        if verbose not in (0, 1, 2):
            raise UsageError(f"verbose={verbose!r} is not known. Allowed: 0, 1, 2.")
        hooks = check_callbacks(callbacks)
        given = as_data(self.workload.train_data if data is None else data, y, precision=config.precision)
        feed = training_feed(given, config, self.workload.collate, num_workers=self.executor.num_workers)
        steps = _epoch_length(steps_per_epoch, feed)
        if validation_data is None and data is None:
            validation_data = self.workload.validation_data
        self.next_epoch, self.stop_training, self.history = 0, False, History()
        for callback in hooks:
            callback.model = self
            callback.on_train_begin()
        evaluation = None
        if validation_data is not None:  # only now: callbacks have restored what they restore
            evaluation = self._evaluation(validation_data, None, config.evaluation_batch, validation_steps)
        source, plans = self.executor.hold(feed.make), feed.plans(self.steps)
        sizes = ClosureSize(steps_per_execution, WorkTime(self.executor.num_workers))
        while self.next_epoch < epochs and not self.stop_training:
            epoch, before = self.next_epoch, copy.deepcopy(self.history)
            stretch = partial(self._stretch, source, plans, sizes)
            try:
                for callback in hooks:
                    callback.on_epoch_begin(epoch)
                with progress_bar(steps, f"epoch {epoch + 1}/{epochs}", show=verbose == 1) as bar:
                    logs = self._runner.metrics.result(self._epoch(epoch * steps, steps, stretch, hooks, bar))
                if evaluation is not None and (epoch + 1) % validation_freq == 0:
                    logs |= {f"val_{name}": value for name, value in evaluation.run().items()}
                self.history.add(epoch, logs)
                self.next_epoch = epoch + 1
                if verbose == 2:
                    said = ", ".join(f"{name} {value:.4g}" for name, value in logs.items())
                    print(f"epoch {epoch + 1}/{epochs}: {steps} steps, {said}")
                for callback in hooks:
                    callback.on_epoch_end(epoch, logs)
            except UnavailableError as error:
                self._recover(hooks, error)
                self.history = self.history if self.next_epoch > epoch else before
                plans = feed.plans(self.steps)
        for callback in hooks:
            callback.on_train_end()
        return self.history

    def _recover(self, hooks: Sequence[Callback], error: UnavailableError) -> None:
        """Go back to the backup of an epoch in which a server died; raises `error` where there is none."""
        backup = next((each for each in hooks if isinstance(each, BackupAndRestore) and each.wait_s), None)
        if error.job != "ps" or backup is None:
            raise error
        backup.recover()
        self.__dict__.pop("buffer_log", None)

    def _epoch(self, first: int, steps: int, stretch: Any, hooks: Sequence[Callback], bar: Any) -> State:
        """Make the updates of an epoch, and return the sums of its steps, of which callbacks hear as they come back."""
        done, states = 0, total([])
        watchers = [each for each in hooks if type(each).on_train_batch_end is not Callback.on_train_batch_end]
        while done < steps:
            with contextlib.closing(stretch(first + done, steps - done)) as results:
                for step, state in results:
                    states, done = total([states, state]), done + 1
                    due = [each for each in watchers if done % each.every_steps == 0]
                    logs = self._runner.metrics.result(state) if due else {}
                    for callback in due:
                        callback.on_train_batch_end(step, logs)
                    bar.status("training", f", loss {float(state['loss'] / state['weight']):.4g}")
                    bar.advance(1)
        self.placed.load_buffers(self.buffer_log.merged())
        return states

    def _stretch(self, source: Any, plans: Iterator[Any], sizes: ClosureSize, first: int, left: int) -> Iterator[tuple[int, State]]:  # fmt: skip
        """Make the next of `left` updates, in functions of one size, and yield the place and the sums of each as it comes back."""
        began, spent = time.perf_counter(), []
        count, size = sizes.plan(left)
        chunks = [min(size, count - at) for at in range(0, count, size)]
        tasks = ((StepRunner.train, (self.held, source, list(itertools.islice(plans, n)))) for n in chunks)
        with contextlib.closing(trained(self.executor, tasks, self.buffer_log)) as results:  # type: ignore[type-var]
            for number, made in results:
                spent += [(made.worker, {"compute_s": made.seconds / len(made.updates)})] * len(made.updates)
                yield from enumerate(made.updates, first + number * size)
        sizes.note(time.perf_counter() - began, len(chunks), spent)

    def evaluate(
        self,
        data: Any = None,
        y: Any = None,
        *,
        batch_size: int | None = None,
        steps: int | None = None,
        shards: int | None = None,
        where: Where = "workers",
    ) -> dict[str, float]:
        """Return loss and metrics, each example counted exactly once, also where workers die meanwhile (behaviours 85, 86).

        Args:
            data: as for `fit`, and finite: a `DatasetCreator` is asked for one shard after the other, by its context; None is the
                workload's validation data.
            y: targets beside arrays.
            batch_size: examples in a forward pass; None is the config's.
            steps: so many batches of an endless dataset instead.
            shards: functions that share it; None is 5 a worker.
            where: "coordinator" evaluates in this process, for small models and data.
        """
        data = self.workload.validation_data if data is None else data
        size = self.config.evaluation_batch if batch_size is None else batch_size
        return self._evaluation(data, y, size, steps, shards=shards, where=where).run()

    def predict(self, data: Any, *, batch_size: int | None = None, where: Where = "workers") -> Any:
        """Return the model's outputs for every example, in their order (behaviour 85).

        Args:
            data: inputs as an array or tensor, or a finite dataset as for `evaluate`.
            batch_size: examples in a forward pass; None is the config's.
            where: "coordinator" predicts in this process.
        """
        size = self.config.evaluation_batch if batch_size is None else batch_size
        return _join_outputs(self._evaluation(data, None, size, None, where=where).predict())

    def module(self) -> nn.Module:
        """Return a plain module with the newest values, the caller's own, for export and serving."""
        return self.placed.module()

    def set_peak_lr(self, peak_lr: float) -> None:
        """Let the servers go on with another learning rate, from the next step on."""
        self.config = self.config.replace(peak_lr=peak_lr)
        self.placed.reconfigure(self.config)

    def _evaluation(self, data: Any, y: Any, batch_size: int, steps: int | None, **how: Any) -> InlineEvaluation:
        return InlineEvaluation(
            self.executor, self._runner, data, y, held=self.held, batch_size=batch_size, steps=steps, **how
        )


def _epoch_length(given: int | None, feed: Feed) -> int:
    if given is not None:
        return check_integer("steps_per_epoch", given, error=UsageError)
    if feed.steps_per_epoch is None:
        raise UsageError(
            "steps_per_epoch is missing: a function makes the dataset on each worker, or the dataset has no length, so that nobody here "
            "knows where an epoch ends. Give steps_per_epoch=, the updates of all workers together, or give a dataset with a length."
        )
    return check_integer("steps_per_epoch, from the data's length,", feed.steps_per_epoch, error=UsageError)


def _join_outputs(parts: Sequence[Any]) -> Any:
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat(list(parts))
    if isinstance(first, Mapping):
        return {key: _join_outputs([part[key] for part in parts]) for key in first}
    if isinstance(first, (list, tuple)):
        return [_join_outputs(column) for column in zip(*parts, strict=True)]
    raise UsageError(
        f"predict joins tensors, and lists, tuples and dicts of them; the model returned {type(first).__name__}."
    )
