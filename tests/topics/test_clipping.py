"""What clipped runs say: the threshold, cures, aggressive and masking clips, non-finite norms; and the figures."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import workbench as wb
from tests.helpers.clipped_records import (
    BLOWN,
    DIVERGED,
    FALLING,
    LIMIT,
    STEPS,
    clipped,
    descended,
    descent,
    norms_with,
    plain,
)
from tests.helpers.simulated_records import record, trial
from workbench.curves.clipping import clipped_runs
from workbench.studies.session import open_session
from workbench.topics.clipping.figures import clipped_steps
from workbench.topics.clipping.ladder import leading, masks
from workbench.workloads.analytic import quadratic, valley


def row(limit: float = 1.0, *, lr: float = 0.5, stage: str = "clipping", **changes: Any) -> dict[str, Any]:
    """A clipped run that is stable where the same without clipping diverges."""
    usual = {
        "trial": 1, "stage": stage, "seed": 0, "lr": lr, "max_grad_norm": limit, "outcome": "none", "lasting": False,
        "clip_frac": 0.1, "late_clip_frac": 0.1, "parked": False, "falling": False, "alternation": None,
        "twin": 0, "twin_outcome": "divergent", "twin_lasting": True,
    }  # fmt: skip
    return usual | changes


@pytest.mark.parametrize(("changes", "edge", "expected"), [
    ({"parked": True}, None, True), ({"parked": False}, None, False),
    ({"parked": True, "lasting": True}, None, False), ({"parked": True, "falling": True}, None, None),
    ({"parked": True, "falling": True, "alternation": -0.5}, None, None),
    ({"parked": True, "falling": True, "alternation": -0.98}, None, True),
    ({"parked": False, "falling": True}, None, False), ({"parked": True, "twin_lasting": False}, 0.1, False),
    ({"parked": True, "twin_lasting": None}, None, None), ({"parked": True, "twin_lasting": None}, 0.4, True),
    ({"parked": True, "twin_lasting": None}, 0.6, False),
])  # fmt: skip
def test_clipping_hides_an_lr_that_is_stable_only_while_clipped(
    changes: dict[str, Any], edge: float | None, expected: bool | None
) -> None:
    assert masks(row(**changes), edge) is expected


def test_a_tighter_one_leads_where_the_looser_ones_only_hide_or_clip_too_much() -> None:
    rows = [row(4.0, parked=True, late_clip_frac=1.0), row(3.0, clip_frac=0.5), row(2.0, clip_frac=0.49), row(1.0)]
    rung, why = leading(record([]), rows)
    assert (rung.max_grad_norm, why) == (2.0, "passes")
    rung, _ = leading(record([]), rows[:2])
    assert rung.max_grad_norm == 4.0, "without a cure the loosest that keeps training stable"
    lost = row(4.0, lasting=True, twin=None, twin_outcome=None, twin_lasting=None)
    assert leading(record([]), [lost, row(2.0)])[0].max_grad_norm == 2.0, "a run that is lost passes nothing"
    assert leading(record([]), rows, aggressive_frac=0.2)[0].max_grad_norm == 1.0


NORMS = np.random.default_rng(3).lognormal(size=300)


@pytest.mark.parametrize("percentile", [10.0, 99.0])
def test_the_steps_are_those_above_numpys_percentile(percentile: float) -> None:
    chosen, above = clipped_steps(np.arange(300) + 7.0, NORMS, percentile=percentile, diagnosis=None, trial=0)
    limit = np.percentile(NORMS[30:], percentile)
    assert above.tolist() == [k + 7 for k in range(300) if NORMS[k] > limit]
    assert chosen.clip_frac == pytest.approx(len(above) / 300)


def statuses(diagnosis) -> dict[str, str]:
    return {f.code.removeprefix("clipping."): f.status for f in diagnosis}


@pytest.mark.parametrize(("above", "status"), [(99, "ok"), (100, "warn"), (200, "warn")])
def test_from_half_of_the_steps_on_the_advice_is_a_lower_lr(above: int, status: str) -> None:
    """F4.12 with X36: at 50 % exactly the alarm is raised."""
    found = wb.clipping.diagnose(record([plain(), clipped(above)]))["clipping.aggressive"]
    assert (found.status, found.value) == (status, above / STEPS)
    assert bool(found.advice) is (status == "warn")
    if status == "warn":
        assert found.advice[0].startswith("Reduce peak_lr from 0.1 to about 0.0")
        assert "F4.12" in found.advice[0]


@pytest.mark.parametrize(
    ("optimizer", "times", "status"), [("sgd", 1, "warn"), ("adamw", 1, "ok"), ("adam", 4, "ok"), ("adamw", 20, "warn")]
)
def test_an_adaptive_rule_divides_a_clipping_out_that_is_not_far_off(optimizer: str, times: float, status: str) -> None:
    """All 200 steps are clipped, with norms of which the median is 1.41 times `times` the threshold."""
    limit, norms = 1 / times, {"grad_norm": norms_with(STEPS)}
    baseline = trial(FALLING, 0.1, stage="baseline", max_grad_norm=limit, columns=norms)
    found = wb.clipping.diagnose(record([baseline], peak_lr=0.1, max_grad_norm=limit, optimizer=optimizer))
    aggressive = found["clipping.aggressive"]
    assert (aggressive.status, aggressive.value) == (status, 1.0)
    assert [a.split()[0] for a in aggressive.advice] == {
        "ok": [],
        "warn": ["Reduce" if optimizer == "sgd" else "Raise"],
    }[status]


def ending(at: float) -> np.ndarray:
    """From 2.3 down to this, long before the last tenth."""
    return at + (2.3 - at) * np.exp(-np.arange(STEPS) / 10)


@pytest.mark.parametrize(
    ("lost", "status"), [([0.05], "ok"), ([0.09], "ok"), ([0.11], "warn"), ([0.5], "warn"), ([0.5, 0.05], "ok"), ([-0.2], "ok")]
)  # fmt: skip
def test_clipping_every_step_of_a_run_that_needs_none_is_worth_what_it_takes(lost: list[float], status: str) -> None:
    """Without it 2.0 are learned; of several seeds the one that loses least speaks."""
    runs = [plain(ending(0.3), seed=seed, max_grad_norm=None) for seed in range(len(lost))]
    runs += [clipped(STEPS, ending(0.3 + 2.0 * each), seed=seed, stage="baseline") for seed, each in enumerate(lost)]
    found = wb.clipping.diagnose(record(runs, peak_lr=0.1, max_grad_norm=1.0))["clipping.aggressive"]
    end = 0.3 + 2.0 * sum(lost) / len(lost)
    assert (found.status, found.value) == (status, 1.0)
    told = f"training is stable without: there the loss ends at 0.3 instead of {end:.3g}{': harmless' if status == 'ok' else ''}."
    assert found.summary.endswith(told), found.summary
    assert bool(found.advice) is (status == "warn")
    assert all(advice.startswith("Raise max_grad_norm to about") for advice in found.advice)


def test_a_cure_is_named_with_its_price() -> None:
    facts = {"clipping_lr": 0.4, "clipping_thresholds": [[90.0, 2.0], [75.0, 1.0]]}
    trials = [
        plain(), plain(BLOWN, lr=0.4), clipped(10, BLOWN, lr=0.4, limit=2.0), clipped(30, lr=0.4, limit=1.0),
    ]  # fmt: skip
    found = wb.clipping.diagnose(record(trials, facts=facts))
    cures = found["clipping.cures"]
    assert (cures.status, cures.value) == ("ok", 1.0)
    assert "(the 75th percentile) keeps lr 0.4 stable" in cures.summary
    assert "15% of the steps are clipped" in cures.summary
    ladder = cures.evidence["ladder"]
    assert [(r["percentile"], r["passes"], r["lasting"]) for r in ladder] == [(90.0, False, 1), (75.0, True, 0)]
    assert statuses(found)["masks_lr"] == "ok"


@pytest.mark.parametrize(("above", "end", "status"), [(70, 1.2, "warn"), (70, 0.02, "ok"), (10, 1.2, "ok")])
def test_a_bounded_run_that_learns_far_less_than_a_stable_lr_is_at_too_high_a_one(above: int, end: float, status: str):
    """A third of the steps is clipped, to the end; the twin at lr 0.1 ends near 0.02."""
    runs = [plain(), plain(BLOWN, lr=0.4), clipped(above, ending(end), lr=0.4)]
    found = wb.clipping.diagnose(record(runs, facts={"clipping_lr": 0.4}))
    assert [found[f"clipping.{name}"].status for name in ("masks_lr", "cures")] == [status] * 2
    masked = found["clipping.masks_lr"]
    assert f"{masked.value:.0%} of the last steps are clipped" in masked.summary
    assert ("too high. The loss ends at 1.2, no gain" in masked.summary) is (status == "warn")


def nonfinite(loss, lr, count, *, stage="lr_sweep"):
    norms = norms_with(20)[: len(loss)].copy()
    norms[len(loss) - count :] = math.inf
    return trial(loss, lr, stage=stage, columns={"grad_norm": norms})


@pytest.mark.parametrize(("trials", "status", "count"), [
    ([nonfinite(FALLING, 0.1, 0), nonfinite(FALLING, 0.4, 0)], "ok", 0),
    ([nonfinite(FALLING, 0.1, 0), nonfinite(DIVERGED, 0.4, 1)], "ok", 1),
    ([nonfinite(FALLING, 0.1, 0), nonfinite(FALLING, 0.4, 3)], "ok", 3),
    ([nonfinite(FALLING, 0.2, 0), nonfinite(FALLING, 0.4, 3)], "warn", 3),
    ([nonfinite(FALLING, 0.1, 2), nonfinite(DIVERGED, 0.4, 1)], "fail", 3), ([nonfinite(DIVERGED, 0.1, 1)], "ok", 1),
    ([nonfinite(FALLING, 0.4, 0), nonfinite(DIVERGED, 0.9, 1, stage="baseline")], "ok", 1),
])  # fmt: skip
def test_nonfinite_norms_are_counted_and_weighed_by_where_they_are(trials, status: str, count: int) -> None:
    found = wb.clipping.diagnose(record(trials, peak_lr=0.1, total_steps=STEPS))["clipping.nonfinite"]
    assert (found.status, found.value) == (status, count)
    assert bool(found.advice) is (status != "ok")
    assert sum(row["nonfinite"] for row in found.evidence["trials"]) == count


def run(workload: wb.Workload, out: Path, **settings: Any) -> tuple[wb.StudyRecord, wb.Diagnosis]:
    record = wb.clipping.Study(**settings).run(workload, wb.Trainer(device="cpu"), out=out / "s")
    return record, wb.clipping.diagnose(record)


def stages(record: wb.StudyRecord) -> list[str]:
    return record.trials["stage"].tolist()


def test_early_instability_is_cured_by_the_first_threshold(tmp_path: Path) -> None:
    """The valley is steep at its start only: from lr 2 / 201 it is unstable, and with clipping ten times that trains."""
    record, found = run(valley(), tmp_path, peak_lr=0.1)
    assert stages(record) == ["lr_sweep", "lr_sweep", *["clipping"] * 5]
    reference, control = record.trial(0), record.trial(1)
    assert control.trials["state"].item() == "diverged"
    norms = reference.steps["grad_norm"].to_numpy()
    limits = record.trials["max_grad_norm"][2:].to_numpy(dtype=float)
    assert limits == pytest.approx(np.percentile(norms[40:], [90, 75, 50, 25, 10]))
    cures = found["clipping.cures"]
    assert (cures.status, cures.value) == ("ok", limits[0])
    first = record.trial(2).steps
    assert found["clipping.aggressive"].value == pytest.approx((first["grad_norm"] > limits[0]).mean())
    assert found.verdict == "ok"
    assert first["loss"].iloc[-40:].mean() < 0.1 * reference.steps["loss"].iloc[-40:].mean()


def test_where_no_percentile_cures_smaller_thresholds_are_tried(tmp_path: Path) -> None:
    """At 100 times the unstable lr the percentiles, which differ by 15 %, all leap from wall to wall; a quarter does not."""
    record, found = run(valley(), tmp_path, peak_lr=100 * 2 / 201)
    limits = record.trials["max_grad_norm"][2:].to_numpy(dtype=float)
    assert limits[5:] == pytest.approx(limits[4] * np.array([0.5, 0.25, 0.125]))
    ladder = found["clipping.cures"].evidence["ladder"]
    assert [rung["cures"] for rung in ladder] == [False] * 6 + [True] * 2
    assert all(rung["masks"] for rung in ladder[:5])
    assert found["clipping.cures"].value == limits[6]
    assert found["clipping.aggressive"].value < 0.2
    none, _ = run(valley(), tmp_path / "none", peak_lr=100 * 2 / 201, halvings=0)
    assert stages(none).count("clipping") == 5


def test_the_lr_comes_from_a_sweep_in_the_same_folder(tmp_path: Path) -> None:
    workload = quadratic(dimension=2, condition=2.0, total_steps=60, peak_lr=0.25)
    with open_session(
        workload, stem="diagnosis", settings={}, trainer=wb.Trainer(device="cpu"), out=tmp_path / "s"
    ) as session:
        wb.lr_sweep.Study(lrs=(0.25, 1.0, 1.9, 2.1)).extend(session)
        wb.clipping.Study().extend(session)
        record = session.record
    clipped = record.trials[record.trials["stage"] == "clipping"]
    assert clipped["peak_lr"].unique() == pytest.approx([1.5 * math.sqrt(1.9 * 2.1)])
    assert record.facts["clipping_reference_lr"] == 0.25
    (control,) = record.trials["stage"][(record.trials["peak_lr"] > 2.5) & record.trials["max_grad_norm"].isna()]
    assert control == "clipping_control"
    edge = wb.lr_sweep.diagnose(record)["lr.unstable"].evidence
    assert (edge["lower"], edge["upper"]) == pytest.approx((1.9, 2.1)), "the control leaves the sweep as it was"
    assert len(clipped_runs(record)) == len(clipped)
    assert all(row["twin"] is not None for row in clipped_runs(record)), "and is found all the same"
    assert wb.clipping.diagnose(record)["clipping.cures"].status == "warn", "the edge of a quadratic is everywhere"


@pytest.mark.parametrize(("lr", "status"), [(2.5, "warn"), (1.9, "ok"), (0.5, "ok")])
def test_the_2_cycle_above_the_edge_is_seen_through(lr: float, status: str) -> None:
    """A loss that neither rises nor diverges, at an lr that is too high by a quarter; below the edge at 2 nothing is hidden."""
    runs = [descent(descended(1.0, 100, lr=1.9), lr=1.9), descent(descended(5.1, 100, lr=lr), lr=lr)]
    runs.append(descent(descended(5.1, 100, lr=lr, limit=LIMIT), lr=lr, limit=LIMIT))
    found = wb.clipping.diagnose(record(runs, peak_lr=1.9))
    finding = found["clipping.masks_lr"]
    assert finding.status == status
    if status == "warn":
        assert finding.value == 1.0
        assert "oscillating" in finding.summary
        assert "Reduce peak_lr from 2.5 below 2.1" in finding.advice[0], "geometric middle of 1.9 and 2.5"
        assert statuses(found)["cures"] == "warn", "what is masked is not cured"
