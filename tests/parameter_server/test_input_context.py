"""What a dataset function is told, and which ones are refused before they travel (T4.3, T4.5)."""

from __future__ import annotations

import operator
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.workloads import small_workload
from workbench.errors import UsageError
from workbench.parameter_server.data.datasets import DatasetCreator, InputContext
from workbench.parameter_server.training.strategy_model import StrategyModel

DATA = TensorDataset(torch.arange(6.0))


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
        creator = DatasetCreator(lambda _, returned=returned: returned)
        with pytest.raises(
            UsageError, match=rf"dataset function returned {returned}; it has to.*Is the return missing"
        ):
            StrategyModel(small_workload()).fit(creator, steps_per_epoch=1, verbose=0)
    assert DatasetCreator(lambda context: DATA)(InputContext()) is DATA  # map-style: no __iter__
