"""The bars add up to the step, the knee is where the numbers have it, and nothing measured is said to be nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tests.helpers.simulated_input import pipeline
from workbench.plots.style import why_not_measured
from workbench.topics.input.figures import plot_input_pipeline, plot_input_workers

FIX = {"change": "workers", "value": 4, "predicted_s": 0.010, "before_s": 0.040, "after_s": 0.0125}


@dataclass
class Looked:
    facts: dict[str, Any]


def drawn(draw: Any, **changes: Any) -> Axes:
    ax: Axes = draw(Looked({"input_pipeline": pipeline(**changes)}), ax=Figure().subplots())
    return ax


def test_bars_add_up_to_the_step_and_to_a_batch() -> None:
    ax = drawn(plot_input_pipeline, fetch_s=0.03, compute_s=0.01, collate=0.5, fix=FIX)
    names = [label.get_text() for label in ax.get_yticklabels()]
    assert names == [
        "as it is",
        "batch at hand",
        "num_workers=4: predicted",
        "num_workers=4: measured",
        "making a batch",
    ]
    widths = [0.0] * len(names)
    for bar in ax.patches:
        widths[round(bar.get_y() + bar.get_height() / 2)] += bar.get_width()
    assert widths == pytest.approx([40, 10, 10, 12.5, 30])
    assert ax.get_title(loc="left").startswith("75% of a step")
    assert len({text.get_text() for text in ax.get_legend().get_texts()}) == len(ax.get_legend().get_texts())


def test_what_other_programs_took_is_a_bar_of_its_own() -> None:
    facts = pipeline(fetch_s=0.03, compute_s=0.01)
    for one in facts["rounds"]:
        one.update(steady_s=0.08, wait_s=0.03, queued_s=0.04)
    ax = plot_input_pipeline(Looked({"input_pipeline": facts}), ax=Figure().subplots())
    first = [bar.get_width() for bar in ax.patches if abs(bar.get_y() + bar.get_height() / 2) < 0.1]
    assert first == pytest.approx([10, 30, 40])
    assert ax.get_title(loc="left").startswith("75% of a step")


def test_starting_workers_are_a_bar_of_their_own() -> None:
    ax = drawn(plot_input_pipeline, fetch_s=0.01, workers=2, start_s=0.3, batches=5)
    assert "workers starting" in [text.get_text() for text in ax.get_legend().get_texts()]


def test_without_a_step_there_is_no_share() -> None:
    ax = drawn(plot_input_pipeline, step="none", compute_s=0.0)
    assert ax.get_title(loc="left") == "Nobody uses the batches"


def test_the_knee_is_marked_where_the_table_has_it() -> None:
    ax = drawn(plot_input_workers, tried=(1, 2, 4, 8))
    (mark,) = [line for line in ax.lines if str(line.get_label()).startswith("knee")]
    assert (mark.get_label(), list(mark.get_xdata())) == ("knee: 8", [8])
    (step,) = [line for line in ax.lines if line.get_label() == "what the step can use"]
    assert step.get_ydata()[0] == pytest.approx(100)


@pytest.mark.parametrize("draw", [plot_input_pipeline, plot_input_workers])
def test_nothing_measured_is_said(draw: Any) -> None:
    assert why_not_measured(draw(Looked({}), ax=Figure().subplots()))
    assert why_not_measured(drawn(plot_input_workers, tried=())) if draw is plot_input_workers else True


def labels(ax: Axes) -> set[str]:
    return {text.get_text() for text in ax.get_legend().get_texts()}


def test_the_number_of_workers_that_is_set_is_on_the_curve() -> None:
    ax = drawn(plot_input_workers, workers=2, tried=(1,))
    assert "as it is: 2" in labels(ax)
    assert not any(label.startswith("knee") for label in labels(ax)), "one point has no bend"
    (own,) = [line for line in ax.lines if line.get_label() == "as it is: 2"]
    assert list(own.get_xdata()) == [2]
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["1", "2"]
    assert not any(label.startswith("as it is") for label in labels(drawn(plot_input_workers)))


def test_a_part_too_small_to_be_seen_is_not_in_the_legend() -> None:
    assert "latency" in labels(drawn(plot_input_pipeline, blocked=0.1))
    assert "latency" not in labels(drawn(plot_input_pipeline, blocked=0.001))
