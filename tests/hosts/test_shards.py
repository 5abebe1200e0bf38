"""A split shared out over hosts: one metric for any number of them, each example once (P2.11)."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from torch.utils.data import IterableDataset

from tests.helpers.workloads import small_net
from tests.train.test_evaluation import EXAMPLES, workload_of
from workbench.errors import DataError, UsageError
from workbench.train.distributed.data_parallel import PartialSum, evaluate_shard, join_shards
from workbench.train.evaluation import evaluate


@pytest.mark.parametrize(
    ("hosts", "batch_size"), [*itertools.product((1, 2, 4), (1, 10, 103, 128)), (103, 10), (110, 10)]
)
def test_one_metric_for_any_number_of_hosts_and_any_batch_size(hosts: int, batch_size: int) -> None:
    workload, model = workload_of(), small_net().double()
    whole = evaluate(workload, model, batch_size=EXAMPLES)
    parts = [evaluate_shard(workload, model, shard, hosts, batch_size=batch_size) for shard in range(hosts)]
    for one, joined in zip(whole, join_shards(parts), strict=True):
        assert joined.value == pytest.approx(one.value, rel=1e-13)
        assert (joined.metric, joined.num_examples, joined.num_correct) == (one.metric, EXAMPLES, one.num_correct)
    assert sum(part[0].num_examples for part in parts if part) == EXAMPLES


def test_weights_are_summed_and_the_mean_of_host_means_would_differ() -> None:
    workload = workload_of(weights=lambda batch: batch[1].abs() * (batch[1] > 0))
    model = small_net().double()
    (whole, _) = evaluate(workload, model, batch_size=16)
    parts = [evaluate_shard(workload, model, shard, 4, batch_size=16) for shard in range(4)]
    (joined, _) = join_shards(parts)
    assert joined.value == pytest.approx(whole.value, rel=1e-12)
    assert joined.num_examples == whole.num_examples < EXAMPLES
    naive = np.mean([part[0].total / part[0].weight for part in parts])
    assert abs(naive - whole.value) > 1e-3 * whole.value


def test_what_cannot_be_shared_out_is_refused() -> None:
    class Stream(IterableDataset[Any]):
        def __len__(self) -> int:
            return 3

        def __iter__(self) -> Any:
            return iter([])

    model = small_net().double()
    with pytest.raises(UsageError, match="shard=2 must be 0 to 1"):
        evaluate_shard(workload_of(), model, 2, 2, batch_size=4)
    with pytest.raises(UsageError, match="no example"):
        join_shards([[], []])
    with pytest.raises(UsageError, match="no example with a weight above 0"):
        join_shards([[PartialSum("loss", 0.0, 0.0, 0, None, 0.1)], []])
    streamed = workload_of().replace(validation_data=Stream())
    with pytest.raises(DataError, match="iterable only"):
        evaluate_shard(streamed, model, 0, 2, batch_size=4)
