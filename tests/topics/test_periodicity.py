"""Periods: the finder on simulated curves, the verdict on what repeats and why, trained streams, and the figure."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.stats import binomtest

import workbench as wb
from tests.benchmarks.periodicity import by_steps_or_time, clean_alarms, planted_found
from tests.helpers.records import MemoryRecord, empty, one_trial
from tests.helpers.streams import digits_streams
from workbench.findings.finding import Finding
from workbench.plots.style import why_not_measured
from workbench.topics.data.order import label_order
from workbench.topics.periodicity.diagnose import periodic_series
from workbench.topics.periodicity.period import MIN_POINTS, find_period

SPACED = 4.0 * np.arange(150)
RNG = np.random.default_rng(0)


def wave(period: float, steps: np.ndarray = SPACED) -> np.ndarray:
    return np.sin(2 * np.pi * steps / period) + 0.3 * np.random.default_rng(0).standard_normal(len(steps))


def test_at_most_one_in_a_hundred_clean_curves_fires() -> None:
    hits = [hit for hits in clean_alarms(700).values() for hit in hits]
    assert len(hits) == 700
    assert sum(hits) / len(hits) <= 0.01


@pytest.mark.parametrize(
    ("size", "known", "found", "named"), [(2.0, True, 0.97, 0.97), (1.0, True, 0.85, 0.85), (2.0, False, 0.84, 0.66)]
)
def test_planted_patterns_are_found_and_named(size: float, known: bool, found: float, named: float) -> None:
    pairs = [pair for pairs in planted_found(200, size, known=known).values() for pair in pairs]
    for k, share in enumerate((found, named)):
        assert binomtest(sum(pair[k] for pair in pairs), len(pairs), share, alternative="less").pvalue > 0.05


def test_fixed_steps_show_what_fixed_times_blur() -> None:
    found = {way: np.mean(hits) for way, hits in by_steps_or_time(60, 1.0, 3.0).items()}
    assert found["steps"] > 0.9 > 0.1 > found["time, by number"]
    assert found["steps"] >= found["time, by step"]


@pytest.mark.parametrize("period", [19.0, 23.7, 60.0])
def test_the_period_is_named_with_and_without_an_epoch(period: float) -> None:
    for epoch in (period, None, 2.5 * period):
        found = find_period(SPACED, wave(period), epoch=epoch)
        assert found.period == pytest.approx(period, rel=0.02)
        assert found.p < 1e-4
        assert found.harmonic == (1 if epoch == period else None)
        assert found.size == pytest.approx(1 / np.sqrt(2), rel=0.15)


def test_what_the_evaluations_can_show() -> None:
    """Every 19 steps, looked at every 50, appears as a wave of 380 steps; looked at every 19 it cannot be seen at all."""
    steps = 50.0 * np.arange(150)
    assert find_period(steps, wave(19.0, steps), epoch=19.0).period == pytest.approx(19.0, rel=0.001)
    alone = find_period(steps, wave(19.0, steps)).period
    assert alone is not None
    assert abs(1 / alone - abs(1 / 19 - 3 / 50)) * 7500 < 1
    noise = RNG.standard_normal(150)
    assert not find_period(19.0 * np.arange(150), noise, epoch=19.0).epoch_seen
    assert find_period(20.0 * np.arange(150), noise, epoch=190.0).epoch_seen
    longer = np.append(SPACED, SPACED[-1] + 1)  # the last evaluation of a run comes early
    assert find_period(longer, wave(19.0, longer), epoch=19.0).period == pytest.approx(19.0, rel=0.01)
    many = np.arange(50_000.0)
    assert find_period(many, wave(500.0, many), epoch=500.0).period == pytest.approx(500.0, rel=0.001)
    for factor in (1e-200, 1e200):
        assert find_period(SPACED, factor * wave(19.0), epoch=19.0).period == pytest.approx(19.0, rel=0.02)
    cut = wave(19.0)
    cut[[3, 40]] = np.nan  # the longest finite stretch counts
    assert find_period(SPACED, cut, epoch=19.0).period == pytest.approx(19.0, rel=0.02)


def test_a_trend_a_jump_and_the_edge_of_stability_are_no_period() -> None:
    k = np.arange(150)
    edge = 1.0 + 0.1 * (-1.0) ** k + 0.01 * RNG.standard_normal(150)
    for values in (np.exp(-k / 30.0), np.where(k > 70, 1.0, 2.0), edge, k**2.0):
        assert find_period(SPACED, values, epoch=19.0).period is None


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (np.full(150, 0.5), "constant"),
        (np.full(150, np.nan), "0 finite values"),
        (np.arange(MIN_POINTS - 1.0), f"{MIN_POINTS - 1} finite values"),
        (np.where(np.arange(150) % 20 == 0, np.inf, 1.0), "19 finite values"),
    ],
)
def test_poor_series_are_not_measured(values: np.ndarray, said: str) -> None:
    found = find_period(4.0 * np.arange(len(values)), values, epoch=19.0)
    assert (found.period, said in str(found.reason)) == (None, True)


EPOCH, STEPS = 15, 600  # of the records: 1000 examples, batches of 64
K = np.arange(STEPS)
DECAY = 0.3 + np.exp(-K / 150)
NOISE = 0.02 * np.random.default_rng(0).standard_normal(STEPS)
BUMP = DECAY + NOISE + 0.1 * np.exp(-((K % EPOCH - 4) ** 2) / 6.0)
STAIRS = 2.3 - 0.05 * (K // EPOCH) + NOISE
SLOW = DECAY + NOISE + 0.08 * np.sin(2 * np.pi * K / 37.0)
REPEATED = {"same": True, "displacement": 0.0, "displacement_p": 0.0}
CLEAN_DATA: dict[str, Any] = {
    "examples": {"train": 1000, "validation": 100}, "reading": "fixed",
    "overlap": {"train_rows": 1000, "train_duplicates": 0, "near": True,
                "splits": {"validation": {"rows": 100, "exact": 0, "near": 0, "pairs": [], "same_label": 0, "labelled": 0}}},
    "order": {"source": "trainer", "examples": 1000, "indices": None, "labels": None, "stored_labels": None, "epochs": None},
    "classes": None, "scale": {"kind": "other", "median": None}, "workers": None,
}  # fmt: skip
LEAKED = CLEAN_DATA | {"overlap": CLEAN_DATA["overlap"] | {"splits": {"validation": {"rows": 100, "exact": 40, "near": 2, "pairs": [[3, 7, 0.0]], "same_label": 42, "labelled": 42}}}}  # fmt: skip
SORTED = CLEAN_DATA | {"order": CLEAN_DATA["order"] | {"source": "stream", "labels": label_order(np.repeat(np.arange(10), 100)), "epochs": REPEATED}}  # fmt: skip
CYCLIC = CLEAN_DATA | {"order": CLEAN_DATA["order"] | {"source": "loader", "indices": {"displacement": 1.0, "displacement_p": 0.5, "successions": 1, "successions_p": 0.6, "examples": 1000, "buffer": 450.0}, "epochs": REPEATED}}  # fmt: skip


def record(
    validation: np.ndarray | None = None, train: np.ndarray | None = None, *, data: Any = None, **changes: Any
) -> MemoryRecord:
    """A trial of 40 epochs; the validation loss is seen every 4 steps."""
    train = DECAY + 0.02 * np.random.default_rng(1).standard_normal(STEPS) if train is None else train
    made = one_trial(train, stage="baseline", total_steps=len(train), eval_every_steps=4, **changes)
    held = DECAY + 0.02 * np.random.default_rng(2).standard_normal(STEPS) if validation is None else validation
    made.evals = made.evals[made.evals["step"].isin(np.arange(0, STEPS, 4))].reset_index(drop=True)
    made.evals["value"] = held[made.evals["step"].to_numpy()]
    made.facts = {} if data is None else {"data": data}
    return made


def judged(made: MemoryRecord, **options: Any) -> Finding:
    (finding,) = wb.periodicity.diagnose(made, **options)
    assert (finding.code, finding.clause) == ("evaluation.periodic", "P2.9")
    assert finding.advice or finding.status not in ("warn", "fail")
    return finding


@pytest.mark.parametrize(
    ("data", "status", "cause", "words"),
    [
        (None, "warn", "unknown", "not examined"),
        (CLEAN_DATA, "warn", "unknown", "neither overlap"),
        (LEAKED, "fail", "leakage", "42.00% of validation"),
        (SORTED, "fail", "shuffling", "sorted by class"),
        (CYCLIC, "fail", "shuffling", "same order"),
        (SORTED | {"overlap": LEAKED["overlap"]}, "fail", "leakage and shuffling", "sorted by class"),
    ],
)
def test_a_pattern_in_validation_and_its_cause(data: Any, status: str, cause: str, words: str) -> None:
    finding = judged(record(BUMP, data=data))
    assert (finding.status, finding.evidence["cause"], finding.unit) == (status, cause, "steps")
    assert finding.value == pytest.approx(EPOCH, rel=0.02)
    assert words in finding.summary
    assert f"one epoch of {EPOCH}" in finding.summary


@pytest.mark.parametrize(
    ("train", "data", "status", "cause"),
    [
        (STAIRS, CLEAN_DATA, "ok", "memorisation"),
        (STAIRS, CYCLIC, "warn", "shuffling"),
        (DECAY + NOISE + 0.3 * np.random.default_rng(5).standard_normal(EPOCH)[K % EPOCH], None, "warn", "unknown"),
        (DECAY + NOISE + 0.3 * np.random.default_rng(5).standard_normal(EPOCH)[K % EPOCH], CYCLIC, "warn", "shuffling"),
        (DECAY + NOISE - 0.3 * (K % EPOCH) / EPOCH, None, "warn", "unknown"),
    ],
    ids=["stairs", "stairs, same order", "same batches", "same batches, known", "a rise where an epoch begins"],
)
def test_a_pattern_in_training_alone(train: np.ndarray, data: Any, status: str, cause: str) -> None:
    finding = judged(record(train=train, data=data))
    assert (finding.status, finding.evidence["cause"]) == (status, cause)
    assert (finding.evidence["staircase"] >= 0.5) == (train is STAIRS)
    assert finding.value == pytest.approx(EPOCH, rel=0.02)


def test_a_period_that_is_no_epoch_and_a_schedule_that_explains_it() -> None:
    made = record(SLOW)
    finding = judged(made)
    assert (finding.status, finding.value) == ("warn", pytest.approx(37, rel=0.03))
    assert f"an epoch is {EPOCH}" in finding.summary
    made.steps["lr"] = 0.02 * (1 + np.cos(2 * np.pi * K / 37.0))
    assert (judged(made).status, judged(made).evidence["cause"]) == ("ok", "schedule")
    made.steps["lr"] = np.linspace(0.02, 0.0, STEPS)
    assert judged(made).status == "warn"


def test_a_clean_run_is_silent_and_the_false_alarm_rate_is_of_all_its_curves_together() -> None:
    made = record(data=CLEAN_DATA)
    finding = judged(made)
    assert (finding.status, finding.threshold, finding.evidence["epoch_steps"]) == ("ok", 0.01, EPOCH)
    assert set(finding.evidence["series"]) == {"validation/loss", "train/loss"}
    assert judged(record(batch_size=1000)).evidence["epoch_steps"] is None, "full batches have no epoch"
    bounds = [s.found.bound for s in periodic_series(made, alpha=0.01)]
    alone = [find_period(s.steps, s.values, epoch=EPOCH, alpha=0.005).bound for s in periodic_series(made)]
    assert bounds == pytest.approx(alone), "1 % for two curves is half a per cent for each"
    made.evals = pd.concat([made.evals, made.evals.assign(metric="accuracy")], ignore_index=True)
    assert next(s.found.bound for s in periodic_series(made)) == pytest.approx(bounds[0] * 2 / 3)
    assert periodic_series(made, trial=7) == []


def _rarely() -> MemoryRecord:
    made = record()
    made.evals = made.evals[made.evals["step"] % 60 == 0]
    return made


def _once_an_epoch() -> MemoryRecord:
    made = one_trial(np.exp(-np.arange(1200) / 300), stage="baseline", total_steps=1200)
    made.evals = made.evals[made.evals["step"] % EPOCH == 0]
    made.evals["value"] = 1 + 0.1 * np.random.default_rng(0).standard_normal(len(made.evals))
    return made


def _never() -> MemoryRecord:
    made = record()
    made.evals = made.evals.iloc[:0]
    return made


@pytest.mark.parametrize(
    ("made", "status", "said"),
    [
        (_rarely, "ok", "10 evaluations are too few to show a repeating pattern. To look for one: evaluate every 3 steps"),
        (_once_an_epoch, "not_measured", "same point of each epoch"),
        (lambda: one_trial(1 + NOISE[:60] + 0.2 * np.sin(K[:60]), stage="baseline", total_steps=60), "ok", "the run is 3.9 epochs long"),
        (_never, "not_measured", "not evaluated"),
        (empty, "not_measured", "no trial with a curve"),
        (lambda: record(np.full(STEPS, np.nan)), "not_measured", "0 finite values"),
        (lambda: record(np.ones(STEPS)), "not_measured", "constant"),
    ],
)  # fmt: skip
def test_what_cannot_show_a_period_says_why(made: Any, status: str, said: str) -> None:
    finding = judged(made())
    assert (finding.status, said in finding.summary) == (status, True), finding.summary


def trained(kind: str, folder: Path, **changes: Any) -> Finding:
    """Train 600 steps, evaluate every fourth, and judge with what an audit of the data found."""
    workload = digits_streams()[kind]
    settings: dict[str, Any] = {"optimizer": "sgd", "peak_lr": 0.02, "total_steps": 600, "eval_every_steps": 4}
    config = workload.config.replace(**(settings | {"checkpoint_every_steps": 600} | changes))
    made = wb.Trainer(device="cpu", gradients="loop").run(workload, config, out=folder / "trial")
    facts = wb.data.audit(workload).facts
    return judged(MemoryRecord(made.trials, made.steps, made.evals, made.config, workload.name, None, facts))


@pytest.mark.parametrize(
    ("kind", "lr", "status", "cause", "epoch"),
    [("clean", 0.02, "ok", "", 0), ("sorted", 0.02, "fail", "shuffling", 19), ("leaked", 0.1, "fail", "leakage", 23)],
)
def test_trained_on_planted_bugs(tmp_path: Path, kind: str, lr: float, status: str, cause: str, epoch: int) -> None:
    """1,258 examples in batches of 64; with the validation rows among them 1,527."""
    finding = trained(kind, tmp_path, peak_lr=lr)
    assert finding.status == status
    assert cause in finding.evidence.get("cause", "")
    assert not epoch or finding.value == pytest.approx(epoch, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "lr"), [("sgd", 0.05), ("adam", 0.001)])
def test_a_stream_that_is_shuffled_anew_has_no_period(tmp_path: Path, optimizer: str, lr: float) -> None:
    assert trained("clean stream", tmp_path, optimizer=optimizer, peak_lr=lr).status == "ok"


def drawn(made: Any) -> Axes:
    ax = wb.periodicity.plot(made, wb.periodicity.diagnose(made), ax=Figure().subplots())
    ax.get_figure(root=True).savefig(io.BytesIO())
    return ax


def line(ax: Axes, start: str) -> Any:
    return next(each for each in ax.lines if str(each.get_label()).startswith(start))


def test_the_spectrum_has_the_planted_period_above_its_line_and_a_clean_run_below() -> None:
    ax = drawn(record(BUMP))
    curve, bound = line(ax, "validation/loss"), line(ax, "above it").get_ydata()[0]
    assert f"every {EPOCH} steps" in curve.get_label()
    periods, chances = np.asarray(curve.get_xdata()), np.asarray(curve.get_ydata())
    assert chances.min() < bound
    assert any(abs(k * periods[chances.argmin()] / EPOCH - 1) < 0.05 for k in (1, 2, 3))
    assert line(ax, "an epoch").get_xdata()[0] == EPOCH
    assert ax.get_ylim()[0] > ax.get_ylim()[1], "unlikely is up"
    clean = drawn(record())
    least = min(np.min(each.get_ydata()) for each in clean.lines if "/loss" in str(each.get_label()))
    assert least > line(clean, "above it").get_ydata()[0]
    assert why_not_measured(drawn(empty()))
    assert why_not_measured(drawn(record(np.full(600, np.nan), np.full(600, np.nan))))
