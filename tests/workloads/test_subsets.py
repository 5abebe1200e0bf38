"""Named parts of a dataset: the split that is the same everywhere, a validation subset and back (P2.3), samples (P3.1)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Subset, TensorDataset

from tests.helpers.datasets import Items, Stream
from tests.helpers.workloads import small_workload
from workbench.errors import DataError, UsageError
from workbench.workloads.subsets import (
    draw_sample,
    example_ids,
    periodic_subset,
    sample_id,
    stratified_split,
    subset_of,
    whole,
)


@pytest.mark.parametrize("kind", ["tensors", "items"])
def test_a_subset_holds_the_items_it_names(kind: str) -> None:
    data = (Items if kind == "items" else TensorDataset)(torch.arange(39.0).view(13, 3), torch.arange(13.0))
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


@pytest.mark.parametrize("examples", [0, -3, True, "a", "64", 1.5, ["a"], [0, 1.5], [True], None])
def test_what_is_no_number_and_no_list_of_indices_is_refused(examples: Any) -> None:
    with pytest.raises(UsageError, match=r"examples(=|\[)"):
        periodic_subset(small_workload(), examples)


@pytest.mark.parametrize("examples", [14, [], [13], [-1], [1, 1]])
def test_what_the_split_does_not_have_is_refused(examples: Any) -> None:
    with pytest.raises(UsageError, match=r"examples.*(1 to 13|0 to 12)"):
        periodic_subset(small_workload(), examples)


LABELS = np.repeat([0, 1, 2], [140, 55, 5])
DATA = TensorDataset(torch.arange(200.0))


def test_a_random_sample_is_a_subset_that_its_indices_name() -> None:
    sample = draw_sample(DATA, 50, seed=3)
    assert isinstance(sample, Subset)
    assert len(sample) == len(set(sample.indices)) == 50
    assert list(sample.indices) == sorted(sample.indices)
    assert sample.indices == draw_sample(DATA, 50, seed=3).indices != draw_sample(DATA, 50, seed=4).indices
    assert sample_id(sample.indices) == sample_id(sample.indices[::-1]) != sample_id(sample.indices[1:])
    assert len(sample_id(sample.indices)) == 12
    assert sample[0][0] == sample.indices[0]


@pytest.mark.parametrize("size", [1, 2, 3, 20, 77, 199, 200])
@pytest.mark.parametrize("seed", range(3))
def test_a_stratified_sample_has_every_class_in_its_share(size: int, seed: int) -> None:
    sample = draw_sample(DATA, size, how="stratified", labels=LABELS, seed=seed)
    counts = np.bincount(LABELS[sample.indices], minlength=3)
    exact = np.bincount(LABELS) * size / 200
    assert counts.sum() == size == len(set(sample.indices))
    assert (np.abs(counts - exact) < 1 + (size < 40)).all()
    if size >= 3:
        assert counts.min() >= 1


def test_other_bad_input_is_explained() -> None:
    with pytest.raises(UsageError, match=r"how='stratify' is not a way to draw a sample. Did you mean 'stratified'"):
        draw_sample(DATA, 5, how="stratify")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="needs labels"):
        draw_sample(DATA, 5, how="stratified")
    with pytest.raises(DataError, match=r"labels have shape \(3,\), but the full set has 200"):
        draw_sample(DATA, 5, how="stratified", labels=[0, 1, 2])
    with pytest.raises(DataError, match="Stream has no index to draw a sample by"):
        draw_sample(Stream(torch.zeros(5)), 2)


@pytest.mark.parametrize("seed", [0, 1])
def test_parts_cover_everything_once_with_equal_shares(seed: int) -> None:
    labels = np.repeat([0, 1, 2], [100, 40, 20])
    train, validation, test = stratified_split(labels, validation=0.2, test=0.1, seed=seed)
    assert sorted([*train, *validation, *test]) == list(range(160))
    assert np.bincount(labels[validation]).tolist() == [20, 8, 4]
    assert np.bincount(labels[test]).tolist() == [10, 4, 2]


def test_a_subset_of_a_subset_is_one_of_the_whole_and_training_data_stay() -> None:
    workload = small_workload()
    part = periodic_subset(periodic_subset(workload, [0, 1]), [12])
    assert list(example_ids(part.validation_data)) == [12]
    assert part.train_data is workload.train_data
    assert list(example_ids(workload.validation_data)) == list(range(13))
    assert whole(workload) is workload
