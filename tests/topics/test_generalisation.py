"""The gap between training and validation has one name; a model far behind a linear one on its own training examples is said to be."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import workbench as wb
from tests.helpers.workloads import small_workload
from workbench.findings.audited import Audit
from workbench.findings.finding import Finding
from workbench.studies.session import open_session
from workbench.topics.evaluation.collect_generalisation import collect_generalisation
from workbench.topics.evaluation.diagnose_generalisation import diagnose_generalisation_gap, diagnose_underfit, gap_of
from workbench.topics.one_batch.collect_preflight import collect_preflight

CODE = "evaluation.generalisation_gap"
FITS = "evaluation.underfits"
NONE_LOST = ": 0% of what"


def at(train: float, validation: float, step: int = 100, *, se: tuple[float, float] = (0.01, 0.01)) -> dict[str, Any]:
    sides = (("train", train, se[0]), ("validation", validation, se[1]))
    return {"step": step} | {name: {"examples": 400, "loss": loss, "se": error} for name, loss, error in sides}


def said(last: dict[str, Any], selected: dict[str, Any] | None = None, *, mode: float = 0.2, start: float = 2.3) -> Any:
    found = {"last": last, "selected": selected or last, "training_mode": {"loss": mode, "se": 0.01, "steps": 20}}
    facts = {"generalisation": found, "preflight": {"train": {"loss": start, "classes": 10}}}
    return diagnose_generalisation_gap(Audit(facts=facts, workload="x"))[CODE]


@pytest.mark.parametrize(
    ("last", "selected", "mode", "status", "words"),
    [
        (at(0.2, 0.25), None, 0.2, "ok", ": 2% of what"),
        (at(0.2, 0.15), None, 0.6, "ok", NONE_LOST),  # dropout: validation below training
        (at(0.01, 0.6), at(0.3, 0.5), 0.01, "ok", ": 26% of what"),  # as of small data
        (at(0.01, 2.5), at(2.2, 2.29, 0), 0.01, "fail", "next to nothing"),
        (at(math.nan, 1.0), None, 0.2, "fail", "evaluation mode"),
        (at(2.29, 2.3), None, 2.29, "ok", "too little"),
        (at(0.1, math.inf), at(2.2, 2.29, 0), 0.1, "fail", "next to nothing"),
        (at(0.01, 2.1), at(0.9, 1.1), 0.01, "warn", "overfits"),
        (at(1.9, 1.9), None, 0.2, "fail", "evaluation mode"),
        # evaluation mode loses 0.24 and 0.26 of what was learned, then 0.3 of it by 5.4 and by 4.6 standard errors
        (at(0.78, 0.78), None, 0.3, "ok", NONE_LOST),
        (at(0.82, 0.82), None, 0.3, "fail", "evaluation mode"),
        (at(0.9, 0.9, se=(0.11, 0.01)), None, 0.3, "fail", "evaluation mode"),
        (at(0.9, 0.9, se=(0.13, 0.01)), None, 0.3, "ok", NONE_LOST),
        # too little is 0.23 of 2.3, or four standard errors
        (at(2.08, 2.08), None, 2.08, "ok", "too little"),
        # of 2.0 that were learned training mode hides 0.49 and 0.51, then as much by 5.2 and 4.8 standard errors
        (at(0.3, 0.3), None, 1.28, "ok", NONE_LOST),
        (at(0.3, 0.3), None, 1.32, "warn", "hides 51% of what was learned"),
        (at(0.3, 0.3, se=(0.19, 0.01)), None, 1.32, "warn", "hides 51% of what was learned"),
        (at(0.3, 0.3, se=(0.22, 0.01)), None, 1.32, "ok", NONE_LOST),
        (at(2.06, 2.06), None, 2.06, "ok", NONE_LOST),
        (at(1.9, 1.9, se=(0.11, 0.01)), None, 1.9, "ok", "too little"),
        (at(1.9, 1.9, se=(0.09, 0.01)), None, 1.9, "ok", NONE_LOST),
        # of 2.0 that were learned 0.11 carry over, then 0.09: at the best checkpoint 0.105, then 0.095
        (at(0.3, 2.08), at(0.3, 2.11), 0.3, "ok", ": 89% of what"),
        (at(0.3, 2.12), at(0.3, 2.09), 0.3, "ok", ": 91% of what"),
        (at(0.3, 2.12), at(0.3, 2.11), 0.3, "fail", "next to nothing"),
        # all of it is lost, by 3.03 standard errors and by 2.94
        (at(0.3, 2.3, se=(0.0, 0.66)), None, 0.3, "fail", "next to nothing"),
        (at(0.3, 2.3, se=(0.0, 0.68)), None, 0.3, "ok", ": 100% of what"),
        # the loss on validation rises by 0.24 and 0.26 of it; 0.49 and 0.51 of it are lost; by 3.06 and 2.94 standard errors
        (at(0.3, 1.5), at(0.6, 1.02), 0.3, "ok", ": 60% of what"),
        (at(0.3, 1.5), at(0.6, 0.98), 0.3, "warn", "overfits"),
        (at(0.3, 1.28), at(0.6, 0.48), 0.3, "ok", ": 49% of what"),
        (at(0.3, 1.32), at(0.6, 0.52), 0.3, "warn", "overfits"),
        (at(0.3, 1.8, se=(0.0, 0.49)), at(0.6, 0.8), 0.3, "warn", "overfits"),
        (at(0.3, 1.8, se=(0.0, 0.51)), at(0.6, 0.8), 0.3, "ok", ": 75% of what"),
    ],
)
def test_every_gap_has_its_name(last: Any, selected: Any, mode: float, status: str, words: str) -> None:
    finding = said(last, selected, mode=mode)
    assert (finding.status, words in finding.summary) == (status, True), finding.summary
    assert finding.summary.endswith(" of what was learned does not carry over.") is words.endswith("% of what")
    assert bool(finding.advice) is (status != "ok")


def test_without_a_finished_baseline_nothing_is_called_healthy() -> None:
    for facts in ({}, {"generalisation": {"reason": "the baseline is diverged"}}):
        assert diagnose_generalisation_gap(Audit(facts=facts, workload="x"))[CODE].status == "not_measured"
        assert diagnose_underfit(Audit(facts=facts, workload="x"))[FITS].status == "not_measured"
        assert gap_of(facts) is None


def frozen() -> nn.Module:
    """Batch norm whose running statistics never hear of the data: evaluation is another model."""
    return nn.Sequential(nn.BatchNorm1d(3, momentum=0.0), nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))


@contextlib.contextmanager
def studied(workload: Any, out: Path) -> Iterator[Any]:
    with open_session(workload, stem="gap", settings={}, trainer=wb.Trainer(device="cpu"), out=out / "s") as session:
        session.facts(preflight=collect_preflight(workload, session.config, session.device))
        yield session


@pytest.mark.parametrize(("shift", "status"), [(0.0, "ok"), (4.0, "fail")])
def test_evaluation_mode_that_is_another_model(tmp_path: Any, shift: float, status: str) -> None:
    x = torch.randn(96, 3, generator=torch.Generator().manual_seed(0)).double()
    data = TensorDataset(shift + x, x.sum(1))
    config = {"optimizer": "adam", "peak_lr": 0.02, "total_steps": 300, "batch_size": 24}
    workload = small_workload(build_model=frozen, train_data=data, validation_data=data, config=config)
    with studied(workload, tmp_path) as session:
        before = torch.get_rng_state()
        session.facts(generalisation=collect_generalisation(session))
        assert torch.equal(before, torch.get_rng_state())
        found = session.record.facts["generalisation"]
        assert diagnose_generalisation_gap(session.record)[CODE].status == status
    assert found["last"]["train"]["examples"] == 96
    assert found["last"]["train"]["loss"] == pytest.approx(found["last"]["validation"]["loss"])


@pytest.mark.parametrize(("outputs", "classes"), [(1, None), (2, 2)])
def test_one_logit_for_two_classes_is_held_against_them_as_a_number_and_two_as_classes(
    tmp_path: Any, outputs: int, classes: int | None
) -> None:
    """No logit equals a class: its accuracy would be 0."""
    x = torch.randn(96, 3, generator=torch.Generator().manual_seed(0)).double()
    data = TensorDataset(x, (x.sum(1) > 0).long())

    def loss(o: torch.Tensor, b: Any) -> torch.Tensor:
        if outputs == 2:
            return nn.functional.cross_entropy(o, b[1], reduction="none")
        return nn.functional.binary_cross_entropy_with_logits(o.squeeze(-1), b[1].double(), reduction="none")

    workload = small_workload(
        build_model=lambda: nn.Linear(3, outputs), train_data=data, validation_data=data, metrics={}, loss=loss,
        config={"optimizer": "adam", "peak_lr": 0.02, "total_steps": 200},
    )  # fmt: skip
    with studied(workload, tmp_path) as session:
        found = collect_generalisation(session)["last"]["train"]
    assert found["classes"] == classes
    assert found["score"] > 0.7


def fit(score: float | None, *, best: float = 0.9, chance: float = 0.1, classes: int | None = 10, examples: int = 1000,
         selected: float | None = None, sticks: Any = None, kind: str | None = "classes") -> Finding:  # fmt: skip
    def side(value: float | None) -> dict[str, Any]:
        known = {} if value is None else {"score": value, "chance": chance, "classes": classes}
        return {"train": {"examples": examples, "loss": 1.0, "se": 0.01, **known}}

    trained = {"last": side(score), "selected": side(score if selected is None else selected)}
    yardsticks = {"classes": classes, "score": {"linear": best, "neighbours": 0.2}, "chance": chance}
    facts = {"generalisation": trained, "data": {"yardsticks": yardsticks if sticks is None else sticks}}
    facts["one_batch"] = {"loss": {"kind": kind}}
    return diagnose_underfit(Audit(facts=facts, workload="x"))[FITS]


@pytest.mark.parametrize(
    ("found", "status"),
    [
        # half the skill of 0.9 above 0.1 is 0.5, three quarters are 0.7; four standard errors on 1,000 examples are 0.063 and 0.06
        (fit(0.43), "fail"), (fit(0.45), "warn"), (fit(0.63), "warn"), (fit(0.65), "ok"),
        (fit(0.43, examples=100), "warn"), (fit(0.53, examples=100), "ok"), (fit(0.43, selected=0.8), "ok"),
        (fit(0.12, best=0.29), "ok"), (fit(0.12, best=0.31), "fail"), (fit(0.05, chance=0.05, best=0.26), "fail"),
        (fit(0.3, best=0.8, chance=0.0, classes=None), "fail"), (fit(0.5, best=0.6, chance=0.0, classes=None), "ok"),
        (fit(-0.7, best=0.8, chance=0.0, classes=None), "ok"), (fit(None), "ok"), (fit(0.1, sticks={"reason": "text"}), "ok"),
        (fit(0.01, kind="binary"), "fail"), (fit(0.01, kind="regression"), "ok"),  # of a reconstruction no output is a class
    ],
)  # fmt: skip
def test_a_share_of_the_skill_of_the_better_yardstick_is_asked_for(found: Finding, status: str) -> None:
    assert found.status == status, found.summary
    assert ("linear model: accuracy" in found.summary or "linear model: correlation" in found.summary) is (
        status != "ok"
    )
