"""Metrics as sums that can be added up wherever they were taken: each example counts once, in whatever order (T8.5, behaviour 86)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workbench.errors import UsageError
from workbench.workloads.base import PerExample
from workbench.workloads.checks import check_loss_shape

__all__ = ["AdditiveMetric", "MetricSet", "State", "auc", "total"]

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
            outputs: of the model.
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
