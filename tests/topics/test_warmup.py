"""Which warmup is the shortest that trains, what that asks of the run, and the study on workloads whose shortest warmup is arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import workbench as wb
from tests.helpers.simulated_records import record, trial
from workbench.topics.warmup.diagnose import Length, NextRun, WarmupSearch, next_run, read_searches
from workbench.workloads.analytic import quadratic, valley

UNSTABLE = 0.1
BLOWN = np.r_[2.3, 50.0, np.inf]


def falling(total, level=0.5, rate=30):
    return level + (2.3 - level) * np.exp(-np.arange(total) / rate)


def short(steps, *, passes, multiple=10.0, **more):
    loss = falling(3 * steps) if passes else BLOWN
    return trial(loss, multiple * UNSTABLE, stage="warmup", warmup_steps=steps, total_steps=3 * steps, **more)


def full(steps, *, passes, total, multiple=10.0, level=0.1, **more):
    loss = falling(total + steps, level) if passes else np.r_[falling(total // 2), np.full(total // 2 + steps, 9.0)]
    return trial(loss, multiple * UNSTABLE, stage="warmup_full", warmup_steps=steps, total_steps=total + steps, **more)


def study(*tried, total=1000, cap=None, dropped=(), facts=None, **more):
    known = {"unstable_lr": UNSTABLE, "source": "given", "cap": total // 10 if cap is None else cap}
    known |= {"dropped": list(dropped), "stopped": None} | (facts or {})
    without = [trial(falling(total), 0.02, stage="baseline"), trial(falling(total, 0.6), 0.05)]
    return record([*without, *tried], total_steps=total, peak_lr=0.02, facts={"warmup": known}, **more)


GOOD = (short(10, passes=False), short(20, passes=True), full(20, passes=True, total=1000))


def test_the_shortest_with_its_bracket():
    finding = wb.warmup.diagnose(study(*GOOD, dropped=[1000]))["warmup.shortest"]
    assert (finding.status, finding.value, finding.unit) == ("ok", 20.0, "steps")
    assert (finding.evidence["passes"], finding.evidence["fails"], finding.evidence["full_trial"]) == (20, 10, 4)
    assert (finding.evidence["lr"], finding.evidence["multiple"]) == pytest.approx((1.0, 10.0))
    assert finding.evidence["total_steps"] == 1020
    assert "10 fail" in finding.summary
    assert "not tried: 1,000 steps" in finding.summary


def test_a_later_blow_up_takes_a_length_out_and_less_than_ten_times_is_not_enough():
    tried = [short(10, passes=False), short(20, passes=True), short(80, passes=True)]
    r = study(*tried, full(20, passes=False, total=1000), full(80, passes=True, total=1000))
    finding = wb.warmup.diagnose(r)["warmup.shortest"]
    assert (finding.value, finding.evidence["fails"]) == (80.0, 20)
    near = [short(100, passes=True, multiple=4), full(100, passes=True, total=1000, multiple=4)]
    finding = wb.warmup.diagnose(study(short(100, passes=False), *near))["warmup.insufficient"]
    assert (finding.status, finding.threshold, finding.value) == ("warn", 10.0, pytest.approx(4.0)), "F3.3"
    assert finding.advice


@pytest.mark.parametrize(("steps", "lengthen", "cap"), [
    (500, "ok", "ok"), (510, "warn", "ok"), (1000, "warn", "ok"), (1001, "warn", "warn"),
])  # fmt: skip
def test_above_five_percent_the_run_has_to_grow_and_above_ten_it_is_too_long(steps, lengthen, cap):
    """F3.14: 5.0 % gives no notice, 5.1 % does. F3.13: 10,000 + 1,000 = 11,000. F3.10: a tenth at most."""
    r = study(short(steps, passes=True), full(steps, passes=True, total=10_000), total=10_000, cap=3000)
    found = wb.warmup.diagnose(r)
    finding = found["warmup.lengthen"]
    assert (finding.status, finding.value) == (lengthen, steps / 10_000)
    assert (found["warmup.over_cap"].status, found["warmup.over_cap"].value) == (cap, steps / 10_000)
    assert wb.warmup.diagnose(r, cap_frac=0.3)["warmup.over_cap"].status == "ok"
    if steps == 1000:
        assert "10,000 + 1,000 = 11,000" in finding.summary
        assert "11,000" in finding.advice[0]


TOTAL = 400
AT_EDGE = [trial(falling(TOTAL, level), lr) for lr, level in ((0.1, 1.2), (0.2, 0.8), (0.4, 0.5))]
FAR = [trial(falling(TOTAL, level), lr) for lr, level in ((0.1, 1.2), (0.2, 0.5), (0.4, 0.8), (0.8, 1.0))]
JUMP = np.r_[falling(200), np.full(200, 9.0)]
STUCK = np.r_[2.3, 60.0, np.full(TOTAL - 2, 2.4)]


def signed(trials, edge, confirm):
    runs = [*trials, trial(BLOWN, edge), *(trial(loss, lr, stage="confirm") for loss, lr in confirm)]
    return record(runs, total_steps=TOTAL, peak_lr=0.1)


@pytest.mark.parametrize(("r", "status", "said"), [
    (signed(AT_EDGE, 0.45, [(STUCK, 2.0), (STUCK, 4.0)]), "warn", "F1.12"),
    (signed(FAR, 1.6, [(JUMP, 1.0), (STUCK, 2.0)]), "warn", "F1.13"),
    (signed(AT_EDGE, 0.45, [(JUMP, 2.0)]), "warn", "F1.12) and"),
    (signed(FAR, 1.6, [(falling(TOTAL, 1.1), 1.0), (STUCK, 2.0)]), "ok", "No sign"),
    (signed([*FAR, trial(JUMP, 1.0)], 1.6, []), "warn", "F1.13"),
    (signed([*FAR, trial(falling(TOTAL, 1.1), 1.6)], 2.1, []), "ok", "No sign"),
    (signed([*FAR, trial(falling(TOTAL, 1.1), 2.2)], 3.0, []), "not_measured", "lacks the runs at 5 and 10"),
    (signed(FAR, 3.0, []), "not_measured", "lacks the sweep and the runs"),
    (record(FAR, total_steps=TOTAL), "not_measured", "lacks the sweep and the runs"),
], ids=["edge", "rise", "both", "neither", "a rise in the sweep", "steady in the sweep", "no confirmation", "too coarse", "no unstable lr"])  # fmt: skip
def test_a_warmup_is_called_for_by_two_signs(r, status, said):
    finding = wb.warmup.diagnose(r)["warmup.needed"]
    assert finding.status == status
    assert said in finding.summary
    assert bool(finding.advice) == (status == "warn")


def own_warmup(share, *, lost):
    """The baseline's own ramp, and the same run with a tenth, which ends lower by what is lost."""
    steps, total = round(share * 200), 200
    trials = [
        trial(falling(total, 0.5 + lost), 0.02, stage="baseline", warmup_steps=steps),
        trial(falling(total), 0.02, stage="replaced"),
    ]
    row = {"code": "warmup.over_cap", "field": "warmup_steps", "own": steps, "usual": 20, "baseline": 0, "trial": 1}
    facts = {"replaced": {"constants": {}, "rows": [row]}}
    return record(trials, facts=facts, total_steps=total, peak_lr=0.02, warmup_steps=steps)


@pytest.mark.parametrize(
    ("share", "lost", "status"), [(0.25, 0.0, "ok"), (0.25, 0.3, "warn"), (0.9, 0.0, "warn"), (0.9, 0.3, "warn")]
)
def test_what_the_baselines_own_warmup_costs_decides_unless_it_is_most_of_the_run(share, lost, status):
    assert wb.warmup.diagnose(own_warmup(share, lost=lost))["warmup.over_cap"].status == status


def searched(lengths: dict[int, tuple[bool | None, bool | None]]) -> WarmupSearch:
    found = [Length(steps=s, short=short, full=full) for s, (short, full) in sorted(lengths.items())]
    return WarmupSearch(lr=1.0, multiple=10.0, lengths=tuple(found))


def played(*, short_from: int, full_from: int, listed: Sequence[int], cap: int) -> tuple[WarmupSearch, list[NextRun]]:
    """Answer every question: short trials pass from `short_from` steps on, full-budget runs from `full_from`."""
    known: dict[int, tuple[bool | None, bool | None]] = {w: (w >= short_from, None) for w in listed}
    asked: list[NextRun] = []
    while (question := next_run(searched(known), cap=cap)) is not None:
        assert question not in asked, "the same question twice would never end"
        asked.append(question)
        kind, steps = question
        short, full = known.get(steps, (None, None))
        answer = steps >= (short_from if kind == "short" else full_from)
        known[steps] = (answer, full) if kind == "short" else (short, answer)
    return searched(known), asked


@pytest.mark.parametrize("true", [1, 2, 7, 11, 400, 999, 5000, 10_000])
@pytest.mark.parametrize(
    ("listed", "cap"), [([10, 1000, 10_000], 10_000), ([10, 1000], 3000), ([10], 400), ([1000], 1000)]
)
def test_the_shortest_is_found_to_a_factor_of_two(true: int, listed: list[int], cap: int) -> None:
    found, asked = played(short_from=true, full_from=true, listed=listed, cap=cap)
    if true > cap:
        assert found.confirmed is None
        assert found.longest_failing == found[cap]
        return
    best, low = found.confirmed, found.longest_failing
    assert best is not None
    assert low is not None
    assert low.steps < true <= best.steps
    assert best.steps <= 2 * max(low.steps, 1)
    assert [q for q in asked if q[0] == "full"] == [("full", best.steps)], "one run of the full budget is enough"


@pytest.mark.parametrize("true", [1, 12, 60, 300, 400])
def test_what_short_trials_cannot_see_the_full_budget_decides(true: int) -> None:
    found, asked = played(short_from=0, full_from=true, listed=[10], cap=400)
    best, low = found.confirmed, found.longest_failing
    assert best is not None
    assert low is not None
    assert low.steps < true <= best.steps <= 2 * max(low.steps, 1)
    assert low.short is not False, "only the full budget showed it"
    assert len([q for q in asked if q[0] == "full"]) <= 3 + math.log2(math.log2(400))


T = np.arange(400)
FALLING = 2.3 * np.exp(-T / 40)


def search_study(*extra):
    return record([trial(FALLING, 0.1), trial(FALLING, 0.05), *extra], total_steps=400, peak_lr=0.1)


def test_the_same_run_under_another_stage_counts_and_other_changes_do_not():
    longer = np.r_[FALLING, np.full(40, FALLING[-1])]
    r = search_study(
        trial(FALLING[:120], 10.0, stage="warmup", warmup_steps=40, total_steps=120),
        trial(longer, 10.0, stage="fix", warmup_steps=40, total_steps=440),
        trial(BLOWN, 10.0, stage="fix", warmup_steps=40, total_steps=440, max_grad_norm=0.5),
        trial(FALLING, 10.0, stage="fix", max_grad_norm=0.5),
        trial(BLOWN, 10.0, stage="fix", warmup_steps=60, total_steps=400),
        trial(longer, 2.0, stage="fix", warmup_steps=40, total_steps=440),
    )
    (search,) = read_searches(r, 1.0)
    assert search.lengths == (Length(steps=40, short=True, full=True, short_trial=2, full_trial=3),)


def warmup(loss, steps, total, *, lr=1.0, stage="warmup"):
    return trial(loss, lr, stage=stage, warmup_steps=steps, total_steps=total)


STEEPNESS = 201.0
EDGE = 2 / STEEPNESS


def survives(multiple: float, warmup: int, total: int, *, shift_at: int | None = None) -> bool:
    """Whether gradient descent on the valley's wall stays finite, written out; at `shift_at` the wall moves away by 1."""
    wall, lr = 1.0, multiple * EDGE
    for step in range(total):
        wall += step == shift_at
        ramped = lr * min(1.0, step / warmup) if warmup else lr
        wall *= 1 - ramped * (1 + (STEEPNESS - 1) * wall**2)
        if not abs(wall) < 1e100:
            return False
    return True


def shortest(multiple: float, total: int, **more: Any) -> int:
    """The shortest warmup of the wall, on the full budget."""
    lengths = range(total)
    return next(w for w in lengths if all(survives(multiple, v, total + v, **more) for v in range(w, w + 20)))


def run(workload: wb.Workload, out: Path, **settings: Any) -> tuple[wb.Diagnosis, wb.StudyRecord]:
    record = wb.warmup.Study(**({"unstable_base_learning_rate": EDGE} | settings)).run(
        workload, wb.Trainer(device="cpu"), out=out
    )
    return wb.warmup.diagnose(record), record


def stages(record: wb.StudyRecord) -> list[str]:
    return [str(stage) for stage in record.trials["stage"]]


@pytest.mark.parametrize(("multiple", "total"), [(5.0, 300), (10.0, 400), (30.0, 500)])
def test_the_shortest_warmup_of_the_valley(tmp_path: Path, multiple: float, total: int) -> None:
    diagnosis, record = run(valley(total_steps=total), tmp_path / "s", multiples=(multiple,))
    found = diagnosis["warmup.shortest"]
    true = shortest(multiple, total)
    assert found.value is not None
    assert found.evidence["fails"] < true <= found.value <= 2 * max(found.evidence["fails"], 1)
    assert found.evidence["multiple"] == pytest.approx(multiple)
    assert diagnosis["warmup.insufficient"].status == ("ok" if multiple >= 10 else "warn")
    assert found.evidence["dropped"] == [1000, 10_000, 100_000]
    assert stages(record).count("warmup_full") == 1


def test_the_trials_are_what_the_playbook_asks_for(tmp_path: Path) -> None:
    """From 0 to the base lr, then constant for twice as long (F3.3, F3.5, F3.7), whatever the baseline's schedule."""
    workload = valley(total_steps=400)
    workload = workload.replace(config=workload.config.replace(schedule="cosine"))
    diagnosis, record = run(workload, tmp_path / "s")
    short = record.trials[record.trials["stage"] == "warmup"]
    assert short["warmup_steps"].tolist()[:2] == [10, 40], "the default grid below the cap, then the cap"
    for number, ramp in zip(short["trial"], short["warmup_steps"], strict=True):
        lr = record.trial(number).steps["lr"].to_numpy()
        expected = 10 * EDGE * np.minimum(np.arange(3 * ramp) / ramp, 1.0)
        assert lr == pytest.approx(expected[: len(lr)], rel=1e-6)
    (full,) = record.trials.query("stage == 'warmup_full'").to_dict("records")
    assert full["total_steps"] == 400 + full["warmup_steps"]
    lr = record.trial(full["trial"]).steps["lr"].to_numpy()
    before = wb.schedules.lr_values(workload.config.replace(peak_lr=10 * EDGE))
    assert lr[full["warmup_steps"] :] == pytest.approx(before, rel=1e-6), "the schedule of before, untouched (F3.11)"
    assert diagnosis["warmup.shortest"].evidence["total_steps"] == full["total_steps"]


def test_it_stops_early_where_neither_sign_holds(tmp_path: Path) -> None:
    """Gradient noise makes a small lr the best one, far below the edge at 2, and ten times it still trains."""
    workload = quadratic(dimension=2, condition=2.0, noise=0.3, total_steps=200)
    first = wb.stability.Study(probe_steps=20, sweep=wb.lr_sweep.Study(lrs=(0.05, 0.1, 0.5, 1.0, 1.8, 2.5)))
    diagnosis, record = run(workload, tmp_path / "s", unstable_base_learning_rate=None, instability=first)
    assert diagnosis["warmup.needed"].status == "ok"
    assert not set(stages(record)) & {"warmup", "warmup_full"}
    assert "neither sign" in diagnosis["warmup.shortest"].summary
    assert diagnosis["warmup.insufficient"].status == "not_measured"


def test_it_finds_the_unstable_lr_by_itself_and_goes_on_at_the_edge(tmp_path: Path) -> None:
    sweep = wb.lr_sweep.Study(lrs=(EDGE / 4, EDGE / 2, 0.95 * EDGE, 1.05 * EDGE))
    first = wb.stability.Study(probe_steps=20, sweep=sweep)
    diagnosis, record = run(valley(), tmp_path / "s", unstable_base_learning_rate=None, instability=first)
    assert record.facts["warmup"]["source"] == "record"
    assert record.facts["warmup"]["unstable_lr"] == pytest.approx(EDGE, rel=0.06)
    assert diagnosis["warmup.needed"].status == "warn"
    found = diagnosis["warmup.shortest"]
    assert found.value is not None
    assert found.evidence["fails"] < shortest(found.evidence["lr"] / EDGE, 400) <= found.value
