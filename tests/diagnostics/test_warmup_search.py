"""The search plays against workloads whose shortest warmup is written down; it has to find it and to stop."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from tests.helpers.simulated_records import record, trial
from workbench.topics.warmup.search import Length, NextRun, WarmupSearch, cap_steps, next_run, read_searches


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
        short, full = known.get(question.steps, (None, None))
        answer = question.steps >= (short_from if question.kind == "short" else full_from)
        known[question.steps] = (answer, full) if question.kind == "short" else (short, answer)
    return searched(known), asked


@pytest.mark.parametrize("true", [1, 2, 3, 7, 10, 11, 40, 399, 400, 999, 1000, 5000, 10_000])
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
    assert [q for q in asked if q.kind == "full"] == [NextRun("full", best.steps)], (
        "one run of the full budget is enough"
    )


def test_the_shortest_listed_one_is_held_against_no_warmup_at_all() -> None:
    found, asked = played(short_from=1, full_from=1, listed=[10, 1000], cap=1000)
    assert asked[0] == NextRun("short", 0)
    assert found.longest_failing == Length(steps=0, short=False)


def test_where_no_warmup_is_needed_zero_is_the_answer() -> None:
    found, asked = played(short_from=0, full_from=0, listed=[10, 1000], cap=1000)
    assert found.confirmed == Length(steps=0, short=True, full=True)
    assert asked == [NextRun("short", 0), NextRun("full", 0)]


@pytest.mark.parametrize("true", [1, 12, 60, 300, 400])
def test_what_short_trials_cannot_see_the_full_budget_decides(true: int) -> None:
    found, asked = played(short_from=0, full_from=true, listed=[10], cap=400)
    best, low = found.confirmed, found.longest_failing
    assert best is not None
    assert low is not None
    assert low.steps < true <= best.steps <= 2 * max(low.steps, 1)
    assert low.short is not False, "only the full budget showed it"
    assert len([q for q in asked if q.kind == "full"]) <= 3 + math.log2(math.log2(400))


def test_where_the_cap_fails_in_full_there_is_nothing_more_to_try() -> None:
    found, asked = played(short_from=0, full_from=10**9, listed=[10], cap=400)
    assert found.confirmed is None
    assert asked[-1] == NextRun("full", 400)
    assert len([q for q in asked if q.kind == "full"]) == 2


def test_what_is_shorter_than_a_failing_one_is_not_trusted() -> None:
    found = searched({10: (True, None), 100: (False, None), 1000: (True, None)})
    assert found.passing == found[1000]
    assert searched({10: (True, True), 1000: (False, None)}).confirmed is None


@pytest.mark.parametrize(
    ("total", "frac", "cap"), [(99, 0.1, 9), (100, 0.1, 10), (1_000_000, 0.1, 100_000), (30, 0.3, 9)]
)
def test_the_cap_is_a_whole_number_of_steps(total: int, frac: float, cap: int) -> None:
    assert cap_steps(total, frac) == cap


T = np.arange(400)
FALLING = 2.3 * np.exp(-T / 40)
BLOWN = np.r_[2.3, 50.0, np.inf]


def study(*extra):
    return record([trial(FALLING, 0.1), trial(FALLING, 0.05), *extra], total_steps=400, peak_lr=0.1)


def test_runs_are_sorted_by_lr_length_and_kind():
    r = study(
        trial(BLOWN, 10.0, stage="warmup", warmup_steps=10, total_steps=30),
        trial(FALLING[:120], 10.0, stage="warmup", warmup_steps=40, total_steps=120),
        trial(np.r_[FALLING, np.full(40, FALLING[-1])], 10.0, stage="warmup_full", warmup_steps=40, total_steps=440),
        trial(FALLING[:30], 3.0, stage="warmup", warmup_steps=10, total_steps=30),
    )
    low, high = read_searches(r, 1.0)
    assert (low.lr, low.multiple, low.lengths) == (3.0, 3.0, (Length(steps=10, short=True, short_trial=5),))
    assert high.lengths == (
        Length(steps=10, short=False, short_trial=2),
        Length(steps=40, short=True, full=True, short_trial=3, full_trial=4),
    )


def test_the_same_run_under_another_stage_counts_and_other_changes_do_not():
    longer = np.r_[FALLING, np.full(40, FALLING[-1])]
    r = study(
        trial(FALLING[:120], 10.0, stage="warmup", warmup_steps=40, total_steps=120),
        trial(longer, 10.0, stage="fix", warmup_steps=40, total_steps=440),
        trial(BLOWN, 10.0, stage="fix", warmup_steps=40, total_steps=440, max_grad_norm=0.5),
        trial(FALLING, 10.0, stage="fix", max_grad_norm=0.5),
        trial(BLOWN, 10.0, stage="fix", warmup_steps=60, total_steps=400),
        trial(longer, 2.0, stage="fix", warmup_steps=40, total_steps=440),
    )
    (search,) = read_searches(r, 1.0)
    assert search.lengths == (Length(steps=40, short=True, full=True, short_trial=2, full_trial=3),)


def test_a_curve_too_short_to_be_judged_answers_nothing():
    assert read_searches(study(trial(FALLING[:6], 10.0, stage="warmup", warmup_steps=2, total_steps=6)), 1.0) == ()


def test_a_run_cut_short_answers_nothing():
    cut = trial(FALLING[:50], 10.0, stage="warmup", state="stopped", warmup_steps=40, total_steps=120)
    assert read_searches(study(cut), 1.0) == ()


def test_a_long_run_that_never_learns_fails():
    """It is as long as no run of the baseline is, and yet has to learn what those do."""
    stuck = np.r_[2.3, np.full(439, 2.1)]
    r = study(trial(stuck, 10.0, stage="warmup_full", warmup_steps=40, total_steps=440))
    (search,) = read_searches(r, 1.0)
    assert search.lengths == (Length(steps=40, full=False, full_trial=2),)
