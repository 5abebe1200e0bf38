"""Each code once, on facts of known architectures: present, absent, shallow, not traced, damaged."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any

import pytest
import torch

from tests.helpers.records import MemoryRecord, empty
from workbench.findings.diagnosis import Diagnosis, Finding
from workbench.record.json_values import dumps
from workbench.topics.architecture.diagnose import (
    architecture_depths,
    architecture_joins,
    diagnose_architecture,
    excused_architecture,
)
from workbench.topics.architecture.study import collect_architecture
from workbench.workloads.base import Workload
from workbench.workloads.registry import load_workload
from workbench.workloads.sklearn_data import deep_residual

CODES = ("no_residual", "no_norm", "norm_after_add", "branch_not_zero")


def record_of(facts: dict[str, Any]) -> MemoryRecord:
    record = empty()
    record.facts = json.loads(dumps(facts))
    return record


def audit(workload: Workload) -> MemoryRecord:
    return record_of({"architecture": collect_architecture(workload, workload.config, torch.device("cpu"))})


def statuses(diagnosis: Diagnosis) -> dict[str, str]:
    assert [f.code for f in diagnosis] == [f"architecture.{code}" for code in CODES]
    return {f.code.removeprefix("architecture."): f.status for f in diagnosis if f.status != "ok"}


@pytest.mark.parametrize(
    ("options", "warned"),
    [
        ({"residual": False}, {"no_residual", "no_norm"}),
        ({"residual": False, "norm": "branch"}, {"no_residual"}),
        ({}, {"no_norm", "branch_not_zero"}),
        ({"norm": "branch"}, set()),
        ({"norm": "pre"}, set()),
        ({"norm": "after_add"}, {"norm_after_add"}),
        ({"zero_init": True}, set()),
        ({"norm": "branch", "zero_init": True}, set()),
        ({"norm": "branch", "depth": 24}, {"branch_not_zero"}),
        ({"depth": 2}, set()),
        ({"depth": 2, "residual": False}, set()),
        ({"depth": 2, "norm": "after_add"}, set()),
    ],
)
def test_each_practice_that_a_deep_network_lacks_is_named(options: dict[str, Any], warned: set[str]) -> None:
    diagnosis = diagnose_architecture(audit(deep_residual(**options)))
    assert statuses(diagnosis) == dict.fromkeys(warned, "warn")
    for finding in diagnosis:
        assert finding.clause in ("F2.5", "F2.7", "F2.8")
        assert "traced forward pass" in finding.evidence["source"]
        assert bool(finding.advice) == (finding.status == "warn")


@pytest.mark.parametrize(
    "name",
    ["digits_mlp", "digits_cnn", "digits_resnet", "source_text", "breast_cancer", "quadratic", "catapult", "valley"],
)
def test_healthy_and_shallow_models_get_no_warning(name: str) -> None:
    assert statuses(diagnose_architecture(audit(load_workload(name)))) == {}


def test_the_evidence_names_modules_and_numbers() -> None:
    diagnosis = diagnose_architecture(audit(load_workload("source_text_post_norm")))
    after = diagnosis["architecture.norm_after_add"]
    assert after.status == "warn"
    assert after.value == 24
    assert after.evidence["norms"][:3] == ["blocks.0.norm1", "blocks.0.norm2", "blocks.1.norm1"]
    assert after.evidence["placements"] == {"after_add": 24}
    assert diagnosis["architecture.no_residual"].evidence["weight_layers"] == 1 + 12 * 4 + 1
    zero = diagnose_architecture(audit(deep_residual(zero_init=True)))["architecture.branch_not_zero"]
    assert zero.evidence["zero_parameters"][0] == "blocks.0.outer.weight"
    assert zero.evidence["begin_at_zero"] == 12


def test_the_growth_is_that_of_the_variance() -> None:
    """12 branches of equal size without a norm double it each time, with x + Norm(f(x)) they add 1 to it each time."""
    for options, growth in (({"width": 512}, 2**6), ({"width": 512, "norm": "branch"}, 13**0.5)):
        found = diagnose_architecture(audit(deep_residual(**options)))["architecture.branch_not_zero"]  # type: ignore[arg-type]
        assert found.value == pytest.approx(growth, rel=0.15)


@pytest.mark.parametrize(("layers", "status"), [(26, "warn"), (27, "ok")])
def test_the_depth_from_which_a_lack_counts_is_an_argument(layers: int, status: str) -> None:
    diagnosis = diagnose_architecture(audit(deep_residual(residual=False)), deep_layers=layers)
    assert diagnosis["architecture.no_residual"].status == status
    assert diagnosis["architecture.no_residual"].threshold == layers


@pytest.mark.parametrize(
    "facts", [{}, {"architecture": None}, {"architecture": {"reason": "the model is written in another language"}}]
)
def test_what_was_not_audited_is_not_measured_with_the_reason(facts: dict[str, Any]) -> None:
    diagnosis = diagnose_architecture(record_of(facts))
    assert statuses(diagnosis) == dict.fromkeys(CODES, "not_measured")
    said = "another language" if facts.get("architecture") else "no audit of the model"
    assert all(said in f.summary for f in diagnosis)


@pytest.mark.parametrize(("name", "value"), [("skip_rms", 0.0), ("skip_rms", float("nan")), ("sum_rms", float("inf"))])
def test_sizes_that_are_not_finite_are_not_measured(name: str, value: float) -> None:
    record = audit(deep_residual())
    record.facts["architecture"]["joins"][3][name] = json.loads(dumps(value))
    found = diagnose_architecture(record)["architecture.branch_not_zero"]
    assert found.status == "not_measured"
    assert "not finite" in found.summary


def test_the_joins_are_a_table() -> None:
    table = architecture_joins(audit(deep_residual(depth=3, norm="after_add")))
    assert table["module"].tolist() == ["blocks.0", "blocks.1", "blocks.2"]
    assert set(table["placement"]) == {"after_add"}
    assert (table["layers"] == 2).all()
    assert architecture_joins(empty()).columns.tolist() == table.columns.tolist()
    assert len(architecture_depths(empty())) == 0


ALARM = {"stability.early": "fail", "lr.too_high": "warn", "gradients.exploding": "warn", "data.imbalance": "warn"}


@pytest.mark.parametrize(("sign", "status"), [("stability.early", "warn"), ("lr.too_high", "warn"), ("gradients.exploding", "warn"), ("data.imbalance", "ok"), ("", "ok")])  # fmt: skip
def test_a_practice_that_is_missing_is_an_alarm_only_where_training_shows_a_sign(sign: str, status: str) -> None:
    structure = diagnose_architecture(audit(deep_residual(residual=False)))
    assert structure["architecture.no_residual"].status == "warn"
    codes = dict.fromkeys(("stability.early", "stability.divergent", *ALARM), "ok") | (
        {sign: ALARM[sign]} if sign else {}
    )
    told = tuple(Finding(code=code, status=s, summary="planted") for code, s in codes.items())  # type: ignore[arg-type]
    found = excused_architecture(dataclasses.replace(structure, findings=structure.findings + told))
    assert found["architecture.no_residual"].status == status
    untrained = tuple(dataclasses.replace(f, status="not_measured") for f in told)
    kept = excused_architecture(dataclasses.replace(structure, findings=structure.findings + untrained))
    assert kept["architecture.no_residual"].status == "warn"


def test_a_small_embedding_is_no_growth() -> None:
    """Four branches of unit size on an embedding of 0.02: without it they would grow by 4**0.5 / 1."""
    join = {"module": "", "skip": "identity", "placement": "pre", "norm": None, "layers": 3, "last_weight": "w", "zero_parameters": [], "branch_rms": 1.0}  # fmt: skip
    sizes = [(0.02**2 + k) ** 0.5 for k in range(5)]
    joins = [join | {"skip_rms": a, "sum_rms": b} for a, b in itertools.pairwise(sizes)]
    facts = {"weight_layers": 14, "num_joins": 4, "joins": joins, "norms": ["n"], "norm_modules": ["n"]}
    found = diagnose_architecture(record_of({"architecture": facts}))["architecture.branch_not_zero"]
    assert (found.status, found.value) == ("ok", pytest.approx(2.0, rel=0.01))
