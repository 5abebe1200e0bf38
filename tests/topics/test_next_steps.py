"""The list of what to try: each line once, worst finding first, and what the study did about it already."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.helpers.simulated_records import record, trial
from workbench.findings.advice import ADVICE
from workbench.findings.diagnosis import Diagnosis
from workbench.findings.finding import Finding
from workbench.topics.recommendation.diagnose import next_steps

WARMUP, CLIPPING, LOWER = (str(ADVICE[name]) for name in ("warmup", "clipping", "lower_lr"))
FALLING = np.linspace(2, 1, 20)


def said(*findings: tuple[str, str, tuple[str, ...]], **recommendation: Any) -> Diagnosis:
    found = tuple(Finding(code=code, status=status, summary="", advice=advice) for code, status, advice in findings)
    return Diagnosis(findings=found, recommendation=recommendation or None)


def test_what_was_adopted_is_done_and_what_was_in_vain_is_tried():
    r = record([trial(FALLING, 0.1), trial(FALLING, 0.1, stage="clipping", max_grad_norm=1.0)])
    diagnosis = said(
        ("a.warn", "warn", (WARMUP, CLIPPING, LOWER)), adopted=True, changed=["warmup_steps"], config={"peak_lr": 0.1}
    )
    assert [(s.done, s.tried) for s in next_steps(r, diagnosis)] == [(True, False), (False, True), (False, False)]


def test_a_better_lr_that_the_proof_did_not_confirm_is_no_advice_any_more():
    for adopted, tried in ((False, True), (True, False)):
        diagnosis = said(
            ("lr.too_low", "warn", ("Raise peak_lr to 0.5.",)),
            candidate="lr 0.5",
            adopted=adopted,
            config={"peak_lr": 0.1},
        )
        (step,) = next_steps(record([trial(FALLING, 0.1)]), diagnosis)
        assert step.tried is tried


@pytest.mark.parametrize(("adopted", "changed", "lr", "done"), [
    (True, ["peak_lr"], 0.01, True), (True, ["peak_lr"], 1.0, False), (False, [], 0.1, False), (True, ["warmup_steps"], 0.1, False),
])  # fmt: skip
def test_a_smaller_lr_that_was_proven_better_is_no_last_resort(adopted, changed, lr, done):
    diagnosis = said(("a.fail", "fail", (LOWER,)), adopted=adopted, changed=changed, config={"peak_lr": lr})
    (step,) = next_steps(record([trial(FALLING, 0.1)]), diagnosis)
    assert step.done is done


@pytest.mark.parametrize(("code", "left"), [("units.dropped", 1), ("architecture.no_norm", 2)])
def test_no_more_lrs_are_advised_until_a_fault_is_mended(code: str, left: int):
    """The best one is another without the fault; a remark is none."""
    found = said((code, "warn", ("Mend it.",)), ("lr.unstable", "not_measured", ("Try lrs above 1.",)))
    lines = [step.line for step in next_steps(record([trial(FALLING, 0.1)]), found)]
    assert lines == ["Mend it.", "Try lrs above 1."][:left]


@pytest.mark.parametrize(("rule", "left"), [("momentum", True), ("adamw", False)])
def test_nobody_who_trains_with_adam_is_told_to_and_a_program_is_given_no_study_of_workloads(rule: str, left: bool):
    optimizer = str(ADVICE["optimizer"])
    r = record([trial(FALLING, 0.1)], facts={"program": {}}, optimizer=rule)
    lines = [step.line for step in next_steps(r, said(("a.warn", "warn", (WARMUP, optimizer))))]
    assert len(lines) == 1 + left
    assert all(line.endswith(".") and "Study" not in line for line in lines)
