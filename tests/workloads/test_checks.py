from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

from workbench.config import TrainConfig
from workbench.errors import ConfigError, DataError, UnknownNameError, WorkloadError
from workbench.workloads.base import Workload
from workbench.workloads.checks import (
    check_data,
    check_fresh,
    check_loss_shape,
    check_model,
    check_selection,
    check_weights,
    scan_targets,
)
from workbench.workloads.losses import classification

CONFIG = TrainConfig(peak_lr=0.1, total_steps=10, batch_size=4)


def examples(count: int) -> TensorDataset:
    return TensorDataset(torch.zeros(count, 3), torch.zeros(count).long())


def make(**changes: Any) -> Workload:
    fields: dict[str, Any] = {
        "name": "mine",
        "build_model": lambda: nn.Linear(3, 2),
        "train_data": examples(10),
        "validation_data": examples(5),
        "config": CONFIG,
    }
    return classification(**{**fields, **changes})


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(6))


class CountedStream(Stream):
    def __len__(self) -> int:
        return 6


def test_sizes_of_every_split() -> None:
    assert check_data(make(test_data=examples(7)), CONFIG) == {"train": 10, "validation": 5, "test": 7}
    assert check_data(make(train_data=CountedStream()), CONFIG)["train"] == 6
    assert check_data(make(train_data=list(range(4))), CONFIG)["train"] == 4


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_an_empty_split_is_named(split: str) -> None:
    with pytest.raises(DataError, match=f"the {split} split has 0 examples"):
        check_data(make(**{f"{split}_data": examples(0)}), CONFIG)


@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_split_without_length_is_named(split: str) -> None:
    with pytest.raises(DataError, match=rf"{split}_data \(Stream\) has no length.*__len__"):
        check_data(make(**{f"{split}_data": Stream()}), CONFIG)


def test_a_batch_larger_than_the_data_names_both_numbers() -> None:
    assert check_data(make(), CONFIG.replace(batch_size=10))["train"] == 10
    with pytest.raises(DataError, match=r"batch_size=11 is more than the 10 examples.*1 to 10"):
        check_data(make(), CONFIG.replace(batch_size=11))


def test_selection_must_exist() -> None:
    check_selection(make(), CONFIG.replace(select="validation/accuracy", select_mode="max"))
    with pytest.raises(UnknownNameError, match="Did you mean 'validation/accuracy'"):
        check_selection(make(), CONFIG.replace(select="validation/acuracy"))
    with pytest.raises(UnknownNameError, match="select='test/loss'"):
        check_selection(make(), CONFIG.replace(select="test/loss"))


@pytest.mark.parametrize(
    ("metric", "refused"),
    [
        ("accuracy", True),
        ("top5_accuracy", True),
        ("f1", True),
        ("macro_auc", True),
        ("error", False),
        ("distance", False),
    ],
)
def test_the_smallest_accuracy_is_not_what_anybody_wants(metric: str, refused: bool) -> None:
    workload = make().replace(metrics={metric: lambda outputs, batch: outputs})
    with pytest.raises(ConfigError, match="select_mode='max'") if refused else nullcontext():
        check_selection(workload, CONFIG.replace(select=f"validation/{metric}"))


def frozen() -> nn.Module:
    return nn.Linear(2, 2).requires_grad_(False)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (None, "build_model returned NoneType"),
        (torch.zeros(3), "build_model returned Tensor"),
        (nn.ReLU(), "ReLU has no parameters.*ModuleList"),
        (frozen(), "all 2 parameters of Linear are frozen"),
    ],
)
def test_a_model_that_cannot_train(model: object, said: str) -> None:
    with pytest.raises(WorkloadError, match=said):
        check_model(model)


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_lazy_model_is_named() -> None:
    with pytest.raises(WorkloadError, match=r"without a shape: 0\.weight, 0\.bias"):
        check_model(nn.Sequential(nn.LazyLinear(2)))


def test_a_partly_frozen_model_is_fine() -> None:
    check_model(nn.Sequential(frozen(), nn.Linear(2, 2)))


def test_models_that_share_parameters_are_named() -> None:
    kept = nn.Linear(2, 2)
    with pytest.raises(WorkloadError, match=r"twice \(0\.weight, 0\.bias\)"):
        check_fresh(kept, nn.Sequential(kept))
    check_fresh(kept, nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        (torch.tensor(1.0), r'shape \(\), but.*\(4,\).*reduction="none"'),
        (torch.zeros(1), 'reduction="none"'),
        (torch.zeros(4, 1), r"\(4, 1\).*squeeze"),
        (torch.zeros(4, 4), r"\(4, 4\).*compared with every target"),
        (torch.zeros(4, 7), r"\(4, 7\).*flatten\(1\)\.mean\(1\)"),
        (torch.zeros(7), r"\(7,\).*first axis"),
        (1.0, "returned float"),
    ],
)
def test_a_loss_of_another_shape_is_explained(losses: object, said: str) -> None:
    with pytest.raises(WorkloadError, match=said):
        check_loss_shape(losses, 4)


def test_a_loss_per_example_passes() -> None:
    check_loss_shape(torch.zeros(4), 4)
    check_loss_shape(torch.zeros(1), 1)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (torch.tensor(1.0), r"^metric 'acc' has shape \(\), but.*averaged already: return the values before the mean"),
        (torch.zeros(4, 1), r"^metric 'acc' has shape \(4, 1\).*squeeze"),
        (1.0, "^metric 'acc' returned float"),
    ],
)
def test_a_metric_of_another_shape_is_called_by_its_name(values: object, said: str) -> None:
    with pytest.raises(WorkloadError, match=said):
        check_loss_shape(values, 4, what="metric 'acc'")


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        (torch.tensor([1.0, -0.5, 2.0]), r"gives -0\.5 to example 1 of here.*finite and at least 0"),
        (torch.tensor([1.0, 2.0, float("nan")]), "gives nan to example 2 of here"),
        (torch.tensor([float("inf"), 2.0]), "gives inf to example 0 of here"),
        (torch.zeros(3), r"gives 0 to all 3 examples of here.*At least one"),
        (torch.zeros(3, dtype=torch.bool), "gives 0 to all 3 examples"),
    ],
)
def test_weights_without_a_mean_are_explained(weights: torch.Tensor, said: str) -> None:
    with pytest.raises(WorkloadError, match=said):
        check_weights(weights, where="here")


@pytest.mark.parametrize("weights", [torch.tensor([0.0, 2.0]), torch.tensor([False, True]), torch.tensor([0, 3])])
def test_weights_with_zeros_pass(weights: torch.Tensor) -> None:
    check_weights(weights, where="here")


def test_targets_are_counted() -> None:
    data = TensorDataset(torch.zeros(5, 1), torch.tensor([0, 2, 2, 0, 2]))
    assert scan_targets(data, classes=4) == [2, 0, 3, 0]
    assert scan_targets([{"y": 1}], classes=2, targets=lambda item: item["y"]) == [0, 1]


@pytest.mark.parametrize("value", [3, -1])
def test_a_target_out_of_range_names_the_example(value: int) -> None:
    data = TensorDataset(torch.zeros(3, 1), torch.tensor([0, 1, value]))
    with pytest.raises(DataError, match=rf"example 2 of the test split has target {value}.*3 outputs.*0 to 2"):
        scan_targets(data, classes=3, split="test")


@pytest.mark.parametrize("target", [torch.zeros(2).long(), torch.tensor(0.5)])
def test_a_target_that_is_no_class_names_the_example(target: torch.Tensor) -> None:
    with pytest.raises(DataError, match="example 0 of the train split has a target of shape"):
        scan_targets([(0, target)], classes=3)
