"""The ladder of thresholds: every run has its place, with its share, and what did not come back is marked."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tests.helpers.clipped_records import BLOWN, DIVERGED, FALLING, clipped, plain
from tests.helpers.simulated_records import record
from workbench.plots.render import png
from workbench.plots.style import why_not_measured
from workbench.topics.clipping.diagnose import diagnose_clipping
from workbench.topics.clipping.figures import plot_clipping

LADDER = [plain(), plain(BLOWN, lr=0.4), clipped(10, BLOWN, lr=0.4, limit=2.0), clipped(30, lr=0.4), clipped(150, FALLING / 2, lr=0.4, limit=0.5), clipped(20, DIVERGED, lr=0.4, limit=4.0)]  # fmt: skip


def blank() -> Axes:
    return Figure().subplots()


def drawn(ax: Axes, label: str) -> np.ndarray:
    (line,) = [line for line in ax.lines if str(line.get_label()).startswith(label)]
    return np.asarray(line.get_data(), dtype=float)


@pytest.mark.parametrize("with_diagnosis", [True, False])
def test_each_run_stands_at_its_threshold_and_end_loss(with_diagnosis: bool) -> None:
    made = record(LADDER)
    ax = plot_clipping(made, diagnose_clipping(made) if with_diagnosis else None, ax=blank())
    end = FALLING[-20:].mean()
    lines = {str(line.get_label()): line for line in ax.lines}
    assert lines["stable"].get_xydata().ravel() == pytest.approx([1.0, end])
    heavy = lines["stable, but 50% of the steps or more clipped"]
    assert heavy.get_xydata().ravel() == pytest.approx([0.5, end / 2])
    assert heavy.get_markerfacecolor() == "none"
    marked = {label.split(" (")[0]: line for label, line in lines.items()}
    assert marked["diverged"].get_xdata().tolist() == [4.0]
    assert marked["unstable, or nothing learned"].get_xdata().tolist() == [2.0]
    assert {text.get_text() for text in ax.texts} == {"15 %", "75 %"}
    assert "lr 0.4 without clipping: divergent" in lines


def test_the_proposed_threshold_and_the_reference_are_drawn() -> None:
    made = record(LADDER)
    found = diagnose_clipping(made)
    ax = plot_clipping(made, found, ax=blank())
    value = found["clipping.threshold"].value
    assert drawn(ax, f"90th percentile: {value:.3g}")[0].tolist() == [value, value]
    assert drawn(ax, "lr 0.1 without clipping")[1] == pytest.approx([FALLING[-20:].mean()] * 2)


def test_a_run_without_clipping_that_learned_nothing_never_trained() -> None:
    flat = np.full(FALLING.size, FALLING[0])
    made = record([plain(), plain(FALLING / 2, lr=0.2), plain(flat, lr=0.4), clipped(30, lr=0.4)])
    (label,) = [
        str(line.get_label())
        for line in plot_clipping(made, ax=blank()).lines
        if "0.4 without" in str(line.get_label())
    ]
    assert label == "lr 0.4 without clipping: never trained"


def test_a_stable_run_without_clipping_is_a_line() -> None:
    made = record([plain(), plain(FALLING / 3, lr=0.4), clipped(30, lr=0.4)])
    assert drawn(plot_clipping(made, ax=blank()), "lr 0.4 without clipping")[1] == pytest.approx(
        [FALLING[-20:].mean() / 3] * 2
    )


def test_a_record_without_clipped_runs_says_so() -> None:
    for trials in ([], [plain()]):
        ax = plot_clipping(record(trials), ax=blank())
        assert why_not_measured(ax) == "the record has no finished run with clipping"


def test_nothing_but_unstable_runs_still_makes_a_picture() -> None:
    made = record([plain(), clipped(150, BLOWN, lr=0.4), clipped(150, DIVERGED, lr=0.4, limit=2.0)])
    ax = plot_clipping(made, diagnose_clipping(made), ax=blank())
    assert why_not_measured(ax) is None
    ax.get_figure(root=True).canvas.draw()
    assert ax.get_xlim()[0] < 1.0 < 2.0 < ax.get_xlim()[1]


def test_side_by_side_they_are_one_png() -> None:
    made = record(LADDER)
    data = png([lambda ax: plot_clipping(made, ax=ax)] * 2, size=(3.0, 2.0), dpi=50)
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = (int.from_bytes(data[i : i + 4], "big") for i in (16, 20))
    assert (width, height) == (300, 100)
    assert data == png([lambda ax: plot_clipping(made, ax=ax)] * 2, size=(3.0, 2.0), dpi=50), "same numbers, same bytes"
