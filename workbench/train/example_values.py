"""What is known of every example of a split: its loss and metrics, weight, class and inputs."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from workbench.train.evaluation import values_each
from workbench.workloads.base import Workload
from workbench.workloads.losses import CrossEntropy, classes_of

Floats = NDArray[np.float64]


class ExampleValues(NamedTuple):
    """What is known of every example of a split.

    Attributes:
        columns: "loss" and the workload's metrics -> values, shape (examples,).
        weights: shape (examples,), ones without weights.
        labels: class of each, shape (examples,); None where the loss is no cross-entropy with one class an example.
        classes: how many the model tells apart; None where unknown.
        features: shape (examples, features), the floating tensors of the batch; None where there is none.
    """

    columns: dict[str, Floats]
    weights: Floats
    labels: NDArray[np.int64] | None
    classes: int | None
    features: Floats | None

    def only(self, mask: NDArray[np.bool_]) -> ExampleValues:
        """Return the values of a part of the examples."""
        return self._replace(
            columns={name: values[mask] for name, values in self.columns.items()},
            weights=self.weights[mask],
            labels=None if self.labels is None else self.labels[mask],
            features=None if self.features is None else self.features[mask],
        )


def example_values(workload: Workload, model: nn.Module, *, max_features: int = 0, **how: Any) -> ExampleValues:
    """Return the values of `model` on every example of a split, in evaluation mode; model and RNG are left as they were.

    The arguments are those of `values_each`; of the inputs `max_features` columns are kept, spread evenly over them.
    """
    labels: list[Tensor] = []
    features: list[Tensor] = []
    classes: int | None = None

    def observe(batch: Any, outputs: Any, examples: int) -> None:
        nonlocal classes
        classes = classes_of(workload.loss, outputs)
        if isinstance(workload.loss, CrossEntropy):
            labels.append(workload.loss.targets(batch))
        if max_features:
            features.append(_columns(batch, examples, max_features))

    ((columns, weights),) = values_each(workload, [model], observe=observe, **how)
    return ExampleValues(
        columns={name: values.numpy() for name, values in columns.items()},
        weights=weights.numpy(),
        labels=torch.cat(labels).cpu().numpy().astype(np.int64) if labels else None,
        classes=classes if labels else None,
        features=torch.cat(features).numpy() if features and features[0].shape[1] else None,
    )


def _columns(batch: Any, examples: int, most: int) -> Tensor:
    """Return the floating tensors of a batch side by side, shape (examples, columns), at most `most` of the columns."""
    parts = [t.detach().reshape(examples, -1) for t in float_tensors(batch) if t.dim() and t.shape[0] == examples]
    if not parts:
        return torch.empty(examples, 0, dtype=torch.float64)
    rows = torch.cat([part.cpu().double() for part in parts], 1)
    count = rows.shape[1]
    return rows if count <= most else rows[:, torch.linspace(0, count - 1, most).long()]


def float_tensors(batch: Any) -> list[Tensor]:
    """Return the floating tensors of a nested batch, in order."""
    return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
