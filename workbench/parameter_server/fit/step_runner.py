"""`StepRunner`: what a worker does of a model's training, evaluation and prediction; `train_step`, which a function replaces (T4.1)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from workbench.errors import UsageError
from workbench.parameter_server.context import get_current_worker_index
from workbench.parameter_server.servers.placed import PlacedModule
from workbench.train.batches import to_device
from workbench.train.evaluation import eval_mode
from workbench.train.forward import autocast, per_example
from workbench.workloads.base import PerExample, Workload
from workbench.workloads.checks import check_loss_shape, check_weights

State = dict[str, Tensor]
"""Sums by name, in float64; two states are joined by adding them."""


@dataclass(frozen=True)
class AdditiveMetric:
    """A metric that is no mean over examples, but a function of sums over them.

    Attributes:
        state: (outputs, batch, weights (examples,)) -> tensor of any fixed shape, summed over the batch's examples.
        result: the sum of all states -> value.
    """

    state: Callable[[Any, Any, Tensor], Tensor]
    result: Callable[[Tensor], float]


class MetricSet:
    """Loss, metrics of one value per example, and additive metrics, as one state.

    Args:
        per_example: name -> `(outputs, batch) -> (examples,)`; weighted means are taken of them, as of the loss.
        additive: name -> metric.

    Raises:
        UsageError: a name is taken twice, or is reserved.
    """

    def __init__(self, per_example: Mapping[str, PerExample], additive: Mapping[str, AdditiveMetric]) -> None:
        taken = sorted({"loss", "weight", "examples", *per_example} & set(additive))
        if taken:
            raise UsageError(f"metrics={taken} are taken: by the loss, by its weights, or by a metric of the workload.")
        for name, metric in additive.items():
            if not isinstance(metric, AdditiveMetric):
                raise UsageError(
                    f"metric {name!r} is {type(metric).__name__}; give an AdditiveMetric, or put a function of one value per "
                    "example into the workload's metrics."
                )
        self._per_example, self._additive = dict(per_example), dict(additive)

    def state(self, outputs: Any, batch: Any, losses: Tensor, weights: Tensor | None) -> State:
        """Return the sums over one batch.

        Args:
            batch: that it was given.
            losses: (examples,).
            weights: (examples,); None is ones.
        """
        examples = losses.numel()
        check_loss_shape(losses, examples)
        weigh = (torch.ones_like(losses) if weights is None else weights).detach().double()
        with torch.no_grad():
            found = {"loss": losses, **{name: metric(outputs, batch) for name, metric in self._per_example.items()}}
            sums = {}
            for name, values in found.items():
                check_loss_shape(values, examples, what="the loss" if name == "loss" else f"metric {name!r}")
                sums[name] = torch.where(weigh > 0, values.detach().double() * weigh, 0.0).sum()
            for name, additive in self._additive.items():
                sums[name] = additive.state(outputs, batch, weigh).detach().double()
        return sums | {"weight": weigh.sum(), "examples": torch.tensor(float((weigh > 0).sum()), dtype=torch.float64)}

    def result(self, state: State) -> dict[str, float]:
        """Return the value of the loss and of each metric.

        Raises:
            UsageError: no batch is in it.
        """
        if not state:
            raise UsageError("There is no batch to take metrics of: the dataset is empty.")
        values = {name: float(state[name] / state["weight"]) for name in ("loss", *self._per_example)}
        return values | {name: metric.result(state[name]) for name, metric in self._additive.items()}


def total(states: Iterable[State]) -> State:
    """Return the sum of states; that of none is empty."""
    found: State = {}
    for state in states:
        if state:
            found = {name: found[name] + value for name, value in state.items()} if found else dict(state)
    return found


def auc(
    score: Callable[[Any, Any], Tensor], label: Callable[[Any], Tensor], *, bins: int = 200, low: float = 0.0, high: float = 1.0
) -> AdditiveMetric:  # fmt: skip
    """Return the area under the ROC curve of scores, counted in bins: exact up to ties within a bin.

    Args:
        score: (outputs, batch) -> (examples,).
        label: batch -> (examples,), 0 or 1.
        bins: between `low` and `high`; 200 is the number of thresholds that Keras takes.
        low: scores below it count as it.
        high: scores above it count as it.
    """

    def state(outputs: Any, batch: Any, weights: Tensor) -> Tensor:
        place = ((score(outputs, batch).double() - low) / (high - low) * bins).long().clamp(0, bins - 1)
        return torch.zeros(2, bins, dtype=torch.float64).index_put_(
            (label(batch).long().reshape(-1), place.reshape(-1)), weights, accumulate=True
        )

    return AdditiveMetric(state, area_under_counts)


def area_under_counts(counts: Tensor) -> float:
    """Return the area under the ROC curve of (2, bins) counts of negatives and positives by rising score; ties count half.

    It is NaN where one of the two classes is absent.
    """
    negatives, positives = counts
    below = torch.cumsum(negatives, 0) - negatives / 2
    return float((positives * below).sum() / (positives.sum() * negatives.sum()))


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
    """What comes back from a worker.

    Attributes:
        worker: its index.
        states: metrics of each step.
        buffers: of its replica afterwards, where they were asked for.
    """

    worker: int
    states: list[State]
    buffers: dict[str, Tensor] | None


TrainStep = Callable[[PlacedModule, Any, Workload], Stepped]
"""One update: takes the placed module, a batch and the workload."""


class Trainable(Protocol):
    """Batches of a worker, one a step."""

    def take(self, plan: Any) -> Any:
        """Return the batch of a step."""
        ...


class Evaluable(Protocol):
    """Batches of a worker, a share of a finite dataset at a time."""

    def batches(self, plan: Any) -> Iterator[Any]:
        """Yield the batches of a share."""
        ...


def train_step(placed: PlacedModule, batch: Any, workload: Workload) -> Stepped:
    """Pull the newest values, take the gradient of the weighted mean loss, and push it: what `fit` does unless it is told otherwise."""
    with placed.step() as module:
        stepped = forward(placed, module, batch, workload)
        if stepped.weights is None:
            mean = stepped.losses.mean()
        else:
            check_weights(stepped.weights, where="the batch of a step")
            mean = (stepped.losses * stepped.weights).sum() / stepped.weights.sum()
        mean.backward()  # type: ignore[no-untyped-call]
    return stepped


def forward(placed: PlacedModule, module: nn.Module, batch: Any, workload: Workload) -> Stepped:
    """Return outputs, losses and weights of a batch, in the config's precision; one value per example is asked for."""
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
    """Runs steps on the placed module with this worker's batches.

    Args:
        placed: module to train.
        workload: loss, weights, forward and metrics; its datasets are not used.
        metrics: that are counted.
        step: one update.
    """

    def __init__(self, placed: PlacedModule, workload: Workload, metrics: MetricSet, step: TrainStep) -> None:
        self.placed, self.workload, self.metrics, self.step = placed, workload, metrics, step
        self._dtype = {"float32": torch.float32, "float64": torch.float64}.get(placed.config.precision or "")

    def itself(self) -> StepRunner:
        """Return itself: how a worker makes the runner that it holds."""
        return self

    def train(self, source: Trainable, plans: Sequence[Any]) -> list[State]:
        """Make one update with each plan's batch and return its metrics."""
        states = []
        for plan in plans:
            batch = to_device(source.take(plan), CPU, self._dtype)
            made = self.step(self.placed, batch, self.workload)
            if not isinstance(made, tuple) or len(made) not in (2, 3):
                raise UsageError(
                    f"train_step returned {type(made).__name__}; it has to return Stepped(outputs, losses, weights), the losses one per example."
                )
            stepped = Stepped(*made)
            check_loss_shape(stepped.losses, examples_of(batch))
            states.append(self.metrics.state(stepped.outputs, batch, stepped.losses, stepped.weights))
        return states

    def evaluate(self, source: Evaluable, plan: Any, buffers: Mapping[str, Tensor]) -> State | None:
        """Return the metrics of one share; None where it has no batch."""
        with self._reading(buffers) as module:
            states = []
            for given in source.batches(plan):
                batch = to_device(given, CPU, self._dtype)
                stepped = forward(self.placed, module, batch, self.workload)
                states.append(self.metrics.state(stepped.outputs, batch, stepped.losses, stepped.weights))
        return total(states) if states else None

    def predict(self, source: Evaluable, plan: Any, buffers: Mapping[str, Tensor]) -> list[Any]:
        """Return the outputs of one share, batch by batch."""
        with self._reading(buffers) as module, autocast(CPU, self.placed.config.precision):
            return [self.workload.forward(module, to_device(batch, CPU, self._dtype)) for batch in source.batches(plan)]

    @contextlib.contextmanager
    def _reading(self, buffers: Mapping[str, Tensor]) -> Iterator[nn.Module]:
        """Hand out the module with the newest values and the given buffers, in evaluation mode; its own are put back."""
        replica, own = self.placed.pull(), self.placed.buffers()
        try:
            with torch.no_grad(), eval_mode(replica.module) as module:
                _fill(replica.module, buffers)
                yield module
        finally:
            _fill(replica.module, own)


def train_plans(runner: StepRunner, source: Trainable, plans: Sequence[Any], wants_buffers: bool) -> Trained:
    """Make one update for each plan; sent to workers by `fit`."""
    states = runner.train(source, plans)
    return Trained(get_current_worker_index(), states, runner.placed.buffers() if wants_buffers else None)


def evaluate_plan(runner: StepRunner, source: Evaluable, plan: Any, buffers: Mapping[str, Tensor]) -> State | None:
    """Sent to workers by `evaluate`."""
    return runner.evaluate(source, plan, buffers)


def predict_plan(runner: StepRunner, source: Evaluable, plan: Any, buffers: Mapping[str, Tensor]) -> list[Any]:
    """Sent to workers by `predict`."""
    return runner.predict(source, plan, buffers)


def _fill(module: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for key, buffer in module.named_buffers():
            if key in buffers:
                buffer.copy_(buffers[key])
