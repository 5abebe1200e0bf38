"""Before training: what is collected of data, loss and first update, and the verdicts on it."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import workbench as wb
from tests.helpers.workloads import small_net, small_workload
from workbench.config import TrainConfig
from workbench.errors import WorkloadError
from workbench.findings.audited import Audit
from workbench.findings.causes import causes_first
from workbench.findings.finding import Finding
from workbench.topics.data.collect import collect_data
from workbench.topics.one_batch.collect_preflight import collect_preflight
from workbench.topics.one_batch.diagnose_preflight import diagnose_preflight, spoilt_splits
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
    known = {} if facts is None else {"preflight": facts, "one_batch": one_batch}
    record = Audit(facts=known, workload="x")
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


@pytest.mark.parametrize(
    ("tensors", "size", "used", "status"), [(4, 1, True, "fail"), (5, 1, True, "warn"), (10, 9, True, "warn"), (10, 10, True, "fail"), (10, 19, False, "ok"), (10, 20, False, "warn")]
)  # fmt: skip
def test_a_quarter_of_the_tensors_is_much_too_and_an_unused_fifth_is_said(
    tensors: int, size: int, used: bool, status: str
) -> None:
    facts = HEALTHY | {"sizes": {"head.bias": size}, "parameters": 100, "tensors": tensors, "no_gradient": ["head.bias"]}  # fmt: skip
    layers = {"not_in_graph": ["head.bias"], "not_in_forward": [] if used else ["head.bias"]}
    assert said(facts, {"layers": layers})["loop.no_gradient"].status == status


@pytest.mark.parametrize(
    ("classes", "loss", "status"), [(4, 0.1, "ok"), (4, 2.3, "ok"), (4, 2.5, "warn"), (2, 1.6, "ok"), (2, 1.8, "warn"), (100, 6.8, "ok"), (100, 7.0, "warn")]
)  # fmt: skip
def test_the_initial_loss_is_held_against_chance(classes: int, loss: float, status: str) -> None:
    """One nat above it, or 1.5 times it where that is more, as of 100 classes."""
    finding = said(with_train(loss=loss, classes=classes) | {"first_loss": loss})["init.loss"]
    assert finding.status == status
    assert finding.evidence["chance"] == pytest.approx(math.log(classes))
    assert said(with_train(loss=30.0) | {"first_loss": 1.4})["init.loss"].status == "ok", (
        "fresh batch norm in evaluation"
    )
    assert said(with_train(loss=None))["init.loss"].status == "not_measured"


@pytest.mark.parametrize("inputs", [2, 4, 16])
def test_a_linear_model_as_torch_draws_it_is_no_fault(inputs: int) -> None:
    x = torch.randn(64, inputs, generator=torch.Generator().manual_seed(0))
    for seed in range(100):
        torch.manual_seed(seed)
        with torch.no_grad():
            loss = float(torch.nn.functional.cross_entropy(torch.nn.Linear(inputs, 2)(x), (x[:, 0] > 0).long()))
        assert said(with_train(loss=loss, classes=2) | {"first_loss": loss})["init.loss"].status == "ok", (seed, loss)


@pytest.mark.parametrize(("spread", "mean", "status"), [(0.1, 5.0, "ok"), (90.0, 5.0, "warn"), (0.1, 40.0, "warn"), ("inf", None, "ok")])  # fmt: skip
def test_the_fresh_outputs_of_a_regression(spread: Any, mean: Any, status: str) -> None:
    loss = {"kind": "regression", "target_spread": 2.0, "target_mean": 6.0}
    one_batch = {"loss": loss, "spread": {"spread": spread, "mean": mean}}
    assert said(with_train(classes=None, class_counts=None), one_batch)["init.loss"].status == status


SIZES = {"stem.weight": 6, "stem.bias": 1, "head.weight": 8, "head.bias": 1}
CUT = {"layers": {"not_in_graph": ["stem.bias"]}, "fit": {"without_gradient": ["stem.bias"]}}
UNUSED = {"layers": CUT["layers"] | {"not_in_forward": ["stem.bias"]}, "fit": CUT["fit"]}


@pytest.mark.parametrize(
    ("kind", "names", "one_batch", "status"),
    [
        ("no_gradient", list(SIZES), None, "fail"), ("no_gradient", ["head.bias"], None, "warn"),
        ("no_gradient", ["stem.bias"], CUT, "fail"), ("no_gradient", ["stem.bias"], UNUSED, "ok"),
        ("no_gradient", ["stem.weight"], CUT, "ok"),  # a gradient that comes with the second step is one
        ("no_update", ["head.weight"], None, "fail"),
    ],
)  # fmt: skip
def test_parameters_that_do_not_train(kind: str, names: list[str], one_batch: Any, status: str) -> None:
    facts = HEALTHY | {kind: names, "sizes": SIZES, "parameters": 16, "tensors": 4}
    assert said(facts, one_batch)[f"loop.{kind}"].status == status
    if kind == "no_gradient":
        assert said(facts | {"no_update": names})["loop.no_update"].status == "ok", "that is another finding"


def test_a_layer_that_forward_never_uses_is_a_fault_beside_dead_units() -> None:
    idle, off = "stem.weight", ["head.weight", "head.bias"]
    one_batch = {
        "layers": {"not_in_graph": [idle], "not_in_forward": [idle]},
        "fit": {"without_gradient": [idle, *off]},
    }
    facts = HEALTHY | {"no_gradient": [idle, *off], "sizes": SIZES, "parameters": 16, "tensors": 4}
    dead, broken = (
        Finding(code="units.dead", status="fail", summary="off"),
        Finding(code="lr.nothing_learns", status="fail", summary="flat"),
    )
    unused = said(facts, one_batch)["loop.no_gradient"]
    assert "38% of the trained parameters are not used by the forward pass: stem.weight. 2 others get" in unused.summary
    assert [f.follows_from for f in causes_first([broken, unused, dead])] == [None, None, "units.dead"]
    cut = said(facts, {"layers": {}, "fit": one_batch["fit"]})["loop.no_gradient"]
    assert [f.follows_from for f in causes_first([cut, dead])] == [None, "units.dead"], "of what is used, that follows"


def test_classes_without_examples() -> None:
    assert said(with_train(class_counts=[50, 0, 50, 0]))["data.labels"].value == 2.0
    assert said(with_train(class_counts=[97, 1, 1, 1]))["data.labels"].status == "ok", "imbalance is another question"


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
    assert (facts["examples"], facts["train"]["read"]) == ({"train": 48, "validation": 13}, 48)
    assert (facts["parameters"], facts["tensors"]) == (sum(p.numel() for p in small_net().parameters()), 4)
    assert facts["no_gradient"] == facts["no_update"] == facts["nonfinite_gradient"] == facts["frozen"] == []


@pytest.mark.parametrize("rule", [torch.optim.SGD, lambda p, lr: torch.optim.Adam(p, lr, eps=1.0)])
def test_a_bias_before_batch_norm_gets_no_gradient_but_rounding(rule: Any) -> None:
    """Its mean is taken away again, and the update of what is left is rounded away: nothing that an optimizer could move."""
    net = lambda: nn.Sequential(nn.Linear(3, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))  # noqa: E731
    workload = classes(X, Y).replace(build_model=net)
    facts = collected(workload.replace(config=workload.config.replace(optimizer=rule, peak_lr=1e-3, batch_size=48)))
    assert facts["no_update"] == []
    last = collected(workload.replace(config=workload.config.replace(optimizer=lambda p, lr: rule(list(p)[-2:], lr))))
    assert {"0.weight", "1.weight"} <= set(last["no_update"])


@pytest.mark.parametrize(
    ("workload", "said"),
    [
        (
            lambda: small_workload(forward=lambda m, b: m(b[0][:, :2])),
            "begins with example 0: forward or loss raised Run",
        ),
        (lambda: small_workload(loss=lambda o, b: o.detach().squeeze(-1)), "does not depend on any trained parameter"),
        (lambda: small_workload(examples=1, config={"batch_size": 1}), "train_data has 1 example; .* at least 2"),
    ],
)
def test_what_cannot_be_trained_is_explained(workload: Any, said: str) -> None:
    with pytest.raises(WorkloadError, match=said):
        collected(workload())


def test_targets_that_are_no_class_are_a_finding_and_train_nothing(tmp_path: Any) -> None:
    def own_loss(outputs: Any, batch: Any) -> Any:
        return torch.nn.functional.cross_entropy(outputs, batch[1], reduction="none")

    diagnosis = wb.diagnose(classes(X, Y + 1).replace(loss=own_loss), tmp_path / "s", device="cpu")
    first = diagnosis.findings[0]
    assert (first.code, first.status, diagnosis.cost["steps"]) == ("data.labels", "fail", 0)
    assert "begins with example 0" in diagnosis["data.labels"].summary


def test_labels_that_are_partly_wrong_and_ones_of_one_class() -> None:
    x, y = torch.tensor(load_digits().data).float() / 16, torch.tensor(load_digits().target)
    g = torch.Generator().manual_seed(0)
    wrong = (y + torch.randint(1, 10, y.shape, generator=g)) % 10
    found = []
    for labels in (y, torch.where(torch.rand(len(y), generator=g) < 0.3, wrong, y), torch.zeros_like(y)):
        workload = wb.load_workload("digits_mlp").replace(train_data=TensorDataset(x, labels))
        facts = {"preflight": collected(workload), "data": collect_data(workload)}
        found.append(diagnose_preflight(Audit(facts=facts, workload="x"))["data.labels"])
    assert [f.status for f in found] == ["ok", "warn", "fail"]
    assert found[1].value == pytest.approx(0.3, abs=0.05)


@pytest.mark.parametrize(("kind", "status"), [("second annotator", "warn"), ("clean", "ok"), ("noisy inputs", "ok")])
def test_labels_of_training_that_follow_another_rule_than_those_of_validation(kind: str, status: str) -> None:
    """The second annotator of 40 % of the rows has each class one higher: a rule, not noise."""
    order = np.random.default_rng(2).permutation(1797)
    x, y = torch.tensor(load_digits().data[order]).float() / 16, torch.tensor(load_digits().target[order])
    train, labels = x[:1400], y[:1400].clone()
    if kind == "second annotator":
        labels[840:] = (labels[840:] + 1) % 10
    if kind == "noisy inputs":
        train = train + 0.7 * torch.randn(train.shape, generator=torch.Generator().manual_seed(0))
    workload = wb.load_workload("digits_mlp").replace(
        train_data=TensorDataset(train, labels), validation_data=TensorDataset(x[1400:], y[1400:])
    )
    facts = {"preflight": collected(workload), "data": collect_data(workload)}
    found = diagnose_preflight(Audit(facts=facts, workload="x"))["data.labels"]
    assert found.status == status, found.summary
    assert status == "ok" or 0.25 < float(found.value or 0.0) < 0.5


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
    found = {name: facts["train"][f"nonfinite_{name}"] for name in ("values", "in", "from_example", "to_example")}
    assert found == {"values": 10, "in": {"targets": 10}, "from_example": 0, "to_example": 0}
    assert spoilt_splits(facts) == ({} if masked else {"train": 10})
    assert (facts["train"]["loss"] is None, facts["tensors"] == 0) == (not masked, not masked)
