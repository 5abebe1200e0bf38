"""`StepRows`: the values of each update, kept on their device and handed on in blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from workbench.instruments.norms import stacked

Value = Tensor | float
MAX_GROUPS = 8


class StepRows:
    """Collects rows and gives every `block` of them to `sink` as columns of numbers, NaN where a row has no value."""

    def __init__(self, sink: Callable[[Mapping[str, list[float]]], None], *, block: int = 200) -> None:
        self._sink, self.block = sink, block
        self.columns: dict[str, list[Any]] = {}
        self._count = 0
        self._tensors: list[tuple[list[Any], int, Tensor]] = []  # with the column and the row that each stands in

    def add(self, row: Mapping[str, Value]) -> None:
        """Keep a row; its tensors must have one element and must not be changed later."""
        self.extend({name: [value] for name, value in row.items()}, 1)

    def extend(self, columns: Mapping[str, list[Any]], count: int) -> None:
        """Keep so many rows, given as columns."""
        for name, values in columns.items():
            column = self.columns.setdefault(name, [])
            column += [math.nan] * (self._count - len(column)) + values
            if set(map(type, values)) != {float}:
                self._tensors += [(column, i, v) for i, v in enumerate(values, self._count) if isinstance(v, Tensor)]
        self._count += count
        if self._count >= self.block:
            self.flush()

    def flush(self) -> None:
        """Hand on what was collected."""
        if not self._count:
            return
        columns, count, tensors = self.columns, self._count, self._tensors
        self.columns, self._count, self._tensors = {name: [] for name in columns}, 0, []
        for column in columns.values():
            column.extend([math.nan] * (count - len(column)))
        for (column, i, _), number in zip(tensors, _numbers([value for _, _, value in tensors]), strict=True):
            column[i] = number
        self._sink(columns)


def _numbers(tensors: list[Tensor]) -> list[float]:
    """Return tensors of one element as numbers, in one transfer for each device."""
    found = [math.nan] * len(tensors)
    for device in {t.device for t in tensors}:
        places = [i for i, t in enumerate(tensors) if t.device == device]
        kinds = {tensors[i].dtype for i in places}
        one = torch.float32 if device.type == "mps" else torch.float64
        with torch.no_grad():
            plain = [tensors[i] if tensors[i].ndim == 0 else tensors[i].reshape(()) for i in places]
            values = torch.stack(plain if len(kinds) == 1 else [t.to(one) for t in plain])
        for place, value in zip(places, values.tolist(), strict=True):
            found[place] = value
    return found


def summed(losses: Sequence[Value]) -> Value:
    """Return the sum of losses, a number where all are."""
    if all(isinstance(loss, float) for loss in losses):
        return math.fsum(float(loss) for loss in losses)
    return stacked([torch.as_tensor(loss) for loss in losses]).sum()


def kept(value: Any) -> Value:
    """Return a setting of an optimizer as it is now, NaN where there is none."""
    return value.detach().clone() if isinstance(value, Tensor) else math.nan if value is None else float(value)


def learning_rates(groups: Sequence[Mapping[str, Any]], where: str, names: Mapping[str, Any]) -> dict[str, Value]:
    """Return the columns of the groups' learning rates: of the first one, and of those that are, or are in `names`, for once others."""
    first = groups[0].get("lr", math.nan)
    row = {f"lr{where}": kept(first)}
    for place, group in enumerate(groups[1:MAX_GROUPS], start=1):
        lr = group.get("lr", math.nan)
        if isinstance(lr, Tensor) or lr != first or f"lr{where}/group{place}" in names:
            row[f"lr{where}/group{place}"] = kept(lr)
    return row
