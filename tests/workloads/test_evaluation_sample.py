"""Drawing a sample: sizes, shares, names, and what cannot be drawn."""

from __future__ import annotations

import hashlib
import struct
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, Subset, TensorDataset

from tests.helpers.workloads import small_workload
from workbench.errors import DataError, UsageError
from workbench.workloads.subsets import draw_sample, sample_id, sampled_workload

LABELS = np.repeat([0, 1, 2], [140, 55, 5])
DATA = TensorDataset(torch.arange(200.0))


class Stream(IterableDataset[Any]):
    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Any:
        return iter(range(5))


def test_a_random_sample_is_a_subset_with_a_name() -> None:
    sample = draw_sample(DATA, 50, seed=3)
    assert isinstance(sample.data, Subset)
    assert (sample.size, len(sample.data), len(set(sample.indices))) == (50, 50, 50)
    assert sample.indices == sorted(sample.indices)
    assert sample.id == sample.data.sample_id == sample_id(sample.indices[::-1])  # type: ignore[attr-defined]
    assert sample.id == draw_sample(DATA, 50, seed=3).id != draw_sample(DATA, 50, seed=4).id
    assert len(sample.id) == 12
    assert sample.id in repr(sample)
    assert sample.data[0][0] == sample.indices[0]


def test_the_name_is_the_same_on_every_machine() -> None:
    assert sample_id([3, 1, 2]) == sample_id([1, 2, 3]) == hashlib.sha256(struct.pack("<3q", 1, 2, 3)).hexdigest()[:12]


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


def test_every_example_is_as_likely_as_any_other() -> None:
    drawn = np.concatenate([draw_sample(DATA, 50, seed=s).indices for s in range(400)])
    counts = np.bincount(drawn, minlength=200)
    assert counts.mean() == 100
    assert counts.std() == pytest.approx(np.sqrt(400 * 0.25 * 0.75), rel=0.2)


def test_a_workload_that_evaluates_on_the_sample() -> None:
    workload = small_workload()
    sample = draw_sample(workload.validation_data, 5)
    assert len(sampled_workload(workload, sample).validation_data) == 5
    assert len(workload.validation_data) == 13


@pytest.mark.parametrize("size", [0, -1, 201, 1.5, True])
def test_a_size_out_of_range(size: Any) -> None:
    with pytest.raises(UsageError, match=r"must be an integer from 1 to 200, the examples of the full set"):
        draw_sample(DATA, size)


def test_other_bad_input_is_explained() -> None:
    with pytest.raises(UsageError, match=r"how='stratify' is no way to draw a sample. Did you mean 'stratified'"):
        draw_sample(DATA, 5, how="stratify")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="needs labels"):
        draw_sample(DATA, 5, how="stratified")
    with pytest.raises(DataError, match=r"labels have shape \(3,\), but the full set has 200"):
        draw_sample(DATA, 5, how="stratified", labels=[0, 1, 2])
    with pytest.raises(DataError, match="Stream has no index to draw a sample by"):
        draw_sample(Stream(), 2)
