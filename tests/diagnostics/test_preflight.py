"""The verdicts on what was collected before training: planted faults, healthy twins, nothing to go by."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from tests.helpers.records import MemoryRecord
from workbench.topics.preflight.diagnose import diagnose_preflight

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


@pytest.mark.parametrize(
    ("inside", "last", "summary", "advice"),
    [
        ({"targets": 2}, 8, "2 in train (targets).", "example 8 of the train data: it is the first"),
        ({"inputs": 1, "batch[2]": 1}, 15, "2 in train (1 in inputs and 1 in batch[2]).", "examples 8 to 15 of the train data"),
    ],
)  # fmt: skip
def test_non_finite_data_are_said_to_be_inputs_or_targets(
    inside: dict[str, int], last: int, summary: str, advice: str
) -> None:
    facts = {"nonfinite_in": inside, "nonfinite_from_example": 8, "nonfinite_to_example": last}
    finding = said(with_train(nonfinite_values=2, loss=None, **facts))["data.nonfinite"]
    assert finding.summary == f"NaN or infinite values: {summary}"
    assert advice in finding.advice[0]


def with_parameters(kind: str, names: list[str], **one_batch: Any) -> dict[str, Any]:
    sizes = {"stem.weight": 6, "stem.bias": 1, "head.weight": 8, "head.bias": 1}
    changes = {kind: names, "sizes": {name: sizes[name] for name in names}, "parameters": 16, "tensors": 4}
    return said(HEALTHY | changes, one_batch or None)


def test_where_no_parameter_gets_a_gradient_nothing_can_train() -> None:
    every = with_parameters("no_gradient", ["stem.weight", "stem.bias", "head.weight", "head.bias"])["loop.no_gradient"]
    assert (every.status, every.value) == ("fail", 1.0)
    assert every.advice
    some = with_parameters("no_gradient", ["head.bias"])["loop.no_gradient"]
    assert (some.status, some.value) == ("warn", 1 / 16)
    assert "head.bias" in some.summary
    assert said(HEALTHY)["loop.no_gradient"].status == "ok"


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


def test_a_gradient_that_comes_with_the_second_step_is_one() -> None:
    found = with_parameters("no_gradient", ["stem.weight"], fit={"without_gradient": []}, layers={})
    assert found["loop.no_gradient"].status == "ok"


def test_parameters_that_the_optimizer_leaves_alone() -> None:
    assert with_parameters("no_update", ["head.weight"])["loop.no_update"].status == "fail"
    few = with_parameters("no_update", ["head.bias"])["loop.no_update"]
    assert (few.status, few.value) == ("warn", 1 / 16)
    assert "head.bias" in few.summary
    both = said(HEALTHY | {kind: ["head.bias"] for kind in ("no_gradient", "no_update")})
    assert both["loop.no_update"].status == "ok", "what has no gradient is another finding"


def test_frozen_parameters_are_no_fault() -> None:
    found = said(HEALTHY | {"frozen": ["stem.weight"]})["loop.no_gradient"]
    assert found.status == "ok"
    assert "1 are frozen on purpose" in found.summary


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


def test_fresh_batch_norm_may_be_wrong_in_evaluation() -> None:
    assert said(with_train(loss=30.0) | {"first_loss": 1.4})["init.loss"].status == "ok"


def test_chance_is_unknown_without_a_loss() -> None:
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


def test_without_classes_there_are_none_to_count() -> None:
    found = said(with_train(classes=None, class_counts=None))
    assert {found[code].status for code in ("data.labels", "init.loss")} == {"ok"}
    assert all("Does not apply" in found[code].summary for code in ("data.labels", "init.loss"))
