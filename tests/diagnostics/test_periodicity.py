"""The verdict on a period: what separates poor shuffling, leaked rows, memory of seen examples, and a cyclic schedule."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.helpers.records import MemoryRecord, empty, one_trial
from workbench.findings.diagnosis import Finding
from workbench.topics.data.order import label_order
from workbench.topics.periodicity.diagnose import diagnose_periodicity, periodic_series
from workbench.topics.periodicity.period import find_period

CODE = "evaluation.periodic"
EPOCH, STEPS = 15, 600  # of the records: 1000 examples, batches of 64
K = np.arange(STEPS)
CLEAN_DATA: dict[str, Any] = {
    "examples": {"train": 1000, "validation": 100}, "reading": "fixed",
    "overlap": {"train_rows": 1000, "train_duplicates": 0, "near": True,
                "splits": {"validation": {"rows": 100, "exact": 0, "near": 0, "pairs": [], "same_label": 0, "labelled": 0}}},
    "order": {"source": "trainer", "examples": 1000, "indices": None, "labels": None, "stored_labels": None, "epochs": None},
    "classes": None, "scale": {"kind": "other", "median": None}, "workers": None,
}  # fmt: skip
LEAKED = CLEAN_DATA | {"overlap": CLEAN_DATA["overlap"] | {"splits": {"validation": {"rows": 100, "exact": 40, "near": 2, "pairs": [[3, 7, 0.0]], "same_label": 42, "labelled": 42}}}}  # fmt: skip
SORTED = CLEAN_DATA | {"order": CLEAN_DATA["order"] | {"source": "stream", "labels": label_order(np.repeat(np.arange(10), 100)), "epochs": {"same": True, "displacement": 0.0, "displacement_p": 0.0}}}  # fmt: skip
CYCLIC = CLEAN_DATA | {"order": CLEAN_DATA["order"] | {"source": "loader", "indices": {"displacement": 1.0, "displacement_p": 0.5, "successions": 1, "successions_p": 0.6, "examples": 1000, "buffer": 450.0}, "epochs": {"same": True, "displacement": 0.0, "displacement_p": 0.0}}}  # fmt: skip


def noise(seed: int = 0) -> np.ndarray:
    return 0.02 * np.random.default_rng(seed).standard_normal(STEPS)


def decay() -> np.ndarray:
    return 0.3 + np.exp(-K / 150)


def bump() -> np.ndarray:
    """Validation bumps once an epoch."""
    return 0.1 * np.exp(-((K % EPOCH - 4) ** 2) / 6.0)


def stairs() -> np.ndarray:
    """Training loss that falls where an epoch begins and is flat within it."""
    return 2.3 - 0.05 * (K // EPOCH)


def record(
    validation: np.ndarray | None = None, train: np.ndarray | None = None, *, data: Any = None, **changes: Any
) -> MemoryRecord:
    """A trial of 40 epochs; the validation loss is seen every 4 steps."""
    train = decay() + noise(1) if train is None else train
    made = one_trial(train, stage="baseline", total_steps=len(train), eval_every_steps=4, **changes)
    held = decay() + noise(2) if validation is None else validation
    made.evals = made.evals[made.evals["step"].isin(np.arange(0, STEPS, 4))].reset_index(drop=True)
    made.evals["value"] = held[made.evals["step"].to_numpy()]
    made.facts = {} if data is None else {"data": data}
    return made


def said(made: MemoryRecord, **options: Any) -> Finding:
    (finding,) = diagnose_periodicity(made, **options)
    assert finding.code == CODE
    assert finding.clause == "P2.9"
    assert finding.advice or finding.status not in ("warn", "fail")
    return finding


def test_a_clean_run_is_silent_and_shows_its_numbers() -> None:
    finding = said(record(data=CLEAN_DATA))
    assert finding.status == "ok"
    assert finding.threshold == 0.01
    assert set(finding.evidence["series"]) == {"validation/loss", "train/loss"}
    assert finding.evidence["epoch_steps"] == EPOCH


@pytest.mark.parametrize(
    ("data", "status", "cause", "words"),
    [
        (None, "warn", "unknown", "nobody has looked"),
        (CLEAN_DATA, "warn", "unknown", "neither overlap"),
        (LEAKED, "fail", "leakage", "42.00% of validation"),
        (SORTED, "fail", "shuffling", "sorted by class"),
        (CYCLIC, "fail", "shuffling", "same order"),
        (SORTED | {"overlap": LEAKED["overlap"]}, "fail", "leakage and shuffling", "sorted by class"),
    ],
)
def test_a_pattern_in_validation_and_its_cause(data: Any, status: str, cause: str, words: str) -> None:
    finding = said(record(decay() + bump() + noise(), data=data))
    assert (finding.status, finding.evidence["cause"]) == (status, cause)
    assert words in finding.summary
    assert finding.value == pytest.approx(EPOCH, rel=0.02)
    assert finding.unit == "steps"
    assert f"one epoch of {EPOCH}" in finding.summary


def test_a_period_that_is_no_epoch_says_so() -> None:
    finding = said(record(decay() + noise() + 0.08 * np.sin(2 * np.pi * K / 37.0)))
    assert finding.value == pytest.approx(37, rel=0.03)
    assert f"an epoch is {EPOCH}" in finding.summary


def test_memory_at_epoch_boundaries_is_healthy() -> None:
    finding = said(record(train=stairs() + noise(), data=CLEAN_DATA))
    assert (finding.status, finding.evidence["cause"]) == ("ok", "memorisation")
    assert finding.evidence["staircase"] > 0.8
    assert finding.value == pytest.approx(EPOCH, rel=0.02)


def test_batches_in_the_same_order_are_no_memory() -> None:
    each = 0.3 * np.random.default_rng(5).standard_normal(EPOCH)
    train = decay() + noise() + each[K % EPOCH]
    unknown = said(record(train=train))
    assert (unknown.status, unknown.evidence["cause"]) == ("warn", "unknown")
    assert unknown.evidence["staircase"] < 0.5
    known = said(record(train=train, data=CYCLIC))
    assert (known.status, known.evidence["cause"]) == ("warn", "shuffling")
    assert "same order" in known.summary
    assert said(record(train=stairs() + noise(), data=CYCLIC)).status == "warn"


def test_a_rise_where_an_epoch_begins_is_no_memory() -> None:
    train = decay() + noise() - 0.3 * (K % EPOCH) / EPOCH
    assert said(record(train=train)).evidence["staircase"] == 0.0


def test_a_cyclic_schedule_explains_it() -> None:
    made = record(decay() + noise() + 0.08 * np.sin(2 * np.pi * K / 37.0))
    made.steps["lr"] = 0.02 * (1 + np.cos(2 * np.pi * K / 37.0))
    finding = said(made)
    assert (finding.status, finding.evidence["cause"]) == ("ok", "schedule")
    made.steps["lr"] = np.linspace(0.02, 0.0, STEPS)
    assert said(made).status == "warn"


def test_the_false_alarm_rate_is_of_all_curves_together() -> None:
    bounds = [s.found.bound for s in periodic_series(record(), alpha=0.01)]
    halved = [s.found.bound for s in periodic_series(record(), alpha=0.02)]
    assert halved == pytest.approx([2 * b for b in bounds])
    alone = [find_period(s.steps, s.values, epoch=EPOCH, alpha=0.005).bound for s in periodic_series(record())]
    assert bounds == pytest.approx(alone), "1 % for two curves is half a per cent for each"
    made = record()
    more = made.evals.assign(metric="accuracy")
    made.evals = type(more)(np.concatenate([made.evals.to_numpy(), more.to_numpy()]), columns=more.columns)
    assert len(periodic_series(made)) == 3
    assert periodic_series(made)[0].found.bound == pytest.approx(bounds[0] * 2 / 3)


def test_too_few_evaluations_say_how_often_to_evaluate() -> None:
    made = record()
    made.evals = made.evals[made.evals["step"] % 60 == 0]
    finding = said(made)
    assert finding.status == "ok", "who evaluates ten times has nothing to mend"
    assert "Does not apply: 10 evaluations are too few" in finding.summary
    assert "Evaluate every 3 steps" in finding.summary


def test_evaluating_once_an_epoch_sees_nothing() -> None:
    steps = 40 * EPOCH * 2
    made = one_trial(np.exp(-np.arange(steps) / 300), stage="baseline", total_steps=steps)
    made.evals = made.evals[made.evals["step"] % EPOCH == 0]
    made.evals["value"] = 1 + 0.1 * np.random.default_rng(0).standard_normal(len(made.evals))
    finding = said(made)
    assert finding.status == "not_measured"
    assert "same place of each epoch" in finding.summary


def test_too_few_epochs() -> None:
    made = one_trial(1 + noise()[:60], stage="baseline", total_steps=60)
    finding = said(made)
    assert finding.status == "ok"
    assert "Does not apply: 3.9 epochs" in finding.summary


@pytest.mark.parametrize("values", [np.full(STEPS, np.nan), np.ones(STEPS), np.zeros(STEPS)])
def test_poor_validation_is_not_measured(values: np.ndarray) -> None:
    assert said(record(values)).status == "not_measured"


def test_an_empty_record_and_one_without_evaluations() -> None:
    assert said(empty()).status == "not_measured"
    made = record()
    made.evals = made.evals.iloc[:0]
    finding = said(made)
    assert finding.status == "not_measured"
    assert "not evaluated" in finding.summary


def test_full_batches_have_no_epoch() -> None:
    made = record(batch_size=1000)
    assert said(made).evidence["epoch_steps"] is None


def test_a_trial_can_be_named() -> None:
    assert {s.trial for s in periodic_series(record(), trial=0)} == {0}
    assert periodic_series(record(), trial=7) == []


def test_a_pattern_in_fewer_epochs_than_it_has_to_repeat_is_none() -> None:
    """Swings of an optimizer in a short run, which has no evaluations enough either, as against the same over 40 epochs."""
    short = one_trial(1 + noise()[:60] + 0.2 * np.sin(K[:60]), stage="baseline", total_steps=60)
    finding = said(short)
    assert (finding.status, "Does not apply: 3.9 epochs" in finding.summary) == ("ok", True)
    assert said(record(decay() + noise(2) + bump())).status == "warn"
