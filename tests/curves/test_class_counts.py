"""Counts behind recalls: Wilson's interval, and differences in examples."""

from __future__ import annotations

import pytest

from workbench.curves.class_counts import class_counts, count_classes, wilson
from workbench.errors import UsageError


def test_the_interval_of_a_share_is_wilsons() -> None:
    for correct, total, low, high in ((5, 10, 0.2366, 0.7634), (0, 10, 0.0, 0.2775), (0, 0, 0.0, 1.0)):
        assert wilson(correct, total) == pytest.approx((low, high), abs=1e-4)


def test_a_gain_of_five_points_on_twenty_examples_is_one_example() -> None:
    before = [{"class": 0, "total": 20, "correct": 15}, {"class": 1, "total": 400, "correct": 380}]
    after = [{"class": 0, "total": 20, "correct": 16}, {"class": 1, "total": 400, "correct": 378}]
    table = class_counts(after, before)
    rare = table.iloc[0]
    assert (rare["class"], rare["total"], rare["correct"], rare["before"]) == (0, 20, 16, 15)
    assert rare["delta"] == pytest.approx(0.05)
    assert list(table["delta_examples"]) == ["1 example", "-2 examples"]


def test_counts_of_every_class_the_empty_ones_included() -> None:
    rows = count_classes([2, 0, 2, 2], [1, 0, 1, 0], classes=4)
    assert [(r["class"], r["total"], r["correct"]) for r in rows] == [(0, 1, 0), (1, 0, 0), (2, 3, 2), (3, 0, 0)]
    table = class_counts(rows)
    assert list(table["class"]) == [1, 3, 0, 2], "rare classes first"
    assert table["recall"].isna().tolist() == [True, True, False, False]
    assert table["delta_examples"].isna().all()
    assert len(class_counts([])) == 0


def test_what_cannot_be_counted_is_explained() -> None:
    with pytest.raises(UsageError, match=r"correct must be 0 or 1"):
        count_classes([0, 1], [0.5, 1.0], classes=2)
    with pytest.raises(UsageError, match=r"labels \(2,\) and correct \(3,\)"):
        count_classes([0, 1], [0, 1, 1], classes=2)
    with pytest.raises(UsageError, match="evaluations of the same examples"):
        class_counts([{"class": 0, "total": 4, "correct": 2}], [{"class": 0, "total": 5, "correct": 2}])
