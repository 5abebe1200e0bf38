"""Named parts of the validation split, and the way back to the whole (P2.3)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from tests.helpers.workloads import small_workload
from workbench.errors import UsageError
from workbench.workloads.subsets import example_ids, periodic_subset, subset_of, whole


class Items(Dataset[Any]):
    def __init__(self, count: int) -> None:
        self.x, self.y = torch.arange(3.0 * count).view(count, 3), torch.arange(float(count))

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.y[index]


@pytest.mark.parametrize("kind", ["tensors", "items"])
def test_a_subset_holds_the_items_it_names(kind: str) -> None:
    data = Items(13) if kind == "items" else TensorDataset(Items(13).x, Items(13).y)
    part = periodic_subset(small_workload(validation_data=data), [9, 2, 12])
    assert [float(part.validation_data[i][1]) for i in range(3)] == [9, 2, 12]
    assert list(example_ids(part.validation_data)) == [9, 2, 12]
    assert whole(part).validation_data is data
    assert isinstance(part.validation_data, TensorDataset) == (kind == "tensors")


def test_a_draw_is_random_without_replacement_and_named_by_size_and_seed() -> None:
    workload = small_workload()
    one, again, other = (periodic_subset(workload, 5, seed=seed) for seed in (0, 0, 1))
    parts = [subset_of(w.validation_data) for w in (one, again, other)]
    assert all(part is not None and len(set(part.indices)) == 5 for part in parts)
    assert parts[0].indices == parts[1].indices != parts[2].indices  # type: ignore[union-attr]
    assert [part.id for part in parts if part] == ["random-5-seed0", "random-5-seed0", "random-5-seed1"]
    described = parts[0].describe()  # type: ignore[union-attr]
    assert (described["size"], described["of"], len(described["crc32"])) == (5, 13, 8)


def test_chosen_indices_are_named_by_their_checksum_or_as_asked() -> None:
    ids = [subset_of(periodic_subset(small_workload(), chosen).validation_data) for chosen in ([1, 2], [2, 1], [1, 2])]
    assert ids[0].id == ids[2].id != ids[1].id  # type: ignore[union-attr]
    named = subset_of(periodic_subset(small_workload(), [1], id="mine").validation_data)
    assert named is not None
    assert named.id == "mine"


def test_a_subset_of_a_subset_is_one_of_the_whole_and_training_data_stay() -> None:
    workload = small_workload()
    part = periodic_subset(periodic_subset(workload, [0, 1]), [12])
    assert list(example_ids(part.validation_data)) == [12]
    assert part.train_data is workload.train_data
    assert list(example_ids(workload.validation_data)) == list(range(13))
    assert whole(workload) is workload


@pytest.mark.parametrize("examples", [0, -3, True, "a", "64", 1.5, ["a"], [0, 1.5], [True], None])
def test_what_is_no_number_and_no_list_of_indices_is_refused(examples: Any) -> None:
    with pytest.raises(UsageError, match=r"examples(=|\[)"):
        periodic_subset(small_workload(), examples)


@pytest.mark.parametrize("examples", [14, [], [13], [-1], [1, 1]])
def test_what_the_split_does_not_have_is_refused(examples: Any) -> None:
    with pytest.raises(UsageError, match=r"examples.*(1 to 13|0 to 12)"):
        periodic_subset(small_workload(), examples)
