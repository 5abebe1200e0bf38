"""How variables are split: the tutorial's values, and what each partitioner promises, by brute force."""

from __future__ import annotations

import itertools
import math
import pickle
from typing import Any

import pytest
import torch

from workbench.errors import UsageError
from workbench.parameter_server.servers.layout import (
    FixedShardsPartitioner,
    MaxSizePartitioner,
    MinSizePartitioner,
    Partitioner,
    split_rows,
)

F32 = torch.float32
SHAPES = [*itertools.product(range(1, 14), (1, 3)), *((rows,) for rows in range(1, 14))]


@pytest.mark.parametrize(
    ("partitioner", "shape", "expected"),
    [
        (FixedShardsPartitioner(2), (10, 3), [2, 1]),
        (FixedShardsPartitioner(num_shards=4), (3,), [3]),
        (MinSizePartitioner(min_shard_bytes=4, max_shards=2), (6, 1), [2, 1]),
        (MinSizePartitioner(min_shard_bytes=4, max_shards=10), (6, 1), [6, 1]),
        (MinSizePartitioner(max_shards=8), (131072,), [2]),  # 256 KiB each
        (MinSizePartitioner(max_shards=8), (131073,), [3]),
        (MinSizePartitioner(max_shards=8), (65536,), [1]),
        (MinSizePartitioner(), (131072,), [1]),
        (MinSizePartitioner(1, 2), (5, 0), [1, 1]),
        (MaxSizePartitioner(max_shard_bytes=4), (6, 1), [6, 1]),
        (MaxSizePartitioner(max_shard_bytes=4, max_shards=2), (6, 1), [2, 1]),
        (MaxSizePartitioner(max_shard_bytes=1024), (6, 1), [1, 1]),
        (MaxSizePartitioner(1), (5, 0), [1, 1]),
        *((p, shape, shards)
          for p in (FixedShardsPartitioner(2), MinSizePartitioner(1, 2), MaxSizePartitioner(1))
          for shape, shards in (((0, 3), [1, 1]), ((1, 20), [1, 1]), ((1,), [1]), ((), []))),  # T3.4
    ],
)  # fmt: skip
def test_the_values_of_the_tutorial(partitioner: Partitioner, shape: tuple[int, ...], expected: list[int]) -> None:
    """Behaviour 69."""
    assert partitioner(shape, F32) == expected
    assert partitioner(torch.Size(shape), F32) == expected
    assert pickle.loads(pickle.dumps(partitioner)) == partitioner
    assert len(split_rows(partitioner, shape, F32)) == (expected or [1])[0]


@pytest.mark.parametrize("value", [0, 1.5, True])
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
    with pytest.raises(ValueError, match=rf"{name}={value!r} must be an integer of at least 1"):
        make(value)


def shard_bytes(shape: tuple[int, ...], shards: int, itemsize: int) -> list[int]:
    """Rows dealt out one by one to the shards in turn, which is what "the first take the remainder" means."""
    rows = [0] * shards
    for row in range(shape[0]):
        rows[row % shards] += 1
    return [itemsize * count * math.prod(shape[1:]) for count in rows]


@pytest.mark.parametrize("dtype", [F32, torch.float64])
@pytest.mark.parametrize("limit", [1, 4, 9, 12, 24, 30, 1000])
@pytest.mark.parametrize("most", [1, 3, 20])
def test_a_shard_for_each_limit_begun_and_none_that_is_larger(limit: int, most: int, dtype: torch.dtype) -> None:
    """Behaviour 69: as many shards as the limit is begun, at most one a row; or as few as possible with at most that much in each."""
    for shape in SHAPES:
        bytes_of = {n: shard_bytes(shape, n, dtype.itemsize) for n in range(1, shape[0] + 1)}
        begun = len(range(0, sum(bytes_of[1]), limit))
        most_fit = max(n for n in bytes_of if n == 1 or n <= min(most, begun))
        assert MinSizePartitioner(limit, most)(shape, dtype) == [most_fit, *(1 for _ in shape[1:])]
        fewest_fit = min((n for n in bytes_of if max(bytes_of[n]) <= limit), default=shape[0])
        assert MaxSizePartitioner(limit, most)(shape, dtype)[0] == min(fewest_fit, most)
        assert MaxSizePartitioner(limit)(shape, dtype)[0] == fewest_fit


@pytest.mark.parametrize(
    "returned",
    [None, [], (), [0, 1], [1, 0], [2, 2], [1, 2], [-1, 1], [2.0, 1], [True, 1], 2, "21", torch.tensor([2, 1])],
)
def test_what_a_partitioner_may_not_return(returned: Any) -> None:
    """Behaviour 71."""
    with pytest.raises(UsageError, match=r"variable_partitioner returned .* of shape \(8, 20\).*\[2, 1\]"):
        split_rows(lambda shape, dtype: returned, (8, 20), F32)
