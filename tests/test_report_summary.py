"""The head of the report says what was trained, found, to be changed, gained, and how sure that is."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from tests.helpers.records import MemoryRecord, diagnosis, empty, study
from workbench.findings.diagnosis import Diagnosis, Finding
from workbench.report.summary import summary_rows


def rows(record: MemoryRecord, said: Diagnosis) -> dict[str, str]:
    return summary_rows(record, said)


def test_every_line_has_the_numbers_of_this_study() -> None:
    record, said = study(), rows(study(), diagnosis())
    assert list(said) == ["Trained", "Found", "To change", "Gain", "How sure"]
    steps = int(record.trials["steps_run"].sum())
    assert said["Trained"].startswith(
        f"11 runs, {steps:,} steps together; the baseline is momentum, lr 0.02, batch size 64"
    )
    diverged = int((record.trials["state"] == "diverged").sum())
    assert f"{diverged} runs at larger learning rates ended non-finite." in said["Trained"]
    assert said["Found"] == "The loss jumps. The next lr is unstable."
    assert (
        said["To change"] == "peak_lr 0.02 → 0.08; warmup_steps 0 → 12; total_steps 120 → 132; max_grad_norm off → 0.5."
    )
    assert said["Gain"] == "validation/loss 0.2114 → 0.1007 (selected checkpoints, mean over 3 fresh seeds)."
    assert "1 of 9 questions could not be answered" in said["How sure"]


def test_the_chance_of_the_proof_is_said_and_the_worst_arm_counts() -> None:
    found = dict(diagnosis().recommendation or {})
    arms = [{**found["proof"]["arms"][0], "chance": 0.002}, {**found["proof"]["arms"][1], "chance": 0.041}]
    found["proof"] = {**found["proof"], "arms": arms, "level": 0.05}
    said = rows(study(), replace(diagnosis(), recommendation=found))["How sure"]
    assert said.startswith("p = 0.041 over n = 3 seeds (limit 0.05).")


def test_a_baseline_that_diverged_is_no_run_at_a_larger_learning_rate() -> None:
    record = study()
    record.trials.loc[record.trials["peak_lr"] <= record.config["peak_lr"], "state"] = "diverged"
    assert re.search(r" \d+ runs ended non-finite\.", rows(record, diagnosis())["Trained"])


def test_a_cause_is_mended_before_the_config_is_changed() -> None:
    scale = Finding(code="data.scale", status="warn", summary="One column is large.", advice=("Standardise it.",))
    found = replace(diagnosis(), findings=(*diagnosis().findings, scale))
    said = rows(study(), found)["To change"]
    assert said.startswith("First: Standardise it. The config by itself, without that: peak_lr 0.02 → 0.08; ")
    kept = replace(found, recommendation={**(found.recommendation or {}), "adopted": False, "changed": []})
    assert rows(study(), kept)["To change"] == "First: Standardise it."


def test_a_candidate_that_was_not_adopted_changes_nothing_and_gains_nothing() -> None:
    found = {**(diagnosis().recommendation or {}), "adopted": False, "changed": []}
    said = rows(study(), replace(diagnosis(), recommendation=found))
    assert said["To change"] == (
        "Nothing: keep the baseline's config. The best candidate, lr 0.08, warmup 10, was not proven better."
    )
    assert "Gain" not in said


def test_a_study_of_one_question_recommends_no_config_but_names_the_first_advice() -> None:
    said = rows(study(), replace(diagnosis(), recommendation=None))
    assert said["To change"] == "Not asked by this study. First to try: Try a warmup."
    assert said["How sure"].startswith("One seed: no proof.")


@pytest.mark.parametrize("state", ["stopped", "running"])
def test_an_unfinished_study_decides_nothing(state: str) -> None:
    record = study()
    record.trials.loc[[0, 3], "state"] = state
    said = rows(record, diagnosis())
    assert f"Not complete: 2 {state}; the same command goes on from there." in said["Trained"]
    assert said["To change"] == "Not decided: the study is not complete."
    assert "Gain" not in said


def test_without_trouble_the_measurements_are_what_was_found() -> None:
    fine = tuple(finding for finding in diagnosis().findings if finding.status == "ok")
    assert rows(study(), Diagnosis(findings=fine))["Found"] == "No trouble. The best lr is 0.08. Unstable from 0.16."


def test_an_empty_study_is_no_clean_bill() -> None:
    said = rows(empty(), Diagnosis(findings=()))
    assert said == {"Trained": "No run was recorded.", "Found": "Nothing was looked at."}


def test_what_a_record_says_is_redacted() -> None:
    nasty = Finding(code="a.b", status="fail", summary="<b>see</b> /home/ada/runs --token pw1")
    assert rows(study(), Diagnosis(findings=(nasty,)))["Found"] == "<b>see</b> ~/runs --token ***"
