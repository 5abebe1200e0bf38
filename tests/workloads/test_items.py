"""Datasets and their items: named where one raises, stored bit for bit, delayed, hashed; parts of a dataset under a name."""

from __future__ import annotations

import pickle
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from workbench.errors import ConfigError, DataError, UsageError
from workbench.workloads.items import (
    Delayed,
    HostShare,
    IndexedDataset,
    StoredDataset,
    cache_dataset,
    content_hash,
)


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


class OnlyTogether(Broken):
    """Every batch raises, no item does."""

    def __getitem__(self, index: int) -> int:
        return index

    def __getitems__(self, indices: Sequence[int]) -> list[int]:
        raise ValueError("cannot stack")


def test_the_item_that_raises_is_named() -> None:
    with pytest.raises(
        DataError, match=r"item 7 of the validation split \(Broken, 10 examples\).*no such image"
    ) as caught:
        IndexedDataset(Broken(), split="validation")[7]
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_batch_that_only_raises_together_is_named() -> None:
    with pytest.raises(DataError, match=r"items \[1, 2\].*cannot stack, together but not one by one"):
        IndexedDataset(OnlyTogether()).__getitems__([1, 2])


class Listed:
    """A dataset of these items."""

    def __init__(self, *items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


def nested(k: int) -> Any:
    return {
        "x": torch.arange(6, dtype=torch.float32).view(2, 3) + k,
        "half": torch.full((2,), float(k), dtype=torch.bfloat16),
        "meta": [np.float32(k) * np.ones(3, dtype=np.float32), (k, k / 2, k % 2 == 0)],
        "scalar": torch.tensor(k),
    }


def test_items_come_back_bit_for_bit(tmp_path: Path) -> None:
    data = Listed(*(nested(k) for k in range(5)))
    stored = cache_dataset(data, tmp_path / "s")
    assert len(stored) == 5
    for k in range(5):
        assert content_hash(stored[k]) == content_hash(data[k])
    assert content_hash(stored.__getitems__([3, 1])) == content_hash([data[3], data[1]])
    assert type(stored[1]["meta"][1][2]) is bool
    again = pickle.loads(pickle.dumps(stored))
    assert content_hash(again[4]) == content_hash(data[4])
    assert isinstance(cache_dataset(data, tmp_path / "s"), StoredDataset), "what is there is read"


class Random(Listed):
    def __getitem__(self, index: int) -> Any:
        return torch.randn(3)


@pytest.mark.parametrize(
    ("data", "kind", "words"),
    [
        (Random(1, 2), DataError, "item 0 differs from one reading to the next"),
        (Listed(torch.zeros(2), torch.zeros(3)), DataError, "item 1 holds"),
        (Listed({"x": torch.zeros(2), "file": "a.png"}), DataError, "'file' of item 0 is str"),
        (Listed(), DataError, "empty"),
        (iter([1]), UsageError, "__len__ and __getitem__"),
    ],
)
def test_what_cannot_be_stored_is_refused_and_leaves_nothing(tmp_path: Path, data: Any, kind: type, words: str) -> None:
    with pytest.raises(kind, match=words):
        cache_dataset(data, tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_a_delayed_dataset_is_the_dataset_later() -> None:
    data = Delayed(Listed(5, 6), 0.02)
    start = time.perf_counter()
    assert [data[0], data[1], len(data)] == [5, 6, 2]
    assert time.perf_counter() - start >= 0.04
    with pytest.raises(ConfigError, match="latency_s=-1"):
        Delayed(Listed(1), -1)
    with pytest.raises(UsageError, match="must be a dataset"):
        Delayed(iter([1]), 0.1)


def test_hashes_tell_values_shapes_types_and_names_apart() -> None:
    x = torch.zeros(2, 3)
    one, others = {"x": x}, [{"y": x}, {"x": x.view(3, 2)}, {"x": x.int()}, {"x": -x}]
    assert len({content_hash(value) for value in [one, *others]}) == 5
    assert content_hash({"x": torch.zeros(2, 3)}) == content_hash(one)


def test_a_folder_of_another_dataset_is_refused_by_name(tmp_path: Path) -> None:
    rows = torch.arange(10.0).view(5, 2)
    cache_dataset(TensorDataset(rows), tmp_path / "s")
    assert len(cache_dataset(TensorDataset(rows.clone()), tmp_path / "s")) == 5
    for other, said in (
        (TensorDataset(rows + 1), "other items: item 0 of it is not that of this TensorDataset"),
        (TensorDataset(torch.cat([rows[:4], rows[4:] + 1])), "other items: item 4 "),
        (TensorDataset(rows.double()), "other items: item 0 "),
        (TensorDataset(rows[:3]), "5 items, not 3"),
    ):
        with pytest.raises(UsageError, match=f"holds {said}"):
            cache_dataset(other, tmp_path / "s")


def test_a_hosts_share_is_its_places_in_each_whole_micro_batch() -> None:
    assert list(HostShare(range(11), slice(2, 4), 4)) == [2, 3, 6, 7]
