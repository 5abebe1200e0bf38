import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from workbench.config import TrainConfig
from workbench.errors import UnknownNameError, WorkloadError
from workbench.workloads.base import Workload, first_of_batch, second_of_batch

DATA = TensorDataset(torch.zeros(4, 3), torch.zeros(4))


def make(**changes: Any) -> Workload:
    fields: dict[str, Any] = {
        "name": "mine",
        "build_model": lambda: nn.Linear(3, 1),
        "train_data": DATA,
        "validation_data": DATA,
        "loss": lambda outputs, batch: outputs.flatten() - batch[1],
        "config": TrainConfig(peak_lr=0.1, total_steps=10, batch_size=2),
    }
    return Workload(**{**fields, **changes})


class Untouchable:
    """A dataset whose items and length must not be asked for when a workload is made."""

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("an item was loaded")


def test_fields_are_those_of_the_contract() -> None:
    names = {field.name for field in dataclasses.fields(Workload)}
    assert names == {
        *("name", "build_model", "train_data", "validation_data", "test_data", "loss", "weights", "forward"),
        *("metrics", "collate", "num_workers", "minimised", "config", "source"),
    }


def test_positional_arguments_are_refused() -> None:
    with pytest.raises(TypeError):
        Workload("mine")  # type: ignore[call-arg, misc]


def test_data_and_model_are_not_touched() -> None:
    def explode() -> nn.Module:
        raise AssertionError("a model was built")

    make(train_data=Untouchable(), validation_data=Untouchable(), build_model=explode)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"name": " "}, "name="),
        ({"name": 3}, "name=3"),
        ({"build_model": None}, "build_model must be callable, not NoneType"),
        ({"build_model": nn.Linear(3, 1)}, r"build_model=lambda: Net\(\)"),
        ({"loss": "mse"}, r"loss must be callable, not str \(mse\)"),
        ({"forward": 1}, "forward must be callable"),
        ({"weights": [1.0]}, "weights must be callable"),
        ({"collate": "default"}, "collate must be callable"),
        ({"metrics": [len]}, "metrics must map names"),
        ({"metrics": {"accuracy": 0.5}}, "metric 'accuracy' must be callable"),
        ({"metrics": {"train/accuracy": len}}, "without '/'"),
        ({"metrics": {"loss": len}}, "not 'loss'"),
        ({"metrics": {1: len}}, "metric name 1"),
        ({"train_data": None}, "train_data must be a dataset"),
        ({"validation_data": None}, "validation_data must be a dataset"),
        ({"test_data": 5}, "test_data must be a dataset"),
        ({"train_data": DataLoader(DATA)}, "train_data is a DataLoader; give its dataset"),
        ({"config": {"peak_lr": 0.1}}, "config must be a TrainConfig, not dict"),
        ({"num_workers": -1}, "num_workers=-1"),
        ({"num_workers": True}, "num_workers=True"),
        ({"num_workers": 1.0}, "num_workers=1.0"),
    ],
)
def test_a_wrong_field_is_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(WorkloadError, match=said):
        make(**changes)


def test_a_class_is_a_fine_build_model() -> None:
    assert isinstance(make(build_model=nn.Identity).build_model(), nn.Identity)


def test_splits_leave_out_what_is_not_there() -> None:
    assert list(make().splits) == ["train", "validation"]
    assert list(make(test_data=DATA).splits) == ["train", "validation", "test"]
    assert make().data("validation") is DATA


def test_an_unknown_split_is_an_error() -> None:
    with pytest.raises(UnknownNameError, match=r"no split 'validatoin'\. Did you mean 'validation'"):
        make().data("validatoin")
    with pytest.raises(UnknownNameError, match="no split 'test'"):
        make().data("test")


def test_replace_changes_one_field_and_checks_it() -> None:
    assert make().replace(name="other").name == "other"
    with pytest.raises(UnknownNameError, match="Did you mean 'metrics'"):
        make().replace(metric={})
    with pytest.raises(WorkloadError, match="num_workers"):
        make().replace(num_workers=-1)


def test_default_forward_and_targets_take_the_first_two() -> None:
    batch = [torch.ones(2, 3), torch.zeros(2)]
    assert torch.equal(first_of_batch(lambda x: 2 * x, batch), 2 * batch[0])
    assert second_of_batch(batch) is batch[1]


def test_a_batch_without_positions_is_explained() -> None:
    with pytest.raises(WorkloadError, match=r"keys image, label.*forward=lambda"):
        first_of_batch(lambda x: x, {"image": 1, "label": 2})
    with pytest.raises(WorkloadError, match=r"keys image, label.*targets=lambda"):
        second_of_batch({"image": 1, "label": 2})
