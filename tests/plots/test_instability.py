"""Probe and confirmation runs: what is drawn is what was recorded."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tests.helpers.records import BEST, excursion, falling, study
from tests.helpers.records import diagnosis as said
from workbench.topics.stability.figures import plot_confirm, plot_probe


def blank() -> Axes:
    return Figure().subplots()


def drawn(ax: Axes, label: str) -> np.ndarray:
    (line,) = [line for line in ax.lines if str(line.get_label()).startswith(label)]
    return np.asarray(line.get_data(), dtype=float)


def test_probe_shows_what_a_coarse_interval_hides() -> None:
    ax = plot_probe(study(), said(), ax=blank())
    assert drawn(ax, "every step")[1] == pytest.approx(excursion())
    x, y = drawn(ax, "every 100 steps")
    assert x.tolist() == [0, 100, 200]
    assert y == pytest.approx(excursion()[[0, 100, 200]])
    assert drawn(ax, "before the first update")[1].tolist() == pytest.approx([excursion()[0]] * 2)
    assert set(drawn(ax, "stability.early_recovers")[0].tolist()) == {10}


def test_probe_names_the_peak_that_each_interval_sees() -> None:
    shown = plot_probe(study(), every_steps=50, ax=blank()).get_legend_handles_labels()[1]
    assert f"every step, at most {excursion().max():.3g}" in shown
    assert f"every 50 steps, at most {excursion()[::50].max():.3g}" in shown


def test_probe_without_evaluations_shows_the_training_loss() -> None:
    record = study()
    record.evals = record.evals.iloc[:0]
    ax = plot_probe(record, ax=blank())
    assert ax.get_ylabel() == "training loss"
    assert drawn(ax, "every step")[1] == pytest.approx(excursion()[:-1])


def test_metric_names_are_not_read_as_formulas() -> None:
    record = study()
    record.evals["metric"] = "$x$ \\frac"
    ax = plot_probe(record, metric="$x$ \\frac", ax=blank())
    ax.get_figure(root=True).canvas.draw()
    assert ax.get_ylabel() == "validation $x$ \\frac"


def test_confirm_draws_both_multiples_the_best_run_and_the_onset() -> None:
    ax = plot_confirm(study(), said(), ax=blank())
    assert drawn(ax, "lr 0.08 = lr*")[1] == pytest.approx(falling(BEST))
    for label in (
        "lr 0.4 = 5 x lr*: rise after decline",
        "lr 0.8 = 10 x lr*",
        "lr 0.4 diverged at step 40",
        "lr 0.8 diverged at step 40",
    ):
        assert drawn(ax, label).size
    assert set(drawn(ax, "lr 0.4 jumps after step 40")[0].tolist()) == {40}


def test_a_jump_of_another_trial_is_not_drawn() -> None:
    ax = plot_confirm(study(), said(), trials=[9], ax=blank())
    assert not [line for line in ax.lines if "jumps" in str(line.get_label())]
