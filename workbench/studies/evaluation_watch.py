"""Which examples a model is given, batch by batch, while somebody's own evaluation function runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset, TensorDataset, default_collate

from workbench.train.batches import to_device
from workbench.workloads.base import Workload

__all__ = ["ChosenItems", "ExampleNames", "WatchedCall"]


class ChosenItems(Dataset[Any]):
    """Some items of a dataset, read once; a `TensorDataset` keeps its `tensors`."""

    def __init__(self, data: Any, indices: Sequence[int]) -> None:
        self._items = [data[i] for i in indices]
        if isinstance(data, TensorDataset):
            self.tensors = tuple(t[torch.tensor(indices)] for t in data.tensors)

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Any:
        """Return an item by its place among the chosen ones."""
        return self._items[index]


class ExampleNames:
    """Recognises examples by what the model is given: rows of its first tensor."""

    def __init__(self, workload: Workload, model: nn.Module, data: ChosenItems) -> None:
        self._model = model
        self._places: dict[bytes, list[int]] = {}
        collate = workload.collate or default_collate
        precision = {"float64": torch.float64, "float32": torch.float32}.get(workload.config.precision or "")
        device = next(model.parameters()).device
        for place in range(len(data)):
            batch = collate([data[place]])
            for row in WatchedCall(model, lambda: workload.forward(model, to_device(batch, device, precision))).rows:  # noqa: B023
                self._places.setdefault(row[0], []).append(place)

    def batches(self, rows: Sequence[Sequence[bytes]]) -> list[list[int]]:
        """Return the examples of each batch, -1 for a row that is none; equal examples are told apart by their order."""
        met: dict[bytes, int] = {}
        found = []
        for batch in rows:
            places = []
            for row in batch:
                known = self._places.get(row)
                if known is None:
                    places.append(-1)
                else:
                    places.append(known[met.get(row, 0) % len(known)])
                    met[row] = met.get(row, 0) + 1
            found.append(places)
        return found


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
            table = (
                tensors[0].detach().cpu().to(torch.float32).flatten(1)
                if tensors[0].dim() > 1
                else tensors[0].detach().cpu().float()[:, None]
            )
            self.rows.append([row.tobytes() for row in table.numpy()])
