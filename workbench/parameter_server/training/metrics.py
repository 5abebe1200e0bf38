"""Metrics as sums that workers return and the coordinator adds up: means over examples, and functions of any other sum (T8.4)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workbench.errors import UsageError
from workbench.workloads.base import PerExample
from workbench.workloads.checks import check_loss_shape

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
        found = {name: found[name] + value if found else value for name, value in state.items()} or found
    return found


def auc(score: Callable[[Any, Any], Tensor], label: Callable[[Any], Tensor], *, bins: int = 200) -> AdditiveMetric:
    """Return the area under the ROC curve of scores from 0 to 1, counted in bins: exact up to ties within a bin.

    Args:
        score: (outputs, batch) -> (examples,).
        label: batch -> (examples,), 0 or 1.
        bins: 200 is the number of thresholds that Keras takes.
    """

    def state(outputs: Any, batch: Any, weights: Tensor) -> Tensor:
        place = (score(outputs, batch).double() * bins).long().clamp(0, bins - 1).reshape(-1)
        counts = torch.zeros(2, bins, dtype=torch.float64)
        return counts.index_put_((label(batch).long().reshape(-1), place), weights, accumulate=True)

    return AdditiveMetric(state, area_under_counts)


def area_under_counts(counts: Tensor) -> float:
    """Return the area under the ROC curve of (2, bins) counts of negatives and positives by rising score; ties count half.

    It is NaN where one of the two classes is absent.
    """
    negatives, positives = counts
    below = torch.cumsum(negatives, 0) - negatives / 2
    return float((positives * below).sum() / (positives.sum() * negatives.sum()))
