"""Shares of shuffled data overlap, shuffled shares do not (T4.5)."""

from __future__ import annotations

import itertools

import pytest
import torch

from workbench.errors import UsageError
from workbench.parameter_server.data.datasets import InputContext
from workbench.parameter_server.data.visits import count_visits, endless_batches, shard_then_shuffle, shuffle_then_shard

IDS = range(10)


def test_shuffling_before_sharding_reads_some_examples_twice_and_others_never() -> None:
    visits = [count_visits(shuffle_then_shard(IDS), 3) for _ in range(20)]
    assert all(sum(each.values()) == 10 for each in visits)  # as many examples as there are, but not the same ones
    # three workers of one epoch share by luck in less than one case of 100
    assert sum(any(count != 1 for count in each.values()) for each in visits) >= 18


@pytest.mark.parametrize("workers", [1, 2, 3, 10, 13])
def test_sharding_before_shuffling_reads_each_example_once(workers: int) -> None:
    assert count_visits(shard_then_shuffle(IDS), workers) == dict.fromkeys(IDS, 1)


def test_a_common_seed_makes_the_first_order_right_too() -> None:
    assert count_visits(shuffle_then_shard(IDS, seed=7), 3) == dict.fromkeys(IDS, 1)


def test_it_does_shuffle() -> None:
    orders = {tuple(shard_then_shuffle(IDS)(InputContext(2, 0))) for _ in range(10)}
    assert len(orders) > 1
    assert {frozenset(order) for order in orders} == {frozenset(range(0, 10, 2))}


def test_batches_and_endless_datasets_of_your_own_are_counted() -> None:
    def batches(context: InputContext) -> list[torch.Tensor]:
        return list(torch.arange(12)[context.input_pipeline_id :: context.num_input_pipelines].split(2))

    assert count_visits(batches, 3) == dict.fromkeys(range(12), 1)
    assert count_visits(lambda _: itertools.cycle([(0, 1), (2, 3)]), 2, take=3) == {0: 4, 1: 4, 2: 2, 3: 2}


def test_random_batches_of_endless_data_count_some_examples_twice_and_others_never() -> None:
    """T8.5: 16 examples, two steps of 8 on two workers."""
    visits = [count_visits(endless_batches(range(16), 8), 2, take=1) for _ in range(20)]
    assert all(sum(each.values()) == 16 for each in visits)
    assert sum(set(each.values()) != {1} for each in visits) >= 19  # two halves fit by luck once in 12,870
    assert set(count_visits(endless_batches(range(16), 8), 1, take=4).values()) == {2}  # one worker alone goes round


@pytest.mark.parametrize("workers", [0, True, 1.5])
def test_workers_are_counted_from_one(workers: int) -> None:
    with pytest.raises(UsageError, match="num_workers="):
        count_visits(shard_then_shuffle(IDS), workers)
