"""The verdicts on what was collected before training: planted faults, healthy twins, nothing to go by."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from tests.helpers.records import MemoryRecord
from workbench.diagnostics.preflight import diagnose_preflight

CODES = {"data.nonfinite", "data.labels", "init.loss", "loop.no_gradient", "loop.no_update"}
HEALTHY: dict[str, Any] = {
    "examples": {"train": 100, "validation": 20},
    "train": {
        "read": 100, "nonfinite_values": 0, "nonfinite_from_example": None, "loss": 1.4, "classes": 4,
        "class_counts": [25, 25, 30, 20],
    },
    "validation": {"read": 20, "nonfinite_values": 0, "nonfinite_from_example": None, "loss": 1.4, "classes": 4},
    "first_loss": 1.4, "parameters": 16, "tensors": 2, "frozen": [], "no_gradient": [], "no_update": [],
    "nonfinite_gradient": [],
}  # fmt: skip


def said(facts: dict[str, Any] | None, **thresholds: float) -> dict[str, Any]:
    empty = pd.DataFrame()
    known = {} if facts is None else {"preflight": facts}
    record = MemoryRecord(trials=empty, steps=empty, evals=empty, config={}, facts=known, path=Path("x"))
    diagnosis = diagnose_preflight(record, **thresholds)
    assert len(diagnosis.findings) == len(CODES)
    assert {f.code for f in diagnosis} == CODES
    return {f.code: f for f in diagnosis}


def with_train(**changes: Any) -> dict[str, Any]:
    return HEALTHY | {"train": HEALTHY["train"] | changes}


def test_healthy() -> None:
    assert {f.status for f in said(HEALTHY).values()} == {"ok"}


def test_without_facts_nothing_is_called_healthy() -> None:
    assert {f.status for f in said(None).values()} == {"not_measured"}


def test_non_finite_data_fail_and_say_where() -> None:
    finding = said(with_train(nonfinite_values=3, nonfinite_from_example=40, loss=None))["data.nonfinite"]
    assert (finding.status, finding.value) == ("fail", 3.0)
    assert "train data from example 40" in finding.advice[0]
    gradient = said(HEALTHY | {"nonfinite_gradient": ["layer.weight"]})["data.nonfinite"]
    assert gradient.status == "fail"
    assert "layer.weight" in gradient.summary


def test_non_finite_validation_data_alone_are_said_to_be_there() -> None:
    facts = HEALTHY | {
        "validation": HEALTHY["validation"] | {"nonfinite_values": 2, "nonfinite_from_example": 8, "loss": None}
    }
    finding = said(facts)["data.nonfinite"]
    assert (finding.status, finding.value) == ("fail", 2.0)
    assert "2 in validation" in finding.summary
    assert "train" not in finding.summary
    assert finding.advice[0] == "Look at the validation data from example 8 on."


def test_where_no_parameter_gets_a_gradient_nothing_can_train() -> None:
    every = said(HEALTHY | {"no_gradient": ["head.weight", "head.bias"]})["loop.no_gradient"]
    assert (every.status, every.value) == ("fail", 2.0)
    assert every.advice
    assert said(HEALTHY | {"no_gradient": ["head.bias"]})["loop.no_gradient"].status == "warn"
    assert said(HEALTHY)["loop.no_gradient"].status == "ok"


def test_a_class_without_examples() -> None:
    finding = said(with_train(class_counts=[50, 0, 50, 0]))["data.labels"]
    assert (finding.status, finding.value) == ("warn", 2.0)
    assert "class 1, 3" in finding.summary
    assert said(with_train(class_counts=[97, 1, 1, 1]))["data.labels"].status == "ok", "imbalance is another question"
    assert said(with_train(class_counts=[97, 1, 1, 1]), min_class_frac=0.02)["data.labels"].status == "warn"


@pytest.mark.parametrize(("loss", "status"), [(0.1, "ok"), (1.386, "ok"), (2.0, "ok"), (2.2, "warn"), (80.0, "warn")])
def test_the_initial_loss_is_held_against_chance(loss: float, status: str) -> None:
    finding = said(with_train(loss=loss))["init.loss"]
    assert finding.status == status
    assert finding.evidence["chance"] == pytest.approx(math.log(4))


@pytest.mark.parametrize("changes", [{"classes": None, "class_counts": None}, {"loss": None}])
def test_chance_is_unknown_without_classes_or_loss(changes: dict[str, Any]) -> None:
    assert said(with_train(**changes))["init.loss"].status == "not_measured"


@pytest.mark.parametrize("kind", ["no_gradient", "no_update"])
def test_parameters_that_do_not_move(kind: str) -> None:
    finding = said(HEALTHY | {kind: ["head.bias"], "frozen": ["stem.weight"]})[f"loop.{kind}"]
    assert (finding.status, finding.value) == ("warn", 1.0)
    assert "head.bias" in finding.summary
    assert finding.evidence["frozen_on_purpose"] == ["stem.weight"]
    frozen = said(HEALTHY | {"frozen": ["stem.weight"]})[f"loop.{kind}"]
    assert frozen.status == "ok"
    assert "1 are frozen on purpose" in frozen.summary
