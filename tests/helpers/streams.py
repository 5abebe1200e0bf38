"""Training data in an order of their own, for the faults that an order makes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

import workbench as wb


class Stream(IterableDataset[Any]):
    """Rows in the order in which they are stored, or shuffled anew at every pass."""

    def __init__(self, inputs: Tensor, labels: Tensor, *, shuffle: bool = False) -> None:
        self.inputs, self.labels, self.shuffle = inputs, labels, shuffle

    def __len__(self) -> int:
        return len(self.inputs)

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(len(self)).tolist() if self.shuffle else range(len(self))
        return ((self.inputs[i], self.labels[i]) for i in order)


def digits_streams() -> dict[str, wb.Workload]:
    """`digits_mlp` clean, sorted by class, and with the validation rows at the end of every epoch in a fixed order."""
    base = wb.load_workload("digits_mlp")
    x, y = base.train_data.tensors
    vx, vy = base.validation_data.tensors
    sorted_ = torch.argsort(y, stable=True)
    mixed = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return {
        "clean": base,
        "clean stream": base.replace(train_data=Stream(x, y, shuffle=True)),
        "sorted": base.replace(train_data=Stream(x[sorted_], y[sorted_])),
        "leaked": base.replace(train_data=Stream(torch.cat([x[mixed], vx]), torch.cat([y[mixed], vy]))),
    }
