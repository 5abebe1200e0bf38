"""What a workload is, what is checked of it, and what every bundled one keeps."""

import dataclasses
import math
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

import workbench as wb
from workbench.errors import ConfigError, DataError, UnknownNameError, WorkloadError
from workbench.workloads.checks import (
    check_data,
    check_fresh,
    check_loss_shape,
    check_model,
    check_selection,
    check_weights,
)

CONFIG = wb.TrainConfig(peak_lr=0.1, total_steps=10, batch_size=4)
TABLES = {"digits_mlp": 10, "digits_cnn": 10, "digits_resnet": 10, "digits_resnet_stride1": 10, "breast_cancer": 2}
CHANCE = TABLES | {"source_text": 256, "source_lm": 256}


def examples(count: int) -> TensorDataset:
    return TensorDataset(torch.zeros(count, 3), torch.zeros(count).long())


def make(**changes: Any) -> wb.Workload:
    fields: dict[str, Any] = {
        "name": "mine", "build_model": lambda: nn.Linear(3, 2), "train_data": examples(10), "validation_data": examples(5),
        "loss": lambda outputs, batch: outputs.sum(1), "metrics": {"accuracy": lambda outputs, batch: outputs.sum(1)}, "config": CONFIG,
    }  # fmt: skip
    return wb.Workload(**{**fields, **changes})


class Untouchable(IterableDataset[int]):
    """Neither items nor length may be asked for when a workload is made."""

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("an item was loaded")


def test_data_and_model_are_not_touched_and_only_the_contracts_fields_are_there() -> None:
    made = make(train_data=Untouchable(), validation_data=Untouchable(), build_model=lambda: 1 / 0)
    assert {field.name for field in dataclasses.fields(made)} == {
        *("name", "build_model", "train_data", "validation_data", "test_data", "loss", "weights", "forward"),
        *("metrics", "collate", "num_workers", "minimised", "config", "source", "step"),
    }
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.name = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"name": " "}, "name="),
        ({"build_model": nn.Linear(3, 1)}, r"build_model=lambda: Net\(\)"),
        ({"loss": "mse"}, r"loss must be callable, not str \(mse\)"),
        ({"metrics": [len]}, "metrics must map names"),
        ({"metrics": {"accuracy": 0.5}}, "metric 'accuracy' must be callable"),
        ({"metrics": {"train/accuracy": len}}, "without '/'"),
        ({"metrics": {"loss": len}}, "not 'loss'"),
        ({"test_data": 5}, "test_data must be a dataset"),
        ({"train_data": DataLoader(examples(4))}, "train_data is a DataLoader; give its dataset"),
        ({"config": {"peak_lr": 0.1}}, "config must be a TrainConfig, not dict"),
        ({"num_workers": -1}, "num_workers=-1"),
        ({"minimised": "no"}, "minimised='no'"),
    ],
)
def test_a_wrong_field_is_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(WorkloadError, match=said):
        make(**changes)


def test_splits_and_copies_name_what_is_not_there() -> None:
    data = examples(2)
    assert make(build_model=nn.Identity).data("validation") is not None
    assert list(make(test_data=data).splits) == ["train", "validation", "test"]
    for call, said in (
        (lambda: make().data("validatoin"), r"no split 'validatoin'\. Did you mean 'validation'"),
        (lambda: make().data("test"), "no split 'test'"),
        (lambda: make().replace(metric={}), "Did you mean 'metrics'"),
    ):
        with pytest.raises(UnknownNameError, match=said):
            call()
    named = wb.load_workload("quadratic")
    assert named.replace(config=named.config.replace(peak_lr=0.5)).source == "quadratic"
    assert named.replace(loss=lambda outputs, batch: outputs).source is None, "it is no longer what the name stands for"


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(6))


def test_data_are_counted_and_held_against_the_batch() -> None:
    assert check_data(make(test_data=list(range(7))), CONFIG) == {"train": 10, "validation": 5, "test": 7}
    assert check_data(make(), CONFIG.replace(batch_size=10))["train"] == 10
    for changes, config, said in (
        ({}, CONFIG.replace(batch_size=11), r"batch_size=11 is more than the 10 examples.*1 to 10"),
        ({"test_data": examples(0)}, CONFIG, "the test split has 0 examples"),
        ({"validation_data": Stream()}, CONFIG, r"validation_data \(Stream\) has no length.*__len__"),
    ):
        with pytest.raises((ConfigError, DataError), match=said):
            check_data(make(**changes), config)


@pytest.mark.parametrize(
    "metric",
    [
        "accuracy",
        "top5_accuracy",
        "top2",
        "top_5",
        "-top5_error",
        "f1",
        "macro_auc",
        "mAP",
        "-iou_loss",
        "-error",
        "-distance",
    ],
)
def test_the_smallest_accuracy_is_not_what_anybody_wants(metric: str) -> None:
    workload = make(metrics={metric.lstrip("-"): len})
    with nullcontext() if metric[0] == "-" else pytest.raises(ConfigError, match="select_mode='max'"):
        check_selection(workload, CONFIG.replace(select=f"validation/{metric.lstrip('-')}"))


def test_a_partly_frozen_model_is_fine_and_a_shared_one_is_named() -> None:
    kept = nn.Linear(2, 2)
    check_model(nn.Sequential(nn.Linear(2, 2).requires_grad_(False), kept))
    check_fresh(kept, nn.Linear(2, 2))
    with pytest.raises(WorkloadError, match=r"twice \(0\.weight, 0\.bias\)"):
        check_fresh(kept, nn.Sequential(kept))


@pytest.mark.parametrize(
    ("values", "what", "said"),
    [
        (torch.tensor(1.0), "the loss", r'shape \(\), but.*\(4,\).*reduction="none"'),
        (torch.zeros(1), "the loss", 'reduction="none"'),
        (torch.zeros(4, 1), "the loss", r"\(4, 1\).*squeeze"),
        (torch.zeros(4, 4), "the loss", r"\(4, 4\).*compared with every target"),
        (torch.zeros(4, 7), "the loss", r"\(4, 7\).*flatten\(1\)\.mean\(1\)"),
        (torch.zeros(7), "the loss", r"\(7,\).*first axis"),
        (1.0, "metric 'acc'", "^metric 'acc' returned float"),
        (torch.tensor(1.0), "metric 'acc'", r"^metric 'acc' has shape \(\), but.*averaged already: return the values before"),
    ],
)  # fmt: skip
def test_values_of_another_shape_are_explained(values: object, what: str, said: str) -> None:
    check_loss_shape(torch.zeros(4), 4, what=what)
    with pytest.raises(WorkloadError, match=said):
        check_loss_shape(values, 4, what=what)


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ([1.0, -0.5, 2.0], r"gives -0\.5 to example 1 of here.*finite and at least 0"),
        ([1.0, 2.0, math.nan], "gives nan to example 2 of here"),
        ([math.inf, 2.0], "gives inf to example 0 of here"),
        ([False, False, False], r"gives 0 to all 3 examples of here.*At least one"),
    ],
)
def test_weights_without_a_mean_are_explained(weights: list[float], said: str) -> None:
    for fine in ([0.0, 2.0], [False, True], [0, 3]):
        check_weights(torch.tensor(fine), where="here")
    check_weights(torch.zeros(3), where="here", share=True)
    with pytest.raises(WorkloadError, match=said):
        check_weights(torch.tensor(weights), where="here")


def build(workload: wb.Workload, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return workload.build_model()


def batch_of(workload: wb.Workload, split: str = "train", size: int = 8) -> Any:
    data = workload.data(split)
    return (workload.collate or default_collate)([data[i] for i in range(min(size, len(data)))])


@pytest.fixture(params=wb.list_workloads())
def workload(request: pytest.FixtureRequest) -> wb.Workload:
    made = wb.load_workload(request.param)
    assert made.name == request.param
    return made


def test_model_is_a_function_of_the_seed(workload: wb.Workload) -> None:
    first, again, other = (build(workload, seed).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)
    check_model(build(workload))
    check_fresh(build(workload), build(workload))
    check_selection(workload, workload.config)
    assert check_data(workload, workload.config) == {split: len(data) for split, data in workload.splits.items()}


def test_loss_and_metrics_are_per_example_and_every_parameter_gets_a_gradient(workload: wb.Workload) -> None:
    for split, data in workload.splits.items():
        model, batch = build(workload), batch_of(workload, split)
        outputs = workload.forward(model, batch)
        loss = workload.loss(outputs, batch)
        check_loss_shape(loss, min(8, len(data)))
        for metric in workload.metrics.values():
            values = metric(outputs, batch)
            check_loss_shape(values, min(8, len(data)))
            assert bool(((values >= 0) & (values <= 1)).all())
        loss.mean().backward()
        if split == "train":
            assert [name for name, p in model.named_parameters() if p.grad is None or not bool(p.grad.any())] == []


def test_curvature_along_the_gradient_is_the_slope_of_the_gradient(workload: wb.Workload) -> None:
    """Hessian times vector, as sharpness needs it, against a finite difference of gradients in float64."""
    model = build(workload).double().eval()
    batch = [part.double() if part.is_floating_point() else part for part in batch_of(workload)]
    parameters = list(model.parameters())

    def gradient(**how: bool) -> list[Tensor]:
        loss = workload.loss(workload.forward(model, batch), batch).mean()
        return list(torch.autograd.grad(loss, parameters, **how))

    direction = [part.detach() for part in gradient()]
    exact = torch.autograd.grad(gradient(create_graph=True), parameters, direction, materialize_grads=True)
    sides = []
    for sign in (1, -2):
        with torch.no_grad():
            for parameter, part in zip(parameters, direction, strict=True):
                parameter.add_(part, alpha=sign * 1e-6)
        sides.append(gradient())
    curvature = sum((h * d).sum() for h, d in zip(exact, direction, strict=True))
    slope = sum(((a - b) / 2e-6 * d).sum() for a, b, d in zip(*sides, direction, strict=True))
    torch.testing.assert_close(curvature, slope, rtol=1e-3, atol=1e-9)


@pytest.mark.parametrize("name", CHANCE)
def test_initial_loss_is_near_chance(name: str) -> None:
    workload = wb.load_workload(name)
    batch = batch_of(workload, size=128)
    loss = float(workload.loss(workload.forward(build(workload), batch), batch).mean().detach())
    assert loss == pytest.approx(math.log(CHANCE[name]), rel=0.15)


@pytest.mark.parametrize("name", TABLES)
def test_splits_have_every_class_in_the_same_share_and_no_row_in_common(name: str) -> None:
    workload = wb.load_workload(name)
    shares = {}
    for split, data in workload.splits.items():
        shares[split] = (torch.bincount(data.tensors[1], minlength=TABLES[name]) / len(data)).tolist()
    rows = [{row.numpy().tobytes() for row in data.tensors[0]} for data in workload.splits.values()]
    assert len(set.union(*rows)) == sum(map(len, rows))
    for split, total in (("validation", 0.15), ("test", 0.15)):
        assert shares[split] == pytest.approx(shares["train"], abs=0.01)
        size = sum(map(len, workload.splits.values()))
        assert len(workload.data(split)) == pytest.approx(total * size, abs=0.005 * size)
    inputs = workload.train_data.tensors[0]
    columns = inputs if name == "breast_cancer" else inputs.flatten()
    assert inputs.dtype == torch.float32
    torch.testing.assert_close(columns.mean(0), torch.zeros_like(columns[0]), atol=1e-4, rtol=0)
    torch.testing.assert_close(columns.std(0), torch.ones_like(columns[0]), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("name", "steps", "accuracy"),
    [("digits_mlp", 2000, 0.9), ("digits_resnet", 4000, 0.9), ("breast_cancer", 1000, 0.93)],
)
def test_a_short_plain_loop_learns_it(name: str, steps: int, accuracy: float) -> None:
    workload = wb.load_workload(name)
    assert workload.config.total_steps == steps
    model, data = build(workload), workload.train_data.tensors
    optimizer = torch.optim.SGD(model.parameters(), lr=workload.config.peak_lr, momentum=0.9)
    for _ in range(150):
        rows = torch.randint(len(data[0]), (workload.config.batch_size,))
        batch = [part[rows] for part in data]
        optimizer.zero_grad()
        workload.loss(workload.forward(model, batch), batch).mean().backward()
        optimizer.step()
    held_out = workload.validation_data.tensors
    with torch.no_grad():
        measured = workload.metrics["accuracy"](workload.forward(model.eval(), held_out), held_out).mean()
    assert float(measured) >= accuracy


def test_a_loss_that_calls_the_model_is_told_what_it_is_given() -> None:
    data = TensorDataset(torch.zeros(10, 2))
    own = wb.Workload(
        name="own", build_model=lambda: nn.Linear(2, 1), train_data=data, validation_data=data, config=CONFIG,
        loss=lambda model, batch: model(batch[0]).square(),
    )  # fmt: skip
    with pytest.raises(WorkloadError, match=r"loss\(outputs, batch\) is given the outputs.*\(\d+, 1\).*forward="):
        wb.Trainer().run(own, CONFIG, out=None)
