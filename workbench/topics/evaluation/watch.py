"""Which examples a model is given, batch by batch, while somebody's own evaluation function runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset, TensorDataset, default_collate

from workbench.train.batches import to_device
from workbench.workloads.base import Workload

__all__ = ["ChosenItems", "ExampleNames", "WatchedCall"]

ITEM = 4
"""Bytes of a value in a row: rows are compared as float32."""


class ChosenItems(Dataset[Any]):
    """Some items of a dataset, read once; a `TensorDataset` keeps its `tensors`."""

    tensors: tuple[Tensor, ...]

    def __init__(self, data: Any, indices: Sequence[int]) -> None:
        self._items = [data[i] for i in indices]
        if isinstance(data, (TensorDataset, ChosenItems)) and hasattr(data, "tensors"):
            self.tensors = tuple(t[torch.tensor(indices)] for t in data.tensors)

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Any:
        """Return an item by its place among the chosen ones."""
        return self._items[index]


class ExampleNames:
    """Recognises examples by what the model is given: rows of its first tensor, padded at either end or not."""

    def __init__(self, workload: Workload, model: nn.Module, data: ChosenItems) -> None:
        self._model = model
        self._places: dict[bytes, list[int]] = {}
        self._count = len(data)
        collate = workload.collate or default_collate
        precision = {"float64": torch.float64, "float32": torch.float32}.get(workload.config.precision or "")
        device = next(model.parameters()).device
        for place in range(len(data)):
            batch = collate([data[place]])
            for row in WatchedCall(model, lambda: workload.forward(model, to_device(batch, device, precision))).rows:  # noqa: B023
                self._places.setdefault(row[0], []).append(place)
        self._lengths = sorted({len(row) for row in self._places}, reverse=True)

    def batches(self, rows: Sequence[Sequence[bytes]]) -> tuple[list[list[int]], bool]:
        """Return the examples of each batch, -1 for a row that is none; equal examples are told apart by their order.

        Where no row is known, because the function gives the model other inputs than the workload does, rows are taken to come
        in the order of the data; the second value says so.
        """
        known = [[self._known(row) for row in batch] for batch in rows]
        if rows and not any(places for batch in known for places in batch):
            number = iter(range(sum(map(len, rows))))
            return [[place if (place := next(number)) < self._count else -1 for _ in batch] for batch in rows], True
        met: Counter[int] = Counter()
        found: list[list[int]] = []
        for batch in known:
            found.append([])
            for places in batch:
                found[-1].append(places[met[places[0]] % len(places)] if places else -1)
                if places:
                    met[places[0]] += 1
        return found, False

    def _known(self, row: bytes) -> list[int]:
        """Return the examples that look like this row, or begin or end it where the rest is one value: padding of a batch."""
        if row in self._places:
            return self._places[row]
        for length in self._lengths:
            rest = len(row) - length
            if rest > 0:
                for part, pad in ((row[:length], row[length:]), (row[rest:], row[:rest])):
                    if part in self._places and pad == pad[:ITEM] * (rest // ITEM):
                        return self._places[part]
        return []


class WatchedCall:
    """Runs a function and keeps the rows of the first tensor of each call of the model."""

    def __init__(self, model: nn.Module, function: Callable[[], Any]) -> None:
        self.rows: list[list[bytes]] = []
        self.result: Any = None
        self.error: Exception | None = None
        handle = model.register_forward_pre_hook(self._note, with_kwargs=True)
        try:
            with torch.no_grad():
                self.result = function()
        except Exception as error:
            self.error = error
        finally:
            handle.remove()

    def _note(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.dim()]
        if tensors:
            first = tensors[0].detach().cpu()
            first = torch.view_as_real(first) if first.is_complex() else first
            table = first.float().flatten(1) if first.dim() > 1 else first.float()[:, None]
            self.rows.append([row.tobytes() for row in table.numpy()])
