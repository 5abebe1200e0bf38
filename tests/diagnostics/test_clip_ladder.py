"""Which threshold a verdict is about, what counts as cured, and when clipping hides an lr."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.simulated_records import record
from workbench.topics.clipping.ladder import is_calm, is_cured, leading, masks, read_ladder


def row(limit: float = 1.0, *, lr: float = 0.5, stage: str = "clipping", **changes: Any) -> dict[str, Any]:
    """A clipped run that is stable where the same without clipping diverges."""
    usual = {
        "trial": 1, "stage": stage, "seed": 0, "lr": lr, "max_grad_norm": limit, "outcome": "none", "lasting": False,
        "clip_frac": 0.1, "late_clip_frac": 0.1, "parked": False, "falling": False, "alternation": None,
        "twin": 0, "twin_outcome": "divergent", "twin_lasting": True,
    }  # fmt: skip
    return usual | changes


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"lasting": True, "outcome": "lasting"}, False),
        ({"outcome": "recovered"}, True),
        ({"twin": None, "twin_outcome": None, "twin_lasting": None}, False),
        ({"twin_outcome": "recovered", "twin_lasting": False}, True),
        ({"twin_outcome": "recovered", "twin_lasting": False, "outcome": "recovered"}, False),
        ({"twin_outcome": "none", "twin_lasting": False}, False),
        ({"twin_outcome": "none", "twin_lasting": True}, True),
    ],
)
def test_cured_is_stable_where_the_same_without_clipping_is_not(changes: dict[str, Any], expected: bool) -> None:
    assert is_cured(row(**changes)) is expected


def test_calm_shows_no_rise_and_learns() -> None:
    assert is_calm(row())
    assert not is_calm(row(outcome="recovered"))
    assert not is_calm(row(lasting=True)), "a run that never learned shows no rise either"
    assert not is_calm(row(), "twin_outcome")
    assert is_calm(row(twin_outcome="none", twin_lasting=False), "twin_outcome")


@pytest.mark.parametrize(
    ("changes", "edge", "expected"),
    [
        ({"parked": True}, None, True),
        ({"parked": False}, None, False),
        ({"parked": True, "lasting": True}, None, False),
        ({"parked": True, "falling": True}, None, None),
        ({"parked": True, "falling": True, "alternation": -0.5}, None, None),
        ({"parked": True, "falling": True, "alternation": -0.98}, None, True),
        ({"parked": False, "falling": True}, None, False),
        ({"parked": True, "twin_lasting": False}, 0.1, False),
        ({"parked": True, "twin_lasting": None}, None, None),
        ({"parked": True, "twin_lasting": None}, 0.4, True),
        ({"parked": True, "twin_lasting": None}, 0.6, False),
    ],
)
def test_clipping_hides_an_lr_that_is_stable_only_while_clipped(
    changes: dict[str, Any], edge: float | None, expected: bool | None
) -> None:
    assert masks(row(**changes), edge) is expected


def test_the_loosest_threshold_that_passes_leads() -> None:
    sick = {"lasting": True, "outcome": "lasting"}
    rows = [row(4.0, **sick), row(2.0), row(1.0)]
    rung, why = leading(record([]), rows)
    assert rung is not None
    assert (rung.max_grad_norm, why, rung.cured, rung.lasting) == (2.0, "passes", 1, 0)
    assert [r.max_grad_norm for r in read_ladder(record([]), rows)] == [4.0, 2.0, 1.0]
    rung, why = leading(record([]), [row(4.0, **sick), row(2.0, **sick)])
    assert rung is not None
    assert (rung.max_grad_norm, why) == (2.0, "tightest")
    assert leading(record([]), []) == (None, "tightest")


def test_a_tighter_one_leads_where_the_looser_ones_only_hide_or_clip_too_much() -> None:
    rows = [row(4.0, parked=True, late_clip_frac=1.0), row(3.0, clip_frac=0.5), row(2.0, clip_frac=0.49), row(1.0)]
    rung, why = leading(record([]), rows)
    assert rung is not None
    assert (rung.max_grad_norm, why) == (2.0, "passes")
    rung, _ = leading(record([]), rows[:2])
    assert rung is not None
    assert rung.max_grad_norm == 4.0, "without a cure the loosest that keeps training stable"
    rung, _ = leading(record([]), rows, aggressive_frac=0.2)
    assert rung is not None
    assert rung.max_grad_norm == 1.0


def test_seeds_that_disagree_are_no_cure() -> None:
    rows = [row(2.0, seed=0, clip_frac=0.1), row(2.0, seed=1, clip_frac=0.3, lasting=True), row(1.0), row(1.0, seed=1)]
    loose, tight = read_ladder(record([]), rows)
    assert (loose.passes, loose.cured, loose.lasting, loose.clip_frac) == (False, 1, 1, pytest.approx(0.2))
    assert tight.passes
    rung, _ = leading(record([]), rows)
    assert rung is not None
    assert rung.max_grad_norm == 1.0


def test_a_baseline_that_clips_speaks_for_itself() -> None:
    rows = [row(3.0, lr=0.5), row(0.2, lr=0.1, stage="baseline")]
    rung, why = leading(record([], peak_lr=0.1, max_grad_norm=0.2), rows)
    assert rung is not None
    assert (rung.lr, rung.max_grad_norm, why) == (0.1, 0.2, "own")


def test_the_ladder_is_that_of_the_studys_lr() -> None:
    rows = [row(3.0, lr=0.5), row(2.0, lr=0.25), row(9.0, lr=0.25, stage="fix")]
    assert [r.lr for r in read_ladder(record([], facts={"clipping_lr": 0.25}), rows)] == [0.25]
    assert [r.max_grad_norm for r in read_ladder(record([]), rows[2:])] == [9.0], "without a ladder a fix run counts"
