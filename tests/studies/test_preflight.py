"""What is collected before training: facts of the data, the first loss and the first update."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import workbench as wb
from tests.helpers.workloads import small_net, small_workload
from workbench.config import TrainConfig
from workbench.errors import WorkloadError
from workbench.topics.data.collect import collect_data
from workbench.topics.preflight.collect import _not_finite, collect_preflight
from workbench.topics.preflight.diagnose import diagnose_preflight, spoilt_splits
from workbench.workloads.base import Workload
from workbench.workloads.losses import classification

CPU = torch.device("cpu")


def collected(workload: Workload, **options: Any) -> dict[str, Any]:
    return collect_preflight(workload, workload.config, CPU, **options)


def classes(x: Tensor, y: Tensor, outputs: int = 4) -> Workload:
    return classification(
        name="c", build_model=lambda: nn.Linear(3, outputs), train_data=TensorDataset(x, y),
        validation_data=TensorDataset(x[:9], y[:9]), config=TrainConfig(peak_lr=0.1, total_steps=20, batch_size=8),
    )  # fmt: skip


X, Y = torch.randn(48, 3, generator=torch.Generator().manual_seed(0)), torch.arange(48) % 4


def test_a_healthy_workload() -> None:
    facts = collected(small_workload())
    assert facts["examples"] == {"train": 48, "validation": 13}
    assert facts["train"]["read"] == 48
    assert facts["train"]["nonfinite_values"] == 0
    assert facts["train"]["classes"] is None
    assert math.isfinite(facts["first_loss"])
    assert facts["parameters"] == sum(p.numel() for p in small_net().parameters())
    assert facts["tensors"] == 4
    assert facts["no_gradient"] == facts["no_update"] == facts["nonfinite_gradient"] == facts["frozen"] == []


def test_classes_are_counted() -> None:
    facts = collected(classes(X, Y.clamp(max=2)))
    assert facts["train"]["classes"] == 4
    assert facts["train"]["class_counts"] == [12, 12, 24, 0]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_inputs_are_counted(value: float) -> None:
    x = X.clone()
    x[40, 1] = value
    facts = collected(classes(x, Y))
    assert facts["train"]["nonfinite_values"] == 1
    assert facts["train"]["nonfinite_from_example"] == facts["train"]["nonfinite_to_example"] == 40
    assert facts["train"]["nonfinite_in"] == {"inputs": 1}
    assert facts["validation"]["nonfinite_values"] == 0


def test_non_finite_validation_data_alone_are_counted_there() -> None:
    workload = classes(X, Y)
    bad = X[:9].clone()
    bad[5, 1] = math.nan
    facts = collected(workload.replace(validation_data=TensorDataset(bad, Y[:9])))
    assert [facts[split]["nonfinite_values"] for split in ("train", "validation")] == [0, 1]
    assert facts["validation"]["nonfinite_from_example"] is not None


@pytest.mark.parametrize(
    ("form", "places", "first"),
    [
        (lambda x, y: (x, y), {"inputs": 1, "targets": 2}, (5, 5)),
        (lambda x, y: {"of": [x[:, :1], x], "y": y}, {"batch['of'][1]": 1, "batch['y']": 2}, (5, 5)),
        (lambda x, y: (x.T, y), {"inputs": 1, "targets": 2}, (0, 5)),
        (lambda x, y: (x[:4], y[:4]), {}, (8, 7)),
    ],
)
def test_the_part_and_the_example_that_hold_the_first_value(
    form: Any, places: dict[str, int], first: tuple[int, int]
) -> None:
    x, y = X[:8].clone(), torch.zeros(8)
    x[6, 1], y[5], y[7] = math.nan, math.inf, math.nan
    batch = form(x, y)
    labels = batch[1] if isinstance(batch, tuple) else None
    assert _not_finite(batch, 8, labels) == (places, first)


def test_a_first_loss_that_is_not_finite_is_laid_to_the_data_where_they_are_not() -> None:
    spoilt = TensorDataset(X.clone().index_fill_(1, torch.tensor(0), math.nan), Y)
    facts = collected(classes(X, Y).replace(train_data=spoilt))
    assert (facts["train"]["nonfinite_values"], facts["train"]["nonfinite_from_example"]) == (48, 0)
    assert facts["train"]["loss"] is None, "a loss that is not finite is none"
    assert facts["tensors"] == 0, "nobody takes a step on that"

    def broken(outputs: Tensor, batch: Any) -> Tensor:
        return outputs.squeeze(-1) * math.nan

    stuck = collected(small_workload(loss=broken))
    assert (stuck["nonfinite_loss"], stuck["tensors"]) == ("nan", 0), "nor on a loss that is not finite by itself"


def test_a_frozen_and_an_unused_parameter_are_told_apart() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused, self.frozen = nn.Linear(3, 1), nn.Linear(3, 1), nn.Linear(3, 3)
            self.frozen.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(self.frozen(x))

    facts = collected(small_workload(build_model=Net))
    assert facts["no_gradient"] == ["unused.weight", "unused.bias"]
    assert facts["no_update"] == ["unused.weight", "unused.bias"]
    assert facts["frozen"] == ["frozen.weight", "frozen.bias"]


def test_only_so_many_examples_are_read() -> None:
    facts = collected(small_workload(examples=500), max_examples=64)
    assert 64 <= facts["train"]["read"] < 128
    assert facts["examples"]["train"] == 500


def test_the_callers_random_state_is_untouched() -> None:
    torch.manual_seed(3), np.random.seed(3), random.seed(3)
    before = (torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate())
    collected(small_workload(build_model=lambda: small_net(0.5)))
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (np.random.get_state()[1].tolist(), random.getstate())


@pytest.mark.parametrize(
    ("workload", "said"),
    [
        (
            lambda: small_workload(forward=lambda m, b: m(b[0][:, :2])),
            r"begins with example 0: forward or loss raised Run",
        ),
        (lambda: small_workload(loss=lambda o, b: o.detach().squeeze(-1)), "does not depend on any trained parameter"),
        (lambda: small_workload(build_model=lambda: 1 / 0), "build_model raised ZeroDivisionError: division by zero"),
        (lambda: small_workload(examples=1, config={"batch_size": 1}), "train_data has 1 example; .* at least 2"),
    ],
)
def test_what_cannot_be_trained_is_explained(workload: Any, said: str) -> None:
    with pytest.raises(WorkloadError, match=said):
        collected(workload())


def test_targets_that_are_no_class_are_a_finding_and_train_nothing(tmp_path: Any) -> None:
    def own_loss(outputs: Any, batch: Any) -> Any:
        return torch.nn.functional.cross_entropy(outputs, batch[1], reduction="none")

    for k, workload in enumerate((classes(X, Y + 1), classes(X, Y + 1).replace(loss=own_loss))):
        diagnosis = wb.diagnose(workload, tmp_path / str(k), device="cpu")
        assert diagnosis["data.labels"].status == "fail"
        assert diagnosis.findings[0].code == "data.labels"
        assert diagnosis.cost["steps"] == 0
    assert "begins with example 0" in diagnosis["data.labels"].summary


def test_labels_that_are_partly_wrong_and_ones_of_one_class(tmp_path: Any) -> None:
    from sklearn.datasets import load_digits

    x, y = torch.tensor(load_digits().data).float() / 16, torch.tensor(load_digits().target)
    g = torch.Generator().manual_seed(0)
    flipped = torch.where(
        torch.rand(len(y), generator=g) < 0.3, (y + torch.randint(1, 10, y.shape, generator=g)) % 10, y
    )

    def said(labels: torch.Tensor) -> Any:
        base = wb.load_workload("digits_mlp")
        workload = base.replace(train_data=TensorDataset(x, labels))
        facts = {"preflight": collected(workload), "data": collect_data(workload)}
        return diagnose_preflight(SimpleNamespace(facts=facts, workload="x", command=None, path=None))["data.labels"]

    assert [said(labels).status for labels in (y, flipped, torch.zeros_like(y))] == ["ok", "warn", "fail"]
    assert said(flipped).value == pytest.approx(0.3, abs=0.05)


@pytest.mark.parametrize("masked", [True, False])
def test_values_that_no_loss_sees_are_no_fault(masked: bool) -> None:
    """Missing targets that weigh zero, as against an infinite one that is squared."""
    targets = torch.sin(X.sum(1))
    targets[::5] = math.inf
    weights = {"weights": lambda batch: torch.isfinite(batch[1]).double()} if masked else {}

    def loss(outputs: Tensor, batch: Any) -> Tensor:
        known = torch.where(torch.isfinite(batch[1]), batch[1], 0) if masked else batch[1]
        return (outputs.squeeze(-1) - known) ** 2

    facts = collected(small_workload(train_data=TensorDataset(X, targets), loss=loss, **weights))
    assert facts["train"]["nonfinite_values"] == 10
    assert spoilt_splits(facts) == ({} if masked else {"train": 10})
