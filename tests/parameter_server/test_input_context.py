"""What a dataset function is told, which ones are refused before they travel, and who reads what (T4.3, T4.5, T8.5)."""

from __future__ import annotations

import itertools
import operator
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from workbench.errors import UsageError
from workbench.parameter_server.data.datasets import (
    DatasetCreator,
    InputContext,
    count_visits,
    endless_batches,
    shard_then_shuffle,
    shuffle_then_shard,
)

DATA = TensorDataset(torch.arange(6.0))
IDS = range(10)


def test_the_batch_of_a_replica() -> None:
    """T4.3, T4.5: a global batch of 64."""
    assert InputContext().get_per_replica_batch_size(64) == 64
    context = InputContext(num_input_pipelines=3, input_pipeline_id=2, num_replicas_in_sync=4)
    assert context.get_per_replica_batch_size(64) == 16
    for batch, says in (
        (64, "must be a multiple of num_replicas_in_sync=3. Give 63 or 66"),
        (2, "Give 3 or 3"),
        (0, "must be an integer of at least 1"),
        (64.0, "must be an integer"),
    ):
        with pytest.raises(UsageError, match=rf"global_batch_size={batch} .*{says}|global_batch_size={batch} {says}"):
            InputContext(num_replicas_in_sync=3).get_per_replica_batch_size(batch)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_input_pipelines": 0}, "num_input_pipelines=0 must be an integer of at least 1"),
        ({"input_pipeline_id": -1}, "input_pipeline_id=-1 must be an integer of at least 0"),
        ({"num_replicas_in_sync": True}, "num_replicas_in_sync=True must be"),
        ({"num_input_pipelines": 2, "input_pipeline_id": 2}, "input_pipeline_id=2 must be below num_input_pipelines=2"),
    ],
)
def test_a_context_that_cannot_be(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        InputContext(**fields)


@pytest.mark.parametrize("given", [DATA, DataLoader(DATA), 3, lambda: DATA, lambda context, more: DATA])
def test_what_cannot_be_called_with_a_context(given: Any) -> None:
    with pytest.raises(UsageError, match="dataset_fn.*InputContext"):
        DatasetCreator(given)
    with pytest.raises(UsageError, match="input_options='x' would change nothing"):
        DatasetCreator(lambda context: DATA, "x")


def made(batch: int, context: InputContext, more: int = 0) -> Any:
    return [batch, context.input_pipeline_id, more]


@pytest.mark.parametrize("given", [partial(made, 4), lambda *contexts: [4, 0, 0], operator.itemgetter(0), dict])
def test_whatever_takes_one_argument_will_do(given: Any) -> None:
    assert DatasetCreator(given).dataset_fn is given


def test_it_travels_and_a_missing_return_is_noticed() -> None:
    assert pickle.loads(pickle.dumps(DatasetCreator(partial(made, 4))))(InputContext(2, 1)) == [4, 1, 0]
    for returned in (None, 3):
        with pytest.raises(
            UsageError, match=rf"dataset_fn returned {returned}, and has to return.*Is the return missing"
        ):
            DatasetCreator(lambda context, returned=returned: returned)(InputContext())
    assert DatasetCreator(lambda context: DATA)(InputContext()) is DATA  # map-style: no __iter__


def test_shuffling_before_sharding_reads_some_examples_twice_and_others_never() -> None:
    """T4.5; a common seed mends it."""
    visits = [count_visits(shuffle_then_shard(IDS), 3) for _ in range(20)]
    assert all(sum(each.values()) == 10 for each in visits)
    # three workers of one epoch share by luck in less than one case of 100
    assert sum(any(count != 1 for count in each.values()) for each in visits) >= 18
    assert count_visits(shuffle_then_shard(IDS, seed=7), 3) == dict.fromkeys(IDS, 1)


@pytest.mark.parametrize("workers", [1, 3, 13])
def test_sharding_before_shuffling_reads_each_example_once(workers: int) -> None:
    assert count_visits(shard_then_shuffle(IDS), workers) == dict.fromkeys(IDS, 1)
    orders = {tuple(shard_then_shuffle(IDS)(InputContext(2, 0))) for _ in range(10)}
    assert len(orders) > 1
    assert {frozenset(order) for order in orders} == {frozenset(range(0, 10, 2))}


def test_batches_and_endless_datasets_of_your_own_are_counted() -> None:
    def batches(context: InputContext) -> list[torch.Tensor]:
        return list(torch.arange(12)[context.input_pipeline_id :: context.num_input_pipelines].split(2))

    assert count_visits(batches, 3) == dict.fromkeys(range(12), 1)
    assert count_visits(lambda _: itertools.cycle([(0, 1), (2, 3)]), 2, take=3) == {0: 4, 1: 4, 2: 2, 3: 2}
    with pytest.raises(UsageError, match="num_workers="):
        count_visits(batches, 0)


def test_random_batches_of_endless_data_count_some_examples_twice_and_others_never() -> None:
    """T8.5: 16 examples, two steps of 8 on two workers."""
    visits = [count_visits(endless_batches(range(16), 8), 2, take=1) for _ in range(20)]
    assert all(sum(each.values()) == 16 for each in visits)
    assert sum(set(each.values()) != {1} for each in visits) >= 19  # two halves fit by luck once in 12,870
    assert set(count_visits(endless_batches(range(16), 8), 1, take=4).values()) == {2}  # one worker alone goes round
