"""`paired`: which parts of an item the model reads and which one the loss compares with, found by asking both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import Dataset

from workbench.topics.one_batch.batch import OneBatch, first_batch
from workbench.train.rng import isolated_rng
from workbench.workloads.base import Workload
from workbench.workloads.items import in_its_own_order

__all__ = ["Paired", "paired"]


class Paired(Dataset[Any]):
    """A dataset whose items are (inputs, target), made of the parts of another one's.

    Args:
        data: map-style, its items tuples.
        inputs: places of the parts that the model reads; several become a tuple.
        target: place of the target.
    """

    def __init__(self, data: Any, inputs: Sequence[int], target: int) -> None:
        self.data, self.inputs, self.target = data, tuple(inputs), target

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        """Return item `index` as (inputs, target)."""
        item = self.data[index]
        parts = tuple(_tensor(item[place]) for place in self.inputs)
        return (parts[0] if len(parts) == 1 else parts), item[self.target]


def paired(workload: Workload, device: torch.device) -> dict[str, Any]:
    """Return the splits of a workload, with items of three parts or more as pairs of what the model reads and the target.

    A part whose rows are exchanged between examples is an input where that changes the outputs, else a target where it changes the
    loss. Two parts are (inputs, target) as they stand; so is everything where this cannot be asked.

    Args:
        workload: whose items may be (users, items, ratings), (inputs, mask, targets) or (inputs, targets, weights).
        device: where the model is asked.
    """
    splits = dict(workload.splits)
    if workload.collate is not None or in_its_own_order(workload.train_data):
        return splits
    try:
        with isolated_rng():
            if len(_item(workload.train_data)) < 3:
                return splits
            inputs, targets = _roles(first_batch(workload, workload.config.replace(bn_stat_examples=None), device))
    except Exception:  # the person's own code, asked in a way it was not made for
        return splits
    if not inputs or not targets or (inputs, targets[0]) == ([0], 1):
        return splits
    return {name: data if in_its_own_order(data) else Paired(data, inputs, targets[0]) for name, data in splits.items()}


def _item(data: Any) -> Sequence[Any]:
    item = data[0] if len(data) else ()
    return item if isinstance(item, (tuple, list)) else ()


def _roles(one: OneBatch) -> tuple[list[int], list[int]]:
    """Return the places of the parts that change the outputs, and of those that change the losses alone."""
    outputs = one.forward()
    own, losses = one.flat(outputs), one.losses(outputs)
    inputs, targets = [], []
    for place in range(len(one.batch)):
        moved = list(one.batch)
        moved[place] = tree_map(lambda t: t.roll(1, 0) if one.has_rows(t) else t, moved[place])
        if not torch.equal(one.flat(one.forward(moved)), own):
            inputs.append(place)
        elif not torch.equal(one.losses(outputs, moved), losses):
            targets.append(place)
    return inputs, targets


def _tensor(value: Any) -> Any:
    numbers = isinstance(value, (bool, int, float, np.number))
    return torch.as_tensor(value) if numbers and not isinstance(value, Tensor) else value
