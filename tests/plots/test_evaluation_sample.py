"""What the figures of an evaluation sample show: the band of sizes, the sample on its curve, counts beside the bars."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from tests.helpers.records import study
from workbench.curves.class_counts import class_counts
from workbench.plots.style import why_not_measured
from workbench.topics.evaluation.diagnose_sample import diagnose_evaluation_sample
from workbench.topics.evaluation.figures import plot_class_recall, plot_evaluation_sample, plot_selection_gap
from workbench.topics.evaluation.sample_size import selection_gaps

FACTS: dict[str, Any] = {
    "split": "validation", "examples": 2000, "metric": "accuracy", "asked": {"budget_s": 1.0, "smallest_difference": 0.05},
    "timing": {"seconds_per_example": 1e-3, "start_s": 0.05, "batch_size": 64},
    "pair": {"values": [0.9, 0.91], "difference": 0.01, "difference_sd": 0.2, "disagreement": 0.04},
}  # fmt: skip


def drawn(facts: dict[str, Any]) -> Any:
    record = replace(study(), facts={"evaluation_sample": facts})
    return plot_evaluation_sample(record, diagnose_evaluation_sample(record), ax=Figure().subplots())


def labels(ax: Any) -> list[str]:
    return [text.get_text() for text in ax.get_legend().get_texts()]


def test_the_band_holds_the_sizes_that_keep_both_bounds() -> None:
    ax = drawn(FACTS)
    (band,) = [patch for patch in ax.patches if "both bounds" in str(patch.get_label())]
    found = diagnose_evaluation_sample(FACTS)["evaluation.too_small"].evidence
    assert (band.get_x(), band.get_x() + band.get_width()) == pytest.approx((found["smallest"], found["largest"]))
    (dot,) = [line for line in ax.lines if "the sample" in str(line.get_label())]
    (curve,) = [line for line in ax.lines if "same examples" in str(line.get_label())]
    at = np.interp(dot.get_xdata()[0], curve.get_xdata(), curve.get_ydata())
    assert dot.get_ydata()[0] == pytest.approx(at, rel=0.05)
    (top,) = ax.child_axes
    assert top.get_xlabel() == "seconds of one evaluation"


def test_no_band_where_no_size_does() -> None:
    ax = drawn(FACTS | {"asked": {"budget_s": 0.2, "smallest_difference": 0.01}})
    assert not any("both bounds" in text for text in labels(ax))
    assert any("largest: 150, what the time budget allows" in text for text in labels(ax))


def test_without_two_models_it_says_so() -> None:
    assert "no two models" in (why_not_measured(drawn(FACTS | {"pair": {"values": [0.9]}})) or "")


def test_counts_and_changes_stand_beside_the_bars() -> None:
    table = class_counts(
        [{"class": 0, "total": 20, "correct": 16}, {"class": 1, "total": 0, "correct": 0}],
        [{"class": 0, "total": 20, "correct": 15}, {"class": 1, "total": 0, "correct": 0}],
    )
    ax = plot_class_recall(table, ax=Figure().subplots())
    assert [text.get_text() for text in ax.texts] == ["0 of 0", "16 of 20  (+0.05: 1 example)"]
    many = class_counts([{"class": k, "total": 5 + k, "correct": 5} for k in range(40)])
    assert len(plot_class_recall(many, ax=Figure().subplots()).get_yticks()) == 30
    assert why_not_measured(plot_class_recall(class_counts([]), ax=Figure().subplots()))


def test_the_gaps_are_points_and_their_closed_form_a_line() -> None:
    table = selection_gaps((20, 60), rounds=(4,), repeats=4)
    ax = plot_selection_gap(table, ax=Figure().subplots())
    assert len(labels(ax)) == 2
    curves = {tuple(line.get_ydata()) for line in ax.lines}
    for _, rows in table.groupby("how"):
        assert {tuple(rows["expected"]), tuple(rows["gap"])} <= curves
    points = [
        line for line in ax.lines if tuple(line.get_ydata()) in {tuple(r["gap"]) for _, r in table.groupby("how")}
    ]
    assert points[0].get_xdata()[0] != points[1].get_xdata()[0], "no group hides another"
    assert ax.get_ylim()[0] < min(table["gap"] - 2 * table["se"]), "no bar is cut"
    assert "imulated" in ax.get_title(loc="left")
    assert why_not_measured(plot_selection_gap(pd.DataFrame(), ax=Figure().subplots()))
    plt.close("all")
