"""How variables are split: the tutorial's values, and what each partitioner promises, by brute force."""

from __future__ import annotations

import itertools
import math
import pickle
from typing import Any

import pytest
import torch

from workbench.errors import UsageError
from workbench.parameter_server.servers.partitioners import (
    FixedShardsPartitioner,
    MaxSizePartitioner,
    MinSizePartitioner,
    Partitioner,
    num_shards,
    split_rows,
)

F32 = torch.float32


@pytest.mark.parametrize(
    ("partitioner", "shape", "expected"),
    [
        (FixedShardsPartitioner(2), (10, 3), [2, 1]),
        (FixedShardsPartitioner(num_shards=4), (3,), [3]),
        (MinSizePartitioner(min_shard_bytes=4, max_shards=2), (6, 1), [2, 1]),
        (MinSizePartitioner(min_shard_bytes=4, max_shards=10), (6, 1), [6, 1]),
        (MaxSizePartitioner(max_shard_bytes=4), (6, 1), [6, 1]),
        (MaxSizePartitioner(max_shard_bytes=4, max_shards=2), (6, 1), [2, 1]),
        (MaxSizePartitioner(max_shard_bytes=1024), (6, 1), [1, 1]),
    ],
)
def test_the_values_of_the_tutorial(partitioner: Partitioner, shape: tuple[int, ...], expected: list[int]) -> None:
    """Behaviour 69."""
    assert partitioner(shape, F32) == expected
    assert partitioner(torch.Size(shape), F32) == expected
    assert pickle.loads(pickle.dumps(partitioner)) == partitioner


def test_the_defaults() -> None:
    """Behaviour 69: 256 KiB and one shard."""
    assert MinSizePartitioner() == MinSizePartitioner(min_shard_bytes=262144, max_shards=1)
    assert MinSizePartitioner(max_shards=8)((131072,), F32) == [2]
    assert MinSizePartitioner(max_shards=8)((131071,), F32) == [1]
    assert MinSizePartitioner(max_shards=8)((131072,), torch.float64) == [4]
    assert MaxSizePartitioner(8).max_shards is None


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "2"])
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (FixedShardsPartitioner, "num_shards"),
        (lambda n: MinSizePartitioner(min_shard_bytes=n), "min_shard_bytes"),
        (lambda n: MinSizePartitioner(max_shards=n), "max_shards"),
        (MaxSizePartitioner, "max_shard_bytes"),
        (lambda n: MaxSizePartitioner(8, max_shards=n), "max_shards"),
    ],
)
def test_less_than_1_is_refused(make: Any, name: str, value: Any) -> None:
    """Behaviour 69."""
    with pytest.raises(ValueError, match=rf"{name}={value!r} of \w+Partitioner must be an integer of at least 1"):
        make(value)


SHAPES = [*itertools.product(range(1, 14), (1, 3)), *((rows,) for rows in range(1, 14))]


def shard_bytes(shape: tuple[int, ...], shards: int) -> list[int]:
    """Rows dealt out one by one to the shards in turn, which is what "the first take the remainder" means."""
    rows = [0] * shards
    for row in range(shape[0]):
        rows[row % shards] += 1
    return [4 * count * math.prod(shape[1:]) for count in rows]


@pytest.mark.parametrize("limit", [1, 4, 9, 12, 24, 30, 1000])
@pytest.mark.parametrize("most", [1, 3, 20])
def test_the_smallest_shard_has_the_least_size(limit: int, most: int) -> None:
    """Behaviour 69: as many shards as possible with at least that much in each."""
    for shape in SHAPES:
        found = MinSizePartitioner(limit, most)(shape, F32)
        fit = [n for n in range(1, min(most, shape[0]) + 1) if min(shard_bytes(shape, n)) >= limit]
        assert found == [max(fit, default=1), *(1 for _ in shape[1:])]


@pytest.mark.parametrize("limit", [1, 4, 9, 12, 24, 30, 1000])
@pytest.mark.parametrize("most", [1, 3, None])
def test_the_largest_shard_has_the_most_size(limit: int, most: int | None) -> None:
    """Behaviour 69: as few shards as possible with at most that much in each."""
    for shape in SHAPES:
        found = MaxSizePartitioner(limit, most)(shape, F32)
        fit = [n for n in range(1, shape[0] + 1) if max(shard_bytes(shape, n)) <= limit]
        assert found[0] == min(min(fit, default=shape[0]), most or shape[0])


@pytest.mark.parametrize("partitioner", [FixedShardsPartitioner(2), MinSizePartitioner(1, 2), MaxSizePartitioner(1)])
@pytest.mark.parametrize(("shape", "expected"), [((0, 3), [1, 1]), ((1, 20), [1, 1]), ((1,), [1]), ((), [])])
def test_what_cannot_be_split_stays_whole(
    partitioner: Partitioner, shape: tuple[int, ...], expected: list[int]
) -> None:
    """T3.4: a first axis of 1, such as that of a bias with one number."""
    assert partitioner(shape, F32) == expected
    assert num_shards(partitioner, shape, F32) == 1


def test_rows_without_bytes_are_not_split_by_size() -> None:
    assert MinSizePartitioner(1, 2)((5, 0), F32) == [1, 1]
    assert MaxSizePartitioner(1)((5, 0), F32) == [1, 1]


def test_the_partitioner_sees_shape_and_dtype() -> None:
    """T3.3."""
    seen: list[Any] = []

    def spy(shape: Any, dtype: torch.dtype) -> list[int]:
        seen.append((shape, dtype))
        return [2, 1]

    assert num_shards(spy, torch.Size([8, 20]), torch.float64) == 2
    assert seen == [((8, 20), torch.float64)]
    assert num_shards(spy, (), F32) == 1
    assert len(seen) == 1
    assert num_shards(None, (8, 20), F32) == 1


@pytest.mark.parametrize(
    "returned",
    [None, [], (), [0, 1], [1, 0], [2, 2], [1, 2], [-1, 1], [2.0, 1], [True, 1], 2, "21", torch.tensor([2, 1])],
)
def test_what_a_partitioner_may_not_return(returned: Any) -> None:
    """Behaviour 71."""
    with pytest.raises(
        UsageError, match=r"variable_partitioner returned .* of shape \(8, 20\).*\[2, 1\].*Return \[1, 1\]"
    ):
        num_shards(lambda shape, dtype: returned, (8, 20), F32)


@pytest.mark.parametrize(("returned", "expected"), [([2, 1], 2), ((8, 1), 8), ([9, 1], 8), ([2], 2), ([1, 1], 1)])
def test_never_more_shards_than_rows(returned: Any, expected: int) -> None:
    """Behaviour 70."""
    assert num_shards(lambda shape, dtype: returned, (8, 20), F32) == expected


@pytest.mark.parametrize(
    ("rows", "shards", "counts"),
    [(10, 4, [3, 3, 2, 2]), (13, 5, [3, 3, 3, 2, 2]), (8, 2, [4, 4]), (3, 4, [1, 1, 1]), (5, 1, [5]), (0, 3, [0])],
)
def test_the_first_shards_take_the_remainder(rows: int, shards: int, counts: list[int]) -> None:
    """Behaviour 70, T3.9."""
    assert [count for _, count in split_rows(rows, shards)] == counts


def test_shards_cover_the_rows_as_torch_splits_them() -> None:
    """Behaviour 70: `torch.tensor_split` deals out alike."""
    for rows, shards in itertools.product(range(1, 30), range(1, 12)):
        whole = torch.arange(rows)
        found = [whole[first : first + count].tolist() for first, count in split_rows(rows, shards)]
        assert found == [part.tolist() for part in torch.tensor_split(whole, shards) if len(part)]


@pytest.mark.parametrize(("rows", "shards"), [(-1, 2), (3, 0), (2.0, 1), (3, None), (True, 1)])
def test_no_such_split(rows: Any, shards: Any) -> None:
    with pytest.raises(UsageError, match="must be an integer of at least 0"):
        split_rows(rows, shards)
