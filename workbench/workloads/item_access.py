"""How the items of a dataset are read: by index, in its own order, or as rows of tensors; an item that raises is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from workbench.errors import DataError

__all__ = ["CountedStream", "HostShare", "IndexedDataset", "in_its_own_order", "item_error", "plain_tensors"]


def in_its_own_order(data: Any) -> bool:
    """Tell whether a dataset can only be read from its beginning on, not by index."""
    return isinstance(data, IterableDataset) or not hasattr(data, "__getitem__")


def plain_tensors(data: Any, collate: Callable[..., Any] | None = None) -> tuple[Tensor, ...] | None:
    """Return the tensors whose rows are the items of a dataset; None where items or batches may be anything else.

    Only a `TensorDataset` itself is known to be that: a subclass may augment its rows, or return other columns.

    Args:
        data: a dataset.
        collate: what makes a batch of its items; None is PyTorch's default.
    """
    return data.tensors if type(data) is TensorDataset and collate is None else None


class IndexedDataset(Dataset[Any]):
    """A dataset that passes items on unchanged, and names the index of one that raises.

    Args:
        data: the map-style dataset to wrap.
        split: named in the error; None where it is no split of a workload.
    """

    def __init__(self, data: Any, *, split: str | None = "train") -> None:
        self.data = data
        self.split = split

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        """Return item `index`.

        Raises:
            DataError: the wrapped dataset raised; its error is the cause.
            IndexError: `index` is past the end, as for any sequence.
        """
        try:
            return self.data[index]
        except Exception as error:
            length = len(self) if hasattr(self.data, "__len__") else None
            if isinstance(error, IndexError) and length is not None and not -length <= index < length:
                raise
            size = "" if length is None else f", {length} examples"
            raise DataError(
                f"item {index} of {_named(self.split, self.data, size)} raised {type(error).__name__}: {error}. "
                f"Look at it alone: {_variable(self.split)}[{index}]."
            ) from error

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the items of `indices`, in one call where the wrapped dataset takes one.

        Raises:
            DataError: an item raised; the first one that raises alone is named, or else the whole batch.
        """
        fetch = getattr(self.data, "__getitems__", None)
        if fetch is None:
            return [self[index] for index in indices]
        try:
            items: list[Any] = fetch(indices)
        except Exception as error:
            for index in indices:
                self[index]
            raise DataError(
                f"items {list(indices)} of {_named(self.split, self.data)} raised "
                f"{type(error).__name__}: {error}, together but not one by one. Look at its __getitems__."
            ) from error
        return items


def _named(split: str | None, data: Any, size: str = "") -> str:
    kind = type(data).__name__
    return f"the {split} split ({kind}{size})" if split is not None else f"the loader's dataset ({kind}{size})"


def _variable(split: str | None) -> str:
    return "loader.dataset" if split is None else f"{split}_data"


class HostShare(IterableDataset[Any]):
    """One host's share of an iterable dataset; all of it has to be read to know which items those are.

    Args:
        data: the iterable to wrap.
        share: places of this host's items in each micro-batch of all hosts.
        whole: items in such a micro-batch; an incomplete last one is dropped.
    """

    def __init__(self, data: Any, share: slice, whole: int) -> None:
        self.data, self.share, self.whole = data, share, whole

    def __iter__(self) -> Iterator[Any]:
        """Yield this host's items."""
        waiting: list[Any] = []
        for item in self.data:
            waiting.append(item)
            if len(waiting) == self.whole:
                yield from waiting[self.share]
                waiting.clear()


class CountedStream(IterableDataset[Any]):
    """An iterable dataset that passes items on unchanged, and names the place of one that raises.

    Args:
        data: the iterable to wrap.
        split: named in the error; None where it is no split of a workload.
        exact: ask for as many items as its length says; a split is evaluated whole, or not at all.
    """

    def __init__(self, data: Any, *, split: str | None = "train", exact: bool = False) -> None:
        self.data = data
        self.split = split
        self.exact = exact

    def __iter__(self) -> Iterator[Any]:
        """Yield the items.

        Raises:
            DataError: the wrapped dataset raised; its error is the cause. Or it is asked for the exact number of items, and has
                another.
        """
        place, more = 0, False
        try:
            for item in self.data:
                more = self.exact and place == len(self.data)
                if more:
                    break
                yield item
                place += 1
        except Exception as error:
            raise DataError(
                f"item {place} of {_named(self.split, self.data, ', in its own order')} raised {type(error).__name__}: {error}. "
                f"Look at it alone: iterate over {_variable(self.split)}."
            ) from error
        if self.exact and (more or place < len(self.data)):
            raise DataError(
                f"the {self.split} split ({type(self.data).__name__}, in its own order) yields {'more than ' * more}{place} examples, "
                f"though its length is {len(self.data)}. An iterable dataset must yield as many examples as its __len__ says, each "
                "once: a metric over another number is a metric of other data."
            )


def item_error(error: DataError) -> DataError:
    """Return an error that a worker process sent without what the loader wrapped it in: our sentence alone."""
    return DataError(str(error).rsplit(f"{DataError.__module__}.{DataError.__qualname__}: ", 1)[-1].strip())
