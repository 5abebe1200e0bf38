"""Which steps a threshold clips, against NumPy and a count by hand."""

from __future__ import annotations

import numpy as np
import pytest

from workbench.curves.clip_threshold import ordinal
from workbench.findings.diagnosis import Diagnosis, Finding
from workbench.topics.clipping.clipped_steps import clipped_steps, listed_steps

NORMS = np.random.default_rng(3).lognormal(size=300)


@pytest.mark.parametrize("percentile", [10.0, 50.0, 99.0])
def test_the_steps_are_those_above_numpys_percentile(percentile: float) -> None:
    found = clipped_steps(np.arange(300) + 7, NORMS, percentile=percentile)
    limit = np.percentile(NORMS[30:], percentile)
    assert found.steps.tolist() == [k + 7 for k in range(300) if NORMS[k] > limit]
    assert found.chosen.clip_frac == pytest.approx(len(found.steps) / 300)


def test_the_stretch_of_the_diagnosis_is_used_for_its_own_trial_alone() -> None:
    evidence = {"trial": 4, "first_step": 100, "last_step": 199}
    said = Diagnosis(
        findings=(Finding(code="clipping.threshold", status="ok", summary="s", clause="F4.9", evidence=evidence),),
        workload="w", command=None,
    )  # fmt: skip
    own = clipped_steps(np.arange(300), NORMS, percentile=90.0, diagnosis=said, trial=4)
    assert own.chosen.threshold == np.percentile(NORMS[100:200], 90.0)
    other = clipped_steps(np.arange(300), NORMS, percentile=90.0, diagnosis=said, trial=5)
    assert other.chosen.threshold == np.percentile(NORMS[30:], 90.0)


@pytest.mark.parametrize("norms", [np.full(50, np.nan), np.full(50, 0.7), np.ones(3), np.empty(0)])
def test_without_a_threshold_nothing_is_clipped(norms: np.ndarray) -> None:
    found = clipped_steps(np.arange(norms.size), norms, percentile=90.0)
    assert found.chosen.threshold is None
    assert found.chosen.reason
    assert found.steps.size == 0


def test_a_norm_that_is_not_finite_is_no_clipped_step() -> None:
    norms = NORMS.copy()
    norms[[40, 41]] = np.inf, np.nan
    assert not {40, 41} & set(clipped_steps(np.arange(300), norms, percentile=50.0).steps.tolist())


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([], ""), ([5], "5"), ([1, 2, 3], "1 to 3"), ([3, 17, 40, 41, 42], "3, 17, 40 to 42"), ([1000, 1001], "1,000 to 1,001"),
        (list(range(0, 40, 2)), "0, 2, 4, 6, 8, 10, 12, 14 and 12 more"),
    ],
)  # fmt: skip
def test_neighbours_are_told_as_one_stretch(steps: list[int], words: str) -> None:
    assert listed_steps(steps) == words


@pytest.mark.parametrize(
    ("value", "said"), [(1, "1st"), (2, "2nd"), (11, "11th"), (53, "53rd"), (90, "90th"), (99.5, "99.5th")]
)
def test_percentiles_are_said_as_people_do(value: float, said: str) -> None:
    assert ordinal(value) == said
