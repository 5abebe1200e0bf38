"""`StepRunner`: what a worker does of a model's training, evaluation and prediction; `train_step`, which a function replaces (T4.1)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from workbench.errors import UsageError
from workbench.parameter_server.context import get_current_worker_index
from workbench.parameter_server.fit.metrics import AdditiveMetric, MetricSet, State, total
from workbench.parameter_server.servers.placed import PlacedModule
from workbench.train.batches import to_device
from workbench.train.evaluation import eval_mode
from workbench.train.forward import autocast, per_example
from workbench.workloads.base import Workload
from workbench.workloads.checks import check_loss_shape, check_weights

CPU = torch.device("cpu")


class Stepped(NamedTuple):
    """What a train step returns.

    Attributes:
        outputs: of the model, for the metrics.
        losses: (examples,).
        weights: (examples,), or None for ones.
    """

    outputs: Any
    losses: Tensor
    weights: Tensor | None = None


class Trained(NamedTuple):
    """What comes back from a worker: its index, metrics of each step, and buffers of its replica where they were asked for."""

    worker: int
    states: list[State]
    buffers: dict[str, Tensor] | None


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


class StepRunner:
    """Runs steps on the placed module with this worker's batches; its methods are sent to workers.

    Args:
        workload: loss, weights, forward and metrics; its datasets take their own way to the workers.
        metrics: additive ones, beside the workload's.
        step: one update.
    """

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

    def train(self, source: Any, plans: Sequence[Any], wants_buffers: bool) -> Trained:
        """Make one update with each plan's batch."""
        states = []
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
        return Trained(get_current_worker_index(), states, self.placed.buffers() if wants_buffers else None)

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
                _fill(replica.module, buffers)
                with eval_mode(replica.module) as module:
                    yield module
            finally:
                _fill(replica.module, own)


def _fill(module: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    for key, buffer in module.named_buffers():
        if key in buffers:
            buffer.copy_(buffers[key])
