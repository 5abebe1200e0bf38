"""What a dataset function is told, and which ones are refused before they travel."""

from __future__ import annotations

import operator
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from workbench.errors import UsageError
from workbench.parameter_server.data.datasets import DatasetCreator, InputContext

DATA = TensorDataset(torch.arange(6.0))


def test_the_batch_of_a_replica() -> None:
    """T4.3, T4.5: a global batch of 64."""
    assert InputContext().get_per_replica_batch_size(64) == 64
    context = InputContext(num_input_pipelines=3, input_pipeline_id=2, num_replicas_in_sync=4)
    assert context.get_per_replica_batch_size(64) == 16
    assert pickle.loads(pickle.dumps(context)) == context


@pytest.mark.parametrize(("batch", "advice"), [(64, "Give 63 or 66"), (2, "Give 3 or 3")])
def test_a_batch_that_cannot_be_shared_out(batch: int, advice: str) -> None:
    """T4.3."""
    context = InputContext(num_replicas_in_sync=3)
    with pytest.raises(
        UsageError, match=rf"global_batch_size={batch} must be a multiple of num_replicas_in_sync=3. {advice}"
    ):
        context.get_per_replica_batch_size(batch)


@pytest.mark.parametrize("batch", [0, -64, 64.0, True, "64"])
def test_a_batch_is_a_number(batch: Any) -> None:
    with pytest.raises(UsageError, match="global_batch_size=.*must be an integer of at least 1"):
        InputContext().get_per_replica_batch_size(batch)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_input_pipelines": 0}, "num_input_pipelines=0 must be an integer of at least 1"),
        ({"input_pipeline_id": -1}, "input_pipeline_id=-1 must be an integer of at least 0"),
        ({"num_replicas_in_sync": 1.0}, "num_replicas_in_sync=1.0 must be an integer"),
        ({"num_input_pipelines": 3, "input_pipeline_id": 3}, "input_pipeline_id=3 must be below num_input_pipelines=3"),
    ],
)
def test_what_is_no_context(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        InputContext(**fields)


def test_each_worker_makes_its_own() -> None:
    """T4.3, T4.6: the function is called with the worker's context, once a call."""
    seen: list[InputContext] = []

    def dataset_fn(context: InputContext) -> Any:
        seen.append(context)
        return DataLoader(DATA, batch_size=context.get_per_replica_batch_size(2))

    creator = DatasetCreator(dataset_fn)
    assert seen == []
    contexts = [InputContext(3, index) for index in range(3)]
    assert [len(list(creator(context))) for context in contexts] == [3, 3, 3]
    assert seen == contexts


@pytest.mark.parametrize("given", [{"pin_memory": False}, {}, False, 2])
def test_input_options_are_refused_and_not_ignored(given: Any) -> None:
    """T4.3: whoever comes with TensorFlow's is told where prefetching, batch size and device belong here."""
    message = "input_options=.* would change nothing.*Allowed: None.*prefetch_factor=.*get_per_replica_batch_size"
    with pytest.raises(UsageError, match=message):
        DatasetCreator(lambda context: DATA, input_options=given)
    assert DatasetCreator(lambda context: DATA, input_options=None).input_options is None


@pytest.mark.parametrize("given", [DATA, DataLoader(DATA), None, [1, 2], "dataset_fn"])
def test_a_dataset_is_no_function(given: Any) -> None:
    """T4.3."""
    with pytest.raises(
        UsageError, match=r"must be a function that takes an InputContext.*Give `lambda context: dataset`"
    ):
        DatasetCreator(given)


@pytest.mark.parametrize("given", [lambda: DATA, lambda context, batch: DATA, lambda *, context: DATA])
def test_a_function_takes_the_context_alone(given: Any) -> None:
    """T4.3."""
    with pytest.raises(UsageError, match="dataset_fn takes .*called with one argument, the InputContext"):
        DatasetCreator(given)


def made(batch: int, context: InputContext, more: int = 0) -> Any:
    return [batch, context.input_pipeline_id, more]


@pytest.mark.parametrize("given", [partial(made, 4), lambda *contexts: [4, 0, 0], operator.itemgetter(0), dict])
def test_whatever_takes_one_argument_will_do(given: Any) -> None:
    assert DatasetCreator(given).dataset_fn is given


def test_a_function_of_an_importable_module_travels() -> None:
    creator = DatasetCreator(partial(made, 4))
    assert pickle.loads(pickle.dumps(creator))(InputContext(2, 1)) == [4, 1, 0]


@pytest.mark.parametrize("returned", [None, 3])
def test_a_missing_return_is_noticed(returned: Any) -> None:
    with pytest.raises(UsageError, match=rf"dataset_fn returned {returned}, and has to return.*Is the return missing"):
        DatasetCreator(lambda context: returned)(InputContext())
    assert DatasetCreator(lambda context: DATA)(InputContext()) is DATA  # map-style: no __iter__
