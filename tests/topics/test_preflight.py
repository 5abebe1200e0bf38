"""Before training: what is collected of data, loss and first update, and the verdicts on it."""

from __future__ import annotations

import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import workbench as wb
from tests.helpers.records import MemoryRecord
from tests.helpers.workloads import small_net, small_workload
from workbench.config import TrainConfig
from workbench.errors import WorkloadError
from workbench.topics.data.collect import collect_data
from workbench.topics.preflight.collect import _not_finite, collect_preflight
from workbench.topics.preflight.diagnose import diagnose_preflight, spoilt_splits
from workbench.workloads.base import Workload
from workbench.workloads.losses import classification

CODES = {"data.nonfinite", "data.labels", "init.loss", "loop.no_gradient", "loop.no_update"}


HEALTHY: dict[str, Any] = {
    "examples": {"train": 100, "validation": 20},
    "train": {
        "read": 100, "nonfinite_values": 0, "nonfinite_from_example": None, "loss": 1.4, "classes": 4,
        "class_counts": [25, 25, 30, 20],
    },
    "validation": {"read": 20, "nonfinite_values": 0, "nonfinite_from_example": None, "loss": 1.4, "classes": 4},
    "first_loss": 1.4, "parameters": 16, "tensors": 2, "frozen": [], "no_gradient": [], "no_update": [], "sizes": {},
    "nonfinite_gradient": [],
}  # fmt: skip


def said(facts: dict[str, Any] | None, one_batch: dict[str, Any] | None = None, **thresholds: float) -> dict[str, Any]:
    empty = pd.DataFrame()
    known = {} if facts is None else {"preflight": facts, "one_batch": one_batch}
    record = MemoryRecord(trials=empty, steps=empty, evals=empty, config={}, facts=known, path=Path("x"))
    diagnosis = diagnose_preflight(record, **thresholds)
    assert len(diagnosis.findings) == len(CODES)
    assert {f.code for f in diagnosis} == CODES
    return {f.code: f for f in diagnosis}


def with_train(**changes: Any) -> dict[str, Any]:
    return HEALTHY | {"train": HEALTHY["train"] | changes}


def test_healthy_and_nothing_to_go_by() -> None:
    assert {f.status for f in said(HEALTHY).values()} == {"ok"}
    assert {f.status for f in said(None).values()} == {"not_measured"}
    gradient = said(HEALTHY | {"nonfinite_gradient": ["layer.weight"]})["data.nonfinite"]
    assert (gradient.status, "layer.weight" in gradient.summary) == ("fail", True)


@pytest.mark.parametrize(
    ("inside", "last", "summary", "advice"),
    [
        ({}, None, "2 in train.", "train data from example 8 on"),
        ({"targets": 2}, 8, "2 in train (targets).", "example 8 of the train data: it is the first"),
        ({"inputs": 1, "batch[2]": 1}, 15, "2 in train (1 in inputs and 1 in batch[2]).", "examples 8 to 15 of the train data"),
    ],
)  # fmt: skip
def test_non_finite_data_are_said_to_be_inputs_or_targets(
    inside: dict[str, int], last: int | None, summary: str, advice: str
) -> None:
    facts = {"nonfinite_in": inside, "nonfinite_from_example": 8, "nonfinite_to_example": last}
    finding = said(with_train(nonfinite_values=2, loss=None, **facts))["data.nonfinite"]
    assert finding.summary == f"NaN or infinite values: {summary}"
    assert advice in finding.advice[0]


def with_parameters(kind: str, names: list[str], **one_batch: Any) -> dict[str, Any]:
    sizes = {"stem.weight": 6, "stem.bias": 1, "head.weight": 8, "head.bias": 1}
    changes = {kind: names, "sizes": {name: sizes[name] for name in names}, "parameters": 16, "tensors": 4}
    return said(HEALTHY | changes, one_batch or None)


@pytest.mark.parametrize(
    ("names", "layers", "status"),
    [
        (["stem.weight"], {"not_in_graph": ["stem.weight"]}, "fail"),
        (["stem.bias"], {"not_in_graph": ["stem.bias"]}, "fail"),  # a quarter of the tensors, however few numbers
        (["stem.weight"], {"not_in_graph": ["stem.weight"], "not_in_forward": ["stem.weight"]}, "warn"),
        (["stem.bias"], {"not_in_graph": ["stem.bias"], "not_in_forward": ["stem.bias"]}, "ok"),
        (["stem.weight"], {}, "warn"),
    ],
)
def test_what_is_cut_off_is_worse_than_what_is_not_used(names: list[str], layers: dict[str, Any], status: str) -> None:
    found = with_parameters("no_gradient", names, layers=layers, fit={"without_gradient": names})
    assert found["loop.no_gradient"].status == status


@pytest.mark.parametrize(("size", "status"), [(9, "warn"), (10, "fail")])
def test_a_tenth_of_the_parameters_is_much_and_less_of_them_is_not(size: int, status: str) -> None:
    """One tensor of ten, so that only its size counts: cut off, or left as it is by the optimizer."""
    facts = HEALTHY | {"sizes": {"head.bias": size}, "parameters": 100, "tensors": 10}
    cut = {"layers": {"not_in_graph": ["head.bias"]}, "fit": {"without_gradient": ["head.bias"]}}
    found = [said(facts | {"no_gradient": ["head.bias"]}, cut)["loop.no_gradient"], said(facts | {"no_update": ["head.bias"]})["loop.no_update"]]  # fmt: skip
    assert [(f.status, f.value) for f in found] == [(status, size / 100)] * 2


@pytest.mark.parametrize(
    ("tensors", "size", "used", "status"), [(4, 1, True, "fail"), (5, 1, True, "warn"), (10, 19, False, "ok"), (10, 20, False, "warn")]
)  # fmt: skip
def test_a_quarter_of_the_tensors_is_much_too_and_an_unused_fifth_is_said(
    tensors: int, size: int, used: bool, status: str
) -> None:
    facts = HEALTHY | {"sizes": {"head.bias": size}, "parameters": 100, "tensors": tensors, "no_gradient": ["head.bias"]}  # fmt: skip
    layers = {"not_in_graph": ["head.bias"], "not_in_forward": [] if used else ["head.bias"]}
    assert said(facts, {"layers": layers})["loop.no_gradient"].status == status


def test_which_parameters_train() -> None:
    every = with_parameters("no_gradient", ["stem.weight", "stem.bias", "head.weight", "head.bias"])["loop.no_gradient"]
    assert (every.status, every.value) == ("fail", 1.0)
    some = with_parameters("no_gradient", ["head.bias"])["loop.no_gradient"]
    assert (some.status, some.value) == ("warn", 1 / 16)
    late = with_parameters("no_gradient", ["stem.weight"], fit={"without_gradient": []}, layers={})["loop.no_gradient"]
    assert late.status == "ok", "a gradient that comes with the second step is one"
    assert "1 are frozen on purpose" in said(HEALTHY | {"frozen": ["stem.weight"]})["loop.no_gradient"].summary
    assert with_parameters("no_update", ["head.weight"])["loop.no_update"].status == "fail"
    both = said(HEALTHY | {kind: ["head.bias"] for kind in ("no_gradient", "no_update")})
    assert both["loop.no_update"].status == "ok", "what has no gradient is another finding"


def test_a_class_without_examples() -> None:
    finding = said(with_train(class_counts=[50, 0, 50, 0]))["data.labels"]
    assert (finding.status, finding.value) == ("warn", 2.0)
    assert "class 1, 3" in finding.summary
    assert said(with_train(class_counts=[97, 1, 1, 1]))["data.labels"].status == "ok", "imbalance is another question"
    assert said(with_train(class_counts=[97, 1, 1, 1]), min_class_frac=0.02)["data.labels"].status == "warn"


@pytest.mark.parametrize(("loss", "status"), [(0.1, "ok"), (1.386, "ok"), (2.0, "ok"), (2.2, "warn"), (80.0, "warn")])
def test_the_initial_loss_is_held_against_chance(loss: float, status: str) -> None:
    finding = said(with_train(loss=loss) | {"first_loss": loss})["init.loss"]
    assert finding.status == status
    assert finding.evidence["chance"] == pytest.approx(math.log(4))
    assert said(with_train(loss=30.0) | {"first_loss": 1.4})["init.loss"].status == "ok", (
        "fresh batch norm in evaluation"
    )
    assert said(with_train(loss=None))["init.loss"].status == "not_measured"


@pytest.mark.parametrize(
    ("kind", "spread", "mean", "status"),
    [
        ("regression", 0.1, 5.0, "ok"), ("regression", 90.0, 5.0, "warn"), ("regression", 0.1, 40.0, "warn"),
        (None, 90.0, 40.0, "ok"), ("regression", "inf", None, "ok"),
    ],
)  # fmt: skip
def test_the_fresh_outputs_of_a_regression_are_held_against_its_targets(
    kind: str | None, spread: Any, mean: Any, status: str
) -> None:
    one_batch = {
        "loss": {"kind": kind, "target_spread": 2.0, "target_mean": 6.0},
        "spread": {"spread": spread, "mean": mean},
    }
    assert said(with_train(classes=None, class_counts=None), one_batch)["init.loss"].status == status


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
    torch.manual_seed(3), np.random.seed(3), random.seed(3)
    before = (torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate())
    facts = collected(small_workload())
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (np.random.get_state()[1].tolist(), random.getstate())
    assert collected(classes(X, Y.clamp(max=2)))["train"]["class_counts"] == [12, 12, 24, 0]
    assert facts["examples"] == {"train": 48, "validation": 13}
    assert facts["train"]["read"] == 48
    assert facts["train"]["nonfinite_values"] == 0
    assert facts["train"]["classes"] is None
    assert math.isfinite(facts["first_loss"])
    assert facts["parameters"] == sum(p.numel() for p in small_net().parameters())
    assert facts["tensors"] == 4
    assert facts["no_gradient"] == facts["no_update"] == facts["nonfinite_gradient"] == facts["frozen"] == []


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_inputs_are_counted(value: float) -> None:
    x = X.clone()
    x[40, 1] = value
    facts = collected(classes(x, Y))
    assert facts["train"]["nonfinite_values"] == 1
    assert facts["train"]["nonfinite_from_example"] == facts["train"]["nonfinite_to_example"] == 40
    assert facts["train"]["nonfinite_in"] == {"inputs": 1}
    assert facts["validation"]["nonfinite_values"] == 0


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


@pytest.mark.parametrize(
    ("workload", "said"),
    [
        (
            lambda: small_workload(forward=lambda m, b: m(b[0][:, :2])),
            "begins with example 0: forward or loss raised Run",
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
    assert (facts["train"]["loss"] is None, facts["tensors"] == 0) == (not masked, not masked)


def test_examples_of_weight_zero_have_no_part_in_the_initial_loss() -> None:
    def silent() -> nn.Module:
        model = nn.Linear(3, 1)
        for p in model.parameters():
            nn.init.zeros_(p)
        return model

    targets = torch.sin(X.sum(1))
    workload = small_workload(
        build_model=silent, train_data=TensorDataset(X, targets), weights=lambda batch: (batch[1] > 0).double(),
        loss=lambda outputs, batch: (outputs.squeeze(-1) - batch[1]) ** 2,
    )  # fmt: skip
    assert collected(workload)["train"]["loss"] == pytest.approx(float((targets[targets > 0] ** 2).mean()))
