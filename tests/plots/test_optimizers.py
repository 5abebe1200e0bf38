"""The bars are the ranges of the record, and the lines the differences of the two forms."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib import colors
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from tests.helpers.simulated_records import record, trial
from workbench.config import TrainConfig
from workbench.plots.style import GOOD, PALETTE, why_not_measured
from workbench.topics.optimizers.diagnose import diagnose_optimizers
from workbench.topics.optimizers.figures import plot_optimizers, plot_rule_forms
from workbench.train.rule_forms import explain_rule

T = np.arange(200)
BLOWN = np.r_[2.0, 9.0, np.inf]


def blank() -> Axes:
    return Figure().subplots()


def falling(level):
    return level + (2.0 - level) * np.exp(-T / 5)


def study(*more):
    own = [trial(falling(1.0), 0.01), trial(falling(0.0), 0.1), trial(falling(0.05), 0.3), trial(BLOWN, 1.0)]
    other = {"stage": "optimizers", "optimizer": "adam"}
    adam = [trial(falling(level), lr, **other) for lr, level in ((0.001, 0.0), (0.1, 0.1), (1.0, 0.9))]
    adam.append(trial(BLOWN, 4.0, **other))
    return record([*own, *adam, *more], total_steps=200, peak_lr=0.2, optimizer="sgd")


def bars(ax: Axes, place: int) -> list[tuple[float, float, str]]:
    """Ends and colour of the bars of one row, the widest first."""
    found = [p for p in ax.patches if isinstance(p, Rectangle) and p.get_y() < place < p.get_y() + p.get_height()]
    found.sort(key=lambda p: -p.get_height())
    return [(p.get_x(), p.get_x() + p.get_width(), p.get_facecolor()) for p in found]


def marks(ax: Axes, marker: str) -> list[tuple[float, float]]:
    return [
        (float(line.get_xdata()[0]), float(line.get_ydata()[0])) for line in ax.lines if line.get_marker() == marker
    ]


@pytest.mark.parametrize("told", [True, False])
def test_each_rule_has_a_bar_from_the_smallest_lr_that_trains_to_the_largest(told: bool) -> None:
    r = study()
    ax = plot_optimizers(r, diagnose_optimizers(r) if told else None, ax=blank())
    assert [label.get_text() for label in ax.get_yticklabels()] == ["sgd", "adam"]
    ((low, high, _),) = bars(ax, 0)
    assert (low, high) == pytest.approx((0.1, 0.3))
    wide, thin = bars(ax, 1)
    assert wide[:2] == pytest.approx((0.001, 0.1))
    assert thin[:2] == pytest.approx((0.1, 1.0)), "stable, and learns too little"


def test_lr_star_the_unstable_lr_and_the_baselines_own_are_marked() -> None:
    ax = plot_optimizers(study(), ax=blank())
    assert marks(ax, "*") == [(0.1, 0), (0.001, 1)]
    assert marks(ax, "x") == [(1.0, 0), (4.0, 1)]
    assert marks(ax, "D") == [(0.2, 0)]
    assert [text.get_text().partition(", loss ")[0] for text in ax.texts] == ["0.5 decades", "2.0 decades"]
    low, high = ax.get_xlim()
    assert low < 0.001 < 4.0 < high


def test_the_baselines_rule_stands_out() -> None:
    ax = plot_optimizers(study(), ax=blank())
    assert colors.same_color(bars(ax, 0)[0][2][:3], PALETTE[1])
    assert colors.same_color(bars(ax, 1)[0][2][:3], GOOD)
    assert [label.get_fontweight() for label in ax.get_yticklabels()] == ["bold", "normal"]


def test_a_rule_that_learned_nothing_has_no_bar() -> None:
    stuck = [trial(np.full(200, 2.0), lr, stage="optimizers", optimizer="nadam") for lr in (0.1, 0.2)]
    ax = plot_optimizers(study(*stuck), ax=blank())
    assert [label.get_text() for label in ax.get_yticklabels()] == ["sgd", "adam"]


def test_the_lines_are_the_differences() -> None:
    config = TrainConfig(peak_lr=0.1, total_steps=50, batch_size=1, optimizer="nadam", warmup_steps=5)
    forms = explain_rule(config)
    ax = plot_rule_forms(forms, ax=blank())
    drawn = {str(line.get_label()): np.asarray(line.get_ydata()) for line in ax.lines}
    assert drawn["both forms as they are"][1:] == pytest.approx(forms.apart[1:])
    assert np.isnan(drawn["both forms as they are"][0]), "at lr 0 nothing differs"
    for cause in forms.causes:
        shown = np.isfinite(drawn[f"{cause.name} alone"])
        assert drawn[f"{cause.name} alone"][shown] == pytest.approx(cause.apart[shown])


def test_a_rule_with_one_form_has_nothing_to_draw() -> None:
    config = TrainConfig(peak_lr=0.1, total_steps=50, batch_size=1, optimizer="momentum")
    assert why_not_measured(plot_rule_forms(explain_rule(config), ax=blank())) == "momentum is the same in both forms"
