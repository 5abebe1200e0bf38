"""`Stored`: whether the numbers that a dataset holds change from one pass through it to a later one, as where augmentation writes into them."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

_ROWS, _NUMBERS, _MOST = 32, 64, 8
"""Examples that are looked at, numbers of each, and attributes of a dataset (rules of thumb)."""


class Stored:
    """Keeps some numbers of what a dataset holds in this process, before its first four passes and then before ever fewer."""

    def __init__(self) -> None:
        self._looks: dict[int, dict[tuple[str, int], list[tuple[int, Tensor]]]] = {}
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._passes: dict[int, int] = {}
        self._of: dict[int, int] = {}  # the dataset of each loader

    def begins(self, loader: Any) -> None:
        """Take in that iteration over a loader begins."""
        with contextlib.suppress(Exception):  # of a dataset's own: nothing is known of what it holds
            dataset = loader.dataset
            while isinstance(dataset, Subset):
                dataset = dataset.dataset
            key = self._of[id(loader)] = id(dataset)
            if (ref := self._alive.get(key)) is None or ref() is not dataset:
                self._alive[key], self._passes[key], self._looks[key] = weakref.ref(dataset), 0, {}
            self._passes[key] = number = self._passes[key] + 1
            if not loader.num_workers and (number <= 4 or number & (number - 1) == 0):
                for name, width, numbers in _held(dataset):
                    self._looks[key].setdefault((name, width), []).append((number, numbers))

    def to_dict(self, loader: int | None, width: int) -> list[dict[str, Any]]:
        """Return name, passes and standard deviations of what a loader's dataset holds as examples of so many numbers, most of which change each time, as JSON values."""
        found = []
        for (name, size), looks in self._looks.get(self._of.get(loader or 0, 0), {}).items():
            values = [numbers for _, numbers in looks]
            if size == width and len(values) > 2 and len({v.shape for v in values}) == 1:
                changed = [float((a != b).any(1).float().mean()) for a, b in itertools.pairwise(values)]
                if min(changed) > 0.5:
                    spreads = [float(v.double().std()) for v in values]
                    found.append({"name": name, "passes": [number for number, _ in looks], "spreads": spreads})
        return found


def _held(dataset: Any) -> Iterator[tuple[str, int, Tensor]]:
    """Iterate over what a dataset holds an example of in each place: its name, how many numbers one has, and some of them."""
    tensors = {f"tensors[{k}]": t for k, t in enumerate(dataset.tensors)} if isinstance(dataset, TensorDataset) else {}
    count, kinds = len(dataset), (list, tuple, Tensor, np.ndarray)
    held = [(name, v) for name, v in (vars(dataset) | tensors).items() if type(v) in kinds and len(v) == count > 1]
    for name, values in held[:_MOST]:
        rows = [values[i] for i in range(0, count, count // _ROWS + 1)]
        rows = [row[0] if type(row) in (list, tuple) and row else row for row in rows]
        if all(type(row) in (Tensor, np.ndarray) for row in rows) and len({tuple(row.shape) for row in rows}) == 1:
            flat = [torch.as_tensor(row).detach().reshape(-1) for row in rows]
            if len(flat[0]) > 1 and flat[0].is_floating_point() and flat[0].is_cpu:
                yield name, len(flat[0]), torch.stack([row[:: len(row) // _NUMBERS + 1] for row in flat])
