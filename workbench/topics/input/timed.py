"""A loader's dataset and collate function that time themselves, in whatever process they run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from workbench.topics.input.clock import Spent, now
from workbench.workloads.items import CountedStream, IndexedDataset

__all__ = ["TimedBatch", "TimedCollate", "TimedDataset", "TimedStream"]


class _Fetched(NamedTuple):
    """An item, or all items of a batch, with where it lies in the dataset and when fetching it began."""

    value: Any
    index: Any
    began: Spent


class TimedBatch:
    """A batch with what it took to make it.

    Attributes:
        data: what the loader would have given.
        indices: of its examples in a map-style dataset; the places in the stream for an iterable one.
        items: spent on fetching the items.
        collate: spent on making one batch of them.
        worker: number of the process, -1 for the training process itself.
    """

    def __init__(self, data: Any, indices: Sequence[Any], items: Spent, collate: Spent, worker: int) -> None:
        self.data, self.indices, self.items, self.collate, self.worker = data, indices, items, collate, worker

    def pin_memory(self) -> TimedBatch:
        """Pin what the loader would have pinned."""
        data = torch.utils.data._utils.pin_memory.pin_memory(self.data)  # type: ignore[no-untyped-call]
        return TimedBatch(data, self.indices, self.items, self.collate, self.worker)


class _Passing:
    """Attributes of a wrapped dataset, for a `worker_init_fn` that reads or sets some."""

    _own = ("_inner", "_asked", "_collate")

    def __init__(self, data: Any, asked: Any) -> None:
        object.__setattr__(self, "_inner", data)
        object.__setattr__(self, "_asked", asked)

    def __getattr__(self, name: str) -> Any:
        if name in self._own or name.startswith("__"):  # while it is being unpickled
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._inner, name, value)

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


class TimedDataset(_Passing, Dataset[Any]):
    """A map-style dataset that says when fetching a batch began; an item that raises is named.

    Args:
        data: the dataset.
    """

    def __init__(self, data: Any) -> None:
        super().__init__(data, IndexedDataset(data, split=None))

    def __len__(self) -> int:
        return len(self._inner)

    def __getitem__(self, index: Any) -> Any:
        began = now()
        return _Fetched(self._asked[index], [index], began)

    def __getitems__(self, indices: Sequence[Any]) -> Any:
        began = now()
        return _Fetched(self._asked.__getitems__(indices), list(indices), began)


class TimedStream(_Passing, IterableDataset[Any]):
    """An iterable dataset that says when fetching a batch began; an item that raises is named.

    Args:
        data: the dataset.
        collate: says when a batch is done, in the same process.
    """

    def __init__(self, data: Any, collate: TimedCollate) -> None:
        super().__init__(data, CountedStream(data, split=None))
        object.__setattr__(self, "_collate", collate)

    def __iter__(self) -> Iterator[Any]:
        items = iter(self._asked)
        place, began = 0, now()
        while True:
            if self._collate.done:  # the clock costs too much to be asked for every item
                began, self._collate.done = now(), False
            try:
                value = next(items)
            except StopIteration:
                return
            yield _Fetched(value, place, began)
            place += 1


class TimedCollate:
    """A collate function that returns a `TimedBatch`.

    Attributes:
        done: a batch was made, and no item of the next one was asked for yet.

    Args:
        collate: the loader's own.
    """

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate, self.done = collate, True

    def __call__(self, fetched: Any) -> TimedBatch:
        """Collate what a timed dataset gave."""
        if isinstance(fetched, _Fetched):
            values, indices, began = fetched
        else:
            values, indices, began = [f.value for f in fetched], [f.index for f in fetched], fetched[0].began
        middle = now()
        data = self.collate(values)
        end = now()
        self.done = True
        info = get_worker_info()
        return TimedBatch(data, indices, middle.since(began), end.since(middle), -1 if info is None else int(info.id))
