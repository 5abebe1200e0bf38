"""Gradient norms, probe and confirmation runs: what is drawn is what was recorded."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tests.helpers.records import BEST, excursion, falling, losses_of, one_trial, study
from tests.helpers.records import diagnosis as said
from workbench.plots import plot_confirm, plot_grad_norm, plot_grad_norm_histogram, plot_probe


def blank() -> Axes:
    return Figure().subplots()


def drawn(ax: Axes, label: str) -> np.ndarray:
    (line,) = [line for line in ax.lines if str(line.get_label()).startswith(label)]
    return np.asarray(line.get_data(), dtype=float)


def test_grad_norm_is_that_of_the_baseline_by_default() -> None:
    _, y = drawn(plot_grad_norm(study(), ax=blank()), "trial 0")
    assert y == pytest.approx(np.sqrt(losses_of(0.02)))


def test_without_a_baseline_run_the_sweeps_run_at_its_lr_stands_in() -> None:
    record = study()
    record.trials = record.trials[record.trials["stage"] != "baseline"]
    assert drawn(plot_grad_norm(record, ax=blank()), "trial 2, lr 0.02").size
    record.config["peak_lr"] = 0.5
    assert drawn(plot_grad_norm(record, said(), ax=blank()), "trial 4, lr 0.08").size


def test_grad_norm_of_another_trial() -> None:
    _, y = drawn(plot_grad_norm(study(), trial=4, ax=blank()), "trial 4, lr 0.08")
    assert y == pytest.approx(np.sqrt(losses_of(BEST)))


def test_thresholds_in_force_and_proposed() -> None:
    record = one_trial(np.linspace(0.1, 3, 50), max_grad_norm=1.25)
    ax = plot_grad_norm(record, said(), ax=blank())
    assert drawn(ax, "clipped above 1.25")[1].tolist() == [1.25, 1.25]
    assert drawn(ax, "proposed threshold 0.5")[1].tolist() == [0.5, 0.5]
    assert not [line for line in plot_grad_norm(study(), ax=blank()).lines if "clipped" in str(line.get_label())]


def test_nonfinite_norms_are_marked_at_their_steps() -> None:
    norms = np.ones(50)
    norms[[7, 30]] = np.inf, np.nan
    assert drawn(plot_grad_norm(one_trial(norms), ax=blank()), "not finite (2)")[0].tolist() == [7, 30]


@pytest.mark.parametrize("seed", range(5))
def test_histogram_counts_and_title_account_for_every_step(seed: int) -> None:
    rng = np.random.default_rng(seed)
    norms = np.exp(rng.normal(size=500) * 3)
    norms[:7], norms[7:10], norms[10] = np.nan, 0.0, np.inf
    ax = plot_grad_norm_histogram(one_trial(rng.permutation(norms)), ax=blank())
    (bars,) = ax.patches
    assert bars.get_data().values.sum() == 500 - 7 - 3 - 1
    assert ax.get_title(loc="left").endswith("500 steps, 3 at 0, 8 not finite")


def test_histogram_bins_have_equal_ratio_and_hold_the_extremes() -> None:
    norms = np.array([1e-3, 0.1, 0.1, 7.0, 1e3])
    (bars,) = plot_grad_norm_histogram(one_trial(norms), bins=12, ax=blank()).patches
    counts, edges = bars.get_data().values, bars.get_data().edges
    assert np.diff(np.log(edges)) == pytest.approx(np.full(12, np.log(1e6) / 12))
    assert (counts[0], counts[-1], counts.sum()) == (1, 1, 5)


def test_histogram_of_equal_norms_is_one_bin() -> None:
    (bars,) = plot_grad_norm_histogram(one_trial(np.full(30, 0.7)), ax=blank()).patches
    assert sorted(bars.get_data().values)[-2:] == [0, 30]


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
