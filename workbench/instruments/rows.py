"""`StepRows`: the values of each update, kept on their device and handed on in blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Value = Tensor | float


class StepRows:
    """Collects rows and gives every `block` of them to `sink` as columns of numbers, NaN where a row has no value.

    Tensors are read in one transfer a block.
    """

    def __init__(self, sink: Callable[[Mapping[str, list[float]]], None], *, block: int = 200) -> None:
        self._sink, self.block = sink, block
        self._rows: list[dict[str, Value]] = []
        self.names: dict[str, None] = {}

    def add(self, row: dict[str, Value]) -> None:
        """Keep a row; its tensors must have one element and must not be changed later."""
        self._rows.append(row)
        if len(self._rows) >= self.block:
            self.flush()

    def flush(self) -> None:
        """Hand on what was collected."""
        rows, self._rows = self._rows, []
        if not rows:
            return
        self.names |= dict.fromkeys(name for row in rows for name in row)
        where = [(i, name) for i, row in enumerate(rows) for name, value in row.items() if isinstance(value, Tensor)]
        tensors: list[Any] = [rows[i][name] for i, name in where]
        for (i, name), value in zip(where, _numbers(tensors), strict=True):
            rows[i][name] = value
        self._sink({name: [float(row.get(name, math.nan)) for row in rows] for name in self.names})


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
