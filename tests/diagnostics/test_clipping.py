"""`diagnose_clipping` on planted runs: healthy at a tenth, alarmed at half, not fooled by a masked lr, honest about NaN."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

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
from workbench.topics.clipping.diagnose import CODES, diagnose_clipping


def statuses(diagnosis) -> dict[str, str]:
    return {f.code.removeprefix("clipping."): f.status for f in diagnosis}


@pytest.mark.parametrize("limit", [1e-4, 1.0, 3e5])
def test_exactly_a_tenth_clipped_on_heavy_tailed_norms_is_healthy(limit: float) -> None:
    found = diagnose_clipping(record([plain(), clipped(20, limit=limit)]))
    assert found["clipping.aggressive"].value == pytest.approx(0.1, abs=1e-12)
    assert set(statuses(found).values()) == {"ok"}
    assert "Nothing to cure" in found["clipping.cures"].summary
    assert not any(f.advice for f in found)


@pytest.mark.parametrize(("above", "status"), [(99, "ok"), (100, "warn"), (200, "warn")])
def test_from_half_of_the_steps_on_the_advice_is_a_lower_lr(above: int, status: str) -> None:
    """F4.12 with X36: at 50 % exactly the alarm is raised."""
    found = diagnose_clipping(record([plain(), clipped(above)]))["clipping.aggressive"]
    assert (found.status, found.value) == (status, above / STEPS)
    assert bool(found.advice) is (status == "warn")
    if status == "warn":
        assert found.advice[0].startswith("Reduce peak_lr from 0.1 to about 0.0")
        assert "F4.12" in found.advice[0]


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
    found = diagnose_clipping(record(runs, peak_lr=0.1, max_grad_norm=1.0))["clipping.aggressive"]
    end = 0.3 + 2.0 * sum(lost) / len(lost)
    assert (found.status, found.value) == (status, 1.0)
    told = f"training is stable without: there the loss ends at 0.3 instead of {end:.3g}{': harmless' if status == 'ok' else ''}."
    assert found.summary.endswith(told), found.summary
    assert bool(found.advice) is (status == "warn")
    assert all(advice.startswith("Raise max_grad_norm to about") for advice in found.advice)


def test_the_proposed_threshold_is_the_90th_percentile_of_the_stable_run() -> None:
    norms = norms_with(20)
    unstable = trial(BLOWN, 0.4, columns={"grad_norm": np.full(STEPS, 1e5)})
    found = diagnose_clipping(record([unstable, plain()], peak_lr=0.4))["clipping.threshold"]
    assert found.value == pytest.approx(np.percentile(norms[20:], 90))
    assert found.evidence["trial"] == 1
    assert found.evidence["ratio"] == pytest.approx(found.value / np.median(norms[20:]))
    half = diagnose_clipping(record([plain()]), percentile=50.0)["clipping.threshold"]
    assert half.value == pytest.approx(np.median(norms[20:]))
    assert "50th percentile" in half.summary


def test_a_cure_is_named_with_its_price() -> None:
    facts = {"clipping_lr": 0.4, "clipping_thresholds": [[90.0, 2.0], [75.0, 1.0]]}
    trials = [
        plain(), plain(BLOWN, lr=0.4), clipped(10, BLOWN, lr=0.4, limit=2.0), clipped(30, lr=0.4, limit=1.0),
    ]  # fmt: skip
    found = diagnose_clipping(record(trials, facts=facts))
    cures = found["clipping.cures"]
    assert (cures.status, cures.value) == ("ok", 1.0)
    assert "(the 75th percentile) keeps lr 0.4 stable" in cures.summary
    assert "15% of the steps are clipped" in cures.summary
    ladder = cures.evidence["ladder"]
    assert [(r["percentile"], r["passes"], r["lasting"]) for r in ladder] == [(90.0, False, 1), (75.0, True, 0)]
    assert statuses(found)["masks_lr"] == "ok"


def test_a_ladder_that_fails_says_so() -> None:
    trials = [plain(), plain(BLOWN, lr=0.4)] + [clipped(150, BLOWN, lr=0.4, limit=c) for c in (2.0, 1.0, 0.5)]
    found = diagnose_clipping(record(trials))
    assert "any of 3 thresholds down to 0.5 does not let lr 0.4 train" in found["clipping.cures"].summary
    assert statuses(found) == {
        "threshold": "ok", "cures": "warn", "aggressive": "warn", "masks_lr": "ok", "nonfinite": "ok",
    }  # fmt: skip


def test_a_clipped_run_that_does_not_move_is_not_called_unstable() -> None:
    still = clipped(STEPS, np.full(STEPS, FALLING[0]), lr=0.4)
    found = diagnose_clipping(record([plain(), plain(lr=0.4), still]))["clipping.cures"]
    assert found.evidence["ladder"][0]["lasting"] == 1, "it ends where it began"
    assert found.status == "warn"
    assert "stable without clipping, and learns next to nothing with it at 1." in found.summary


def test_clipping_that_hurts_where_nothing_was_wrong_warns() -> None:
    found = diagnose_clipping(record([plain(), plain(lr=0.4), clipped(30, BLOWN, lr=0.4)]))["clipping.cures"]
    assert found.status == "warn"
    assert "stable without clipping, and unstable with it" in found.summary


def test_a_seed_that_was_not_run_without_clipping_hides_no_other() -> None:
    """The seeds of a proof are clipped as the baseline is; the run without clipping is made for the first one."""
    runs = [plain(), plain(lr=0.4), clipped(30, lr=0.4), clipped(30, lr=0.4, seed=1)]
    for twins, status in ((runs, "ok"), (runs[2:], "not_measured")):
        assert diagnose_clipping(record(twins, peak_lr=0.4))["clipping.cures"].status == status


def test_the_2_cycle_above_the_edge_is_seen_through() -> None:
    """A loss that neither rises nor diverges, at an lr that is too high by a quarter (lr 2.5, curvature 1)."""
    masked = [
        descent(descended(1.0, 100, lr=1.9), lr=1.9),
        descent(descended(5.1, 100)),
        descent(descended(5.1, 100, limit=LIMIT), limit=LIMIT),
    ]
    found = diagnose_clipping(record(masked, peak_lr=1.9))
    finding = found["clipping.masks_lr"]
    assert finding.status == "warn"
    assert finding.value == 1.0
    assert "swinging to and fro" in finding.summary
    assert "Reduce peak_lr from 2.5 below 2.1" in finding.advice[0], "geometric middle of 1.9 and 2.5"
    assert statuses(found)["cures"] == "warn", "what is masked is not cured"


@pytest.mark.parametrize("lr", [0.5, 1.0, 1.9])
def test_the_same_below_the_edge_hides_nothing(lr: float) -> None:
    healthy = [
        descent(descended(5.1, 200, lr=lr), lr=lr),
        descent(descended(5.1, 200, lr=lr, limit=LIMIT), lr=lr, limit=LIMIT),
    ]
    assert diagnose_clipping(record(healthy, peak_lr=lr))["clipping.masks_lr"].status == "ok"


def test_without_the_unclipped_run_a_sweep_says_whether_the_lr_is_too_high() -> None:
    sweep = [descent(descended(5.1, 100, lr=lr), lr=lr) for lr in (0.5, 1.0, 1.9, 2.1)]
    masked = {**descent(descended(5.1, 100, limit=LIMIT), limit=LIMIT), "stage": "fix"}
    found = diagnose_clipping(record([*sweep, masked], peak_lr=1.0))
    assert found["clipping.masks_lr"].status == "warn"
    assert found["clipping.cures"].status == "not_measured"
    alone = diagnose_clipping(record([masked], peak_lr=2.5))
    assert alone["clipping.masks_lr"].status == "not_measured"
    assert "run it without, or sweep" in alone["clipping.masks_lr"].summary


def test_a_run_that_still_learns_when_it_ends_is_not_judged() -> None:
    """Threshold far too small: all steps are clipped, and the way down is longer than the run."""
    travelling = [descent(descended(5.1, 100)), descent(descended(5.1, 100, limit=0.01), limit=0.01)]
    found = diagnose_clipping(record(travelling, peak_lr=2.5))["clipping.masks_lr"]
    assert found.status == "not_measured"
    assert "still comes down" in found.summary


def nonfinite(loss, lr, count, *, stage="lr_sweep"):
    norms = norms_with(20)[: len(loss)].copy()
    norms[len(loss) - count :] = math.inf
    return trial(loss, lr, stage=stage, columns={"grad_norm": norms})


@pytest.mark.parametrize(
    ("trials", "status", "count"),
    [
        ([nonfinite(FALLING, 0.1, 0), nonfinite(FALLING, 0.4, 0)], "ok", 0),
        ([nonfinite(FALLING, 0.1, 0), nonfinite(DIVERGED, 0.4, 1)], "ok", 1),
        ([nonfinite(FALLING, 0.1, 0), nonfinite(FALLING, 0.4, 3)], "ok", 3),
        ([nonfinite(FALLING, 0.2, 0), nonfinite(FALLING, 0.4, 3)], "warn", 3),
        ([nonfinite(FALLING, 0.1, 2), nonfinite(DIVERGED, 0.4, 1)], "fail", 3),
        ([nonfinite(DIVERGED, 0.1, 1)], "ok", 1),
        ([nonfinite(FALLING, 0.4, 0), nonfinite(DIVERGED, 0.9, 1, stage="baseline")], "ok", 1),
    ],
)
def test_nonfinite_norms_are_counted_and_weighed_by_where_they_are(trials, status: str, count: int) -> None:
    found = diagnose_clipping(record(trials, peak_lr=0.1, total_steps=STEPS))["clipping.nonfinite"]
    assert (found.status, found.value) == (status, count)
    assert bool(found.advice) is (status != "ok")
    assert sum(row["nonfinite"] for row in found.evidence["trials"]) == count


@pytest.mark.parametrize(
    ("norms", "why"),
    [
        (np.zeros(STEPS), "all gradient norms are 0"),
        (np.full(STEPS, 3.0), "all gradient norms are equal"),
        (np.full(STEPS, math.nan), "is finite"),
    ],
)
def test_norms_that_choose_nothing(norms: np.ndarray, why: str) -> None:
    found = diagnose_clipping(record([trial(FALLING, 0.1, columns={"grad_norm": norms})]))["clipping.threshold"]
    assert (found.status, found.value) == ("not_measured", None)
    assert why in found.summary


def test_a_run_that_is_too_short_chooses_nothing() -> None:
    found = diagnose_clipping(record([trial(FALLING[:15], 0.1, columns={"grad_norm": norms_with(20)[:15]})]))
    assert "and 20 are needed" in found["clipping.threshold"].summary


@pytest.mark.parametrize("trials", [[], [plain()], [clipped(20)], [clipped(20, stage="baseline")], [plain(BLOWN)]])
def test_each_code_is_there_once_and_is_json(trials) -> None:
    found = diagnose_clipping(
        record(trials, max_grad_norm=1.0 if trials and "max_grad_norm" in trials[0]["config"] else None)
    )
    assert tuple(f.code for f in found) == tuple(CODES)
    assert all(f.clause for f in found)
    json.dumps(found.to_dict(), allow_nan=False)
    if not trials:
        assert set(statuses(found).values()) == {"not_measured"}


def test_drifting_norms_are_said_to_have_no_one_threshold() -> None:
    norms = norms_with(20)
    drifting = trial(FALLING, 0.1, columns={"grad_norm": norms * 10.0 ** (-np.arange(STEPS) / 50)})
    said = diagnose_clipping(record([drifting]))["clipping.threshold"].summary
    assert "no one threshold fits the whole run" in said
    assert "no one threshold" not in diagnose_clipping(record([plain()]))["clipping.threshold"].summary


@pytest.mark.parametrize(("factor", "than"), [(0.5, "lower than at lr 0.1"), (1.5, "no lower than at lr 0.1")])
def test_a_cure_says_whether_the_stable_lr_trains_as_well(factor: float, than: str) -> None:
    trials = [plain(), plain(BLOWN, lr=0.4), clipped(30, factor * FALLING, lr=0.4)]
    assert than in diagnose_clipping(record(trials, peak_lr=0.1))["clipping.cures"].summary


@pytest.mark.parametrize(("loss", "said"), [(FALLING, ": an odd way"), (BLOWN, ", and not even that lets it train")])
def test_what_was_not_run_without_clipping_is_not_said_to_fail(loss: np.ndarray, said: str) -> None:
    found = diagnose_clipping(record([plain(), clipped(150, loss, lr=0.4, stage="fix")], peak_lr=0.1))
    assert said in found["clipping.aggressive"].summary
    assert ("not even" in found["clipping.aggressive"].summary) is (loss is BLOWN)
    assert found["clipping.cures"].status == "not_measured"
