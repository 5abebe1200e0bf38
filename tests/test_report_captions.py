"""The sentence under a figure holds the numbers that the figure draws, from this record."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from tests.helpers.records import diagnosis, empty, falling, one_trial, study
from workbench.findings.diagnosis import Diagnosis, Finding
from workbench.findings.topic import Figure
from workbench.report.figures import shown_here
from workbench.topics.lr_sweep.topic import few_runs, trained_lrs
from workbench.topics.registry import FIGURES

NOTHING = Diagnosis(findings=())


def figure(name: str, codes: tuple[str, ...]) -> Figure:
    """Return the figure of a name, of which other findings speak."""
    (found,) = (each for each in FIGURES if each.name == name)
    return replace(found, codes=codes)


def test_the_sweep_counts_learning_rates_and_runs_that_ended() -> None:
    said = shown_here(figure("lr-sweep", ("lr.best", "lr.unstable")), study(), diagnosis())
    assert said == (
        "6 learning rates from 0.01 to 0.32 in 7 runs; 1 run ended non-finite. The best lr is 0.08. Unstable from 0.16."
    )


def test_a_learning_rate_that_did_not_come_to_its_end_is_not_counted() -> None:
    record = study()
    assert trained_lrs(record) == [0.01, 0.02, 0.04, 0.08, 0.16, 0.32]
    record.trials.loc[record.trials["peak_lr"] == 0.04, "state"] = "stopped"
    assert trained_lrs(record) == [0.01, 0.02, 0.08, 0.16, 0.32]
    assert trained_lrs(empty()) == []


def test_the_probe_names_the_peak_that_a_coarse_interval_misses() -> None:
    said = shown_here(figure("probe", ()), study(), diagnosis())
    steps = np.arange(251)
    values = 2.3 * np.exp(-steps / 300) + 6.7 * np.exp(-(((steps - 20) / 8.0) ** 2))
    assert f"is largest, {values.max():.4g}, at step {values.argmax()}" in said
    assert f"every 100 steps would have shown at most {values[::100].max():.4g}." in said


def test_the_runs_far_above_the_best_are_named_one_by_one() -> None:
    assert (
        shown_here(figure("confirm", ()), study(), diagnosis())
        == "The loss at lr 0.4 ends non-finite; that at lr 0.8 ends non-finite."
    )


def test_the_norms_are_those_of_the_trial_that_is_drawn() -> None:
    values = np.full(101, 2.0)
    values[7], values[90:] = 50.0, 4.0
    record = one_trial(values, stage="baseline")
    assert (
        shown_here(figure("grad-norm", ()), record, NOTHING)
        == "Trial 0: the largest norm is 50, at step 7, 25 times the median 2."
    )
    said = shown_here(figure("grad-norm-histogram", ()), record, diagnosis())
    assert said == (
        "Over all 101 steps of trial 0 the median is 2 and the 90th percentile 4; the proposed clipping threshold is 0.5."
    )


def test_norms_that_are_not_finite_are_left_out() -> None:
    values = np.append(np.full(20, 3.0), [np.nan, np.inf])
    said = shown_here(figure("grad-norm-histogram", ()), one_trial(values, stage="baseline"), NOTHING)
    assert said == "Over all 20 steps of trial 0 the median is 3 and the 90th percentile 3."


def test_runs_that_end_no_lower_than_they_began_are_counted() -> None:
    assert (
        shown_here(figure("loss-curves", ()), one_trial(falling(0.1)), NOTHING)
        == "Of the study's 1 run, none ended no lower than it began."
    )
    assert (
        shown_here(figure("loss-curves", ()), one_trial(np.ones(30)), NOTHING)
        == "Of the study's 1 run, 1 ended no lower than it began."
    )


def test_the_proof_counts_seeds_and_minds_the_direction() -> None:
    said = shown_here(figure("proof", ()), study(), diagnosis())
    assert "better than the baseline under 3 of 3 seeds (mean 0.1033 against 0.2107)" in said
    record = SimpleNamespace(trials=study().trials, config={**study().config, "select_mode": "max"})
    assert "better than the baseline under 0 of 3 seeds" in shown_here(figure("proof", ()), record, diagnosis())


def test_the_schedule_is_told_with_its_warmup() -> None:
    said = shown_here(figure("schedule", ()), study(), diagnosis())
    assert said.startswith("Recommended: constant at a peak of 0.08 after 12 steps of warmup, 132 steps in all.")
    assert "without warmup, 120 steps in all" in said


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.name)
def test_an_empty_record_has_nothing_to_show_but_its_config(figure: Figure) -> None:
    assert (shown_here(figure, empty(), NOTHING) == "") is (figure.name != "schedule")


def test_what_was_not_seen_or_not_measured_is_not_repeated() -> None:
    findings = (
        Finding(code="a.seen", status="warn", summary="It jumps."),
        Finding(code="a.absent", status="ok", summary="Not seen in 4 trials."),
        Finding(code="a.unknown", status="not_measured", summary="Not measured: no trial."),
    )
    codes = tuple(finding.code for finding in findings)
    assert shown_here(figure("clipping", codes), study(), Diagnosis(findings=findings)) == "It jumps."


def test_every_figure_that_is_drawn_says_a_number_of_this_record() -> None:
    said = replace(diagnosis(), findings=diagnosis().findings)
    for each in FIGURES:
        if not each.own and each.name not in ("warmup", "clipping"):
            assert any(letter.isdigit() for letter in shown_here(each, study(), said)), each.name


def test_a_study_of_many_runs_shows_a_few_from_first_to_last() -> None:
    assert few_runs(study()) == [0, 2, 4, 6, 8, 10]
    assert few_runs(one_trial(falling(0.1))) is None
