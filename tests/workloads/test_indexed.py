from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from workbench.errors import DataError
from workbench.workloads.items import IndexedDataset


class Broken(Dataset[int]):
    """Ten items, of which number 7 raises."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        if index == 7:
            raise KeyError("no such image")
        if not -10 <= index < 10:
            raise IndexError(index)
        return index


class BrokenBatches(Broken):
    """The same, and takes a whole batch at once."""

    def __getitems__(self, indices: Sequence[int]) -> list[int]:
        return [self[index] for index in indices]


class OnlyTogether(Broken):
    """Every batch raises, no item does."""

    def __getitem__(self, index: int) -> int:
        return index

    def __getitems__(self, indices: Sequence[int]) -> list[int]:
        raise ValueError("cannot stack")


def test_items_pass_unchanged() -> None:
    data = TensorDataset(torch.arange(6), torch.arange(6) * 2)
    wrapped = IndexedDataset(data)
    assert len(wrapped) == 6
    assert wrapped[3] == data[3]
    assert wrapped[-1] == data[5]
    assert wrapped.__getitems__([1, 4]) == [data[1], data[4]]
    assert IndexedDataset(Subset(data, [5, 0])).__getitems__([1, 0]) == [data[0], data[5]]


def test_a_batch_is_fetched_in_one_call() -> None:
    calls: list[Sequence[int]] = []

    class Batched(Broken):
        def __getitems__(self, indices: Sequence[int]) -> list[int]:
            calls.append(indices)
            return list(indices)

    loader: DataLoader[Any] = DataLoader(IndexedDataset(Batched()), batch_size=5)
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert calls == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


def test_the_item_that_raises_is_named() -> None:
    with pytest.raises(
        DataError, match=r"item 7 of the validation split \(Broken, 10 examples\).*no such image"
    ) as caught:
        IndexedDataset(Broken(), split="validation")[7]
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("data", [Broken(), BrokenBatches(), Subset(Broken(), range(10))])
def test_a_loader_says_which_item_it_was(data: Any) -> None:
    loader: DataLoader[Any] = DataLoader(IndexedDataset(data), batch_size=4)
    with pytest.raises(DataError, match="item 7 of the train split"):
        list(loader)


def test_a_worker_process_says_which_item_it_was() -> None:
    loader: DataLoader[Any] = DataLoader(IndexedDataset(Broken()), batch_size=4, num_workers=1)
    batches: Any = iter(loader)
    try:
        assert next(batches).tolist() == [0, 1, 2, 3]
        with pytest.raises(DataError, match="item 7 of the train split"):
            next(batches)
    finally:
        batches._shutdown_workers()  # the traceback would keep the worker until it is collected


def test_a_batch_that_only_raises_together_is_named() -> None:
    with pytest.raises(DataError, match=r"items \[1, 2\].*cannot stack, together but not one by one"):
        IndexedDataset(OnlyTogether()).__getitems__([1, 2])


def test_past_the_end_is_an_index_error_as_ever() -> None:
    with pytest.raises(IndexError):
        IndexedDataset(Broken())[10]
    assert list(IndexedDataset([1, 2])) == [1, 2]


def test_an_index_error_inside_is_an_item_that_raised() -> None:
    class Short(Broken):
        def __getitem__(self, index: int) -> int:
            return [0, 1][index]

    with pytest.raises(DataError, match=r"item 5 of the train split.*IndexError"):
        IndexedDataset(Short())[5]
