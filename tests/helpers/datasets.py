"""The rows of tensors as other datasets have them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset, IterableDataset


class Items(Dataset[Any]):
    """By index, and no `TensorDataset`, so that a loader reads them one by one."""

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> Any:
        return tuple(tensor[index] for tensor in self.tensors)


class Stream(IterableDataset[Any]):
    """In their own order, with a length."""

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __iter__(self) -> Iterator[Any]:
        return zip(*self.tensors, strict=True)
