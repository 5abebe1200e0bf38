"""What a worker does: steps of `fit`, evaluation and prediction by `StepRunner` (T4.1), updates of a trial by `WorkerTrial` (T1.2); metrics as sums (T8.4)."""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from workbench.config import TrainConfig
from workbench.errors import UsageError
from workbench.parameter_server.context import get_current_worker_index
from workbench.parameter_server.servers.placed import PlacedModule
from workbench.parameter_server.servers.replicas import copy_buffers, quicken_batch_norm
from workbench.parameter_server.training.work_time import Update
from workbench.train.batches import DataStream, to_device
from workbench.train.evaluation import eval_mode
from workbench.train.forward import autocast, per_example
from workbench.train.gradients import LoopGradients
from workbench.train.stacked_weights import LaneStack
from workbench.train.update_rules import clip_by_norm, clip_thresholds, global_norm
from workbench.workloads.base import PerExample, Workload
from workbench.workloads.checks import check_loss_shape, check_weights

CPU = torch.device("cpu")


class Stepped(NamedTuple):
    """What a train step returns."""

    outputs: Any  # of the model, for the metrics
    losses: Tensor  # (examples,)
    weights: Tensor | None = None  # (examples,); None is ones


class Made(NamedTuple):
    """What one function returns that trains."""

    updates: list[Any]  # what each of them says of itself: sums of its metrics in `fit`, an `Update` in a trial
    worker: int  # who made them
    buffers: dict[str, Tensor]  # of its replica afterwards, {} where the model has none
    seconds: float = math.nan  # that the updates took, in `fit`; an `Update` says its own


TrainStep = Callable[[PlacedModule, Any, Workload], Stepped]
"""One update: takes the placed module, a batch and the workload."""


def train_step(placed: PlacedModule, batch: Any, workload: Workload) -> Stepped:
    """Pull the newest values, take the gradient of the weighted mean loss, and push it: what `fit` does unless it is told otherwise."""
    with placed.step() as module:
        stepped = _forward(placed, module, batch, workload)
        if stepped.weights is None:
            mean = stepped.losses.mean()
        else:
            check_weights(stepped.weights, where="the batch of a step")
            mean = (stepped.losses * stepped.weights).sum() / stepped.weights.sum()
        mean.backward()  # type: ignore[no-untyped-call]
    return stepped


def _forward(placed: PlacedModule, module: nn.Module, batch: Any, workload: Workload) -> Stepped:
    with autocast(CPU, placed.config.precision):
        return Stepped(*per_example(workload, module, batch, examples_of(batch)))


def examples_of(batch: Any) -> int:
    """Return the number of examples in a batch: the length of the first tensor in it."""
    if isinstance(batch, Tensor):
        return len(batch)
    parts = list(batch.values()) if isinstance(batch, Mapping) else list(batch)
    nested = next((part for part in parts if isinstance(part, (Tensor, Mapping, list, tuple))), None)
    return len(parts) if nested is None else examples_of(nested)


State = dict[str, Tensor]  # sums by name, in float64; two states are joined by adding them


@dataclass(frozen=True)
class AdditiveMetric:
    """A metric that is no mean over examples, but a function of sums over them."""

    state: Callable[[Any, Any, Tensor], Tensor]  # outputs, batch, weights (examples,) -> sums of any fixed shape
    result: Callable[[Tensor], float]  # of the sum of all states


class MetricSet:
    """Loss, metrics of one value per example, of which weighted means are taken, and additive metrics, as one state."""

    def __init__(self, per_example: Mapping[str, PerExample], additive: Mapping[str, AdditiveMetric]) -> None:
        taken = sorted({"loss", "weight", *per_example} & set(additive))
        if taken:
            raise UsageError(f"metrics={taken} are taken: by the loss, by its weights, or by a metric of the workload.")
        for name, metric in additive.items():
            if not isinstance(metric, AdditiveMetric):
                raise UsageError(
                    f"metric {name!r} is {type(metric).__name__}; give an AdditiveMetric, or put a function of one value per "
                    "example into the workload's metrics."
                )
        self._per_example, self._additive = dict(per_example), dict(additive)

    @torch.no_grad()
    def state(self, outputs: Any, batch: Any, losses: Tensor, weights: Tensor | None) -> State:
        """Return the sums over one batch, of losses (examples,) and weights (examples,), None for ones."""
        weigh = (torch.ones_like(losses) if weights is None else weights).detach().double()
        sums = {"weight": weigh.sum()}
        for name, metric in {"loss": None, **self._per_example}.items():
            values = losses if metric is None else metric(outputs, batch)
            check_loss_shape(values, losses.numel(), what="the loss" if metric is None else f"metric {name!r}")
            sums[name] = torch.where(weigh > 0, values.detach().double() * weigh, 0.0).sum()
        return sums | {
            name: each.state(outputs, batch, weigh).detach().double() for name, each in self._additive.items()
        }

    def result(self, state: State) -> dict[str, float]:
        """Return the value of the loss and of each metric; raises `UsageError` where no batch is in it."""
        if not state:
            raise UsageError("There is no batch to take metrics of: the dataset is empty.")
        values = {name: float(state[name] / state["weight"]) for name in ("loss", *self._per_example)}
        return values | {name: metric.result(state[name]) for name, metric in self._additive.items()}


def total(states: Iterable[State]) -> State:
    """Return the sum of states; that of none is empty."""
    found: State = {}
    for state in states:
        found = {name: found[name] + value if found else value for name, value in state.items()} or found
    return found


class StepRunner:
    """Runs steps on the placed module with this worker's batches; its methods are sent to workers, the workload's datasets take their own way."""

    def __init__(
        self,
        placed: PlacedModule,
        workload: Workload,
        metrics: Mapping[str, AdditiveMetric],
        step: TrainStep = train_step,
    ) -> None:
        self.placed, self._step = placed, step
        self.workload = workload.replace(train_data=(), validation_data=(), test_data=None)
        self.metrics = MetricSet(workload.metrics, metrics)
        self._dtype = {"float32": torch.float32, "float64": torch.float64}.get(placed.config.precision or "")

    def itself(self) -> StepRunner:
        """Return itself: how a worker makes the runner that it holds."""
        return self

    def train(self, source: Any, plans: Sequence[Any]) -> Made:
        """Make one update with each plan's batch."""
        states, begun = [], time.perf_counter()
        for plan in plans:
            batch = to_device(source.take(plan), CPU, self._dtype)
            made = self._step(self.placed, batch, self.workload)
            if not isinstance(made, tuple) or len(made) not in (2, 3):
                raise UsageError(
                    f"train_step returned {type(made).__name__}; it has to return Stepped(outputs, losses, weights), the losses one per example."
                )
            stepped = Stepped(*made)
            check_loss_shape(stepped.losses, examples_of(batch))
            states.append(self.metrics.state(stepped.outputs, batch, stepped.losses, stepped.weights))
        return Made(states, get_current_worker_index(), self.placed.buffers(), time.perf_counter() - begun)

    def evaluate(self, source: Any, plan: Any, buffers: Mapping[str, Tensor]) -> State:
        """Return the metrics of one share; an empty state where it has no batch."""
        states = []
        with self._reading(buffers) as module:
            for given in source.batches(plan):
                batch = to_device(given, CPU, self._dtype)
                stepped = _forward(self.placed, module, batch, self.workload)
                states.append(self.metrics.state(stepped.outputs, batch, stepped.losses, stepped.weights))
        return total(states)

    def predict(self, source: Any, plan: Any, buffers: Mapping[str, Tensor]) -> list[Any]:
        """Return the outputs of one share, batch by batch."""
        with self._reading(buffers) as module, autocast(CPU, self.placed.config.precision):
            return [self.workload.forward(module, to_device(batch, CPU, self._dtype)) for batch in source.batches(plan)]

    @contextlib.contextmanager
    def _reading(self, buffers: Mapping[str, Tensor]) -> Iterator[nn.Module]:
        """Hand out the module with the newest values and the given buffers, in evaluation mode; its own are put back."""
        replica, own = self.placed.pull(), self.placed.buffers()
        with torch.no_grad():
            try:
                copy_buffers(replica.module, buffers)
                with eval_mode(replica.module) as module:
                    yield module
            finally:
                copy_buffers(replica.module, own)


WORKER_SEEDS = 7919
"""Apart, so that no worker shuffles as another one does under a neighbouring seed (a prime, no more)."""

GENERATORS = threading.Lock()
"""Held by who seeds the process's random generators and draws from them: workers are threads of one process, and would draw from
what another has seeded."""


class WorkerTrial:
    """Replica and batches of one worker. Worker 0 reads what training without servers reads; the others shuffle differently (T7.4).

    Args:
        start_step: updates that were made before, by all workers together.
        local: buffers and frozen parameters of the coordinator's model, by name: what is on no server; None are those of a fresh one.
    """

    def __init__(
        self,
        workload: Workload,
        config: TrainConfig,
        start_step: int,
        num_workers: int,
        local: Mapping[str, Tensor] | None = None,
    ) -> None:
        worker = get_current_worker_index()
        mine = config.replace(per_host_seed=config.per_host_seed + WORKER_SEEDS * worker)
        with GENERATORS:
            self.stack = LaneStack(workload, [mine], CPU)
        self.stream = DataStream(workload, mine, CPU, start_step=start_step // num_workers)
        self.gradients = LoopGradients(workload, self.stack)
        self.thresholds = clip_thresholds([config], self.stack.values)
        pairs = list(zip(self.stack.names, self.stack.slices, strict=True))
        self.values = {name: self.stack.values[0, where] for name, where in pairs}
        self.grads = {name: self.stack.grad[0, where] for name, where in pairs}
        self.stack.models[0].train()
        quicken_batch_norm(self.stack.models[0], num_workers)
        here = self.stack.buffers | self.stack.frozen
        for name, value in (local or {}).items():
            here[name][0].copy_(value)


def train_steps(trial: WorkerTrial, placed: PlacedModule, count: int = 1) -> Made:
    """Make `count` updates on the worker that runs this (T13.7)."""
    updates = [_train_step(trial, placed) for _ in range(count)]
    buffers = {name: whole[0].clone() for name, whole in trial.stack.buffers.items()}
    return Made(updates, get_current_worker_index(), buffers)


def _train_step(trial: WorkerTrial, placed: PlacedModule) -> Update:
    batches, at = trial.stream.next(), [time.perf_counter()]
    versions = placed.pull_into(trial.values)
    at.append(time.perf_counter())
    found, grad = trial.gradients([batches]), trial.stack.grad
    norm, clipped = global_norm(grad), False
    if trial.thresholds is not None:
        _, shortened = clip_by_norm(grad, norm, trial.thresholds, out=grad)
        clipped = bool(shortened)
    loss, se = float(found.loss), math.sqrt(float(found.squared_se))
    at.append(time.perf_counter())
    after = placed.push_flat(trial.grads, versions)
    at.append(time.perf_counter())
    spent = [end - begin for begin, end in itertools.pairwise(at)]
    step, staleness = after[0] - 1, after[0] - 1 - versions[0]
    return Update(
        step, get_current_worker_index(), loss, se, float(norm), clipped, staleness, trial.stream.wait_s, *spent
    )
