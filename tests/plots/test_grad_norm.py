"""Gradient norms: what is drawn is what was recorded, and every step is accounted for (F4.8)."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tests.helpers.records import BEST, losses_of, one_trial, study
from tests.helpers.records import diagnosis as said
from workbench.topics.clipping.diagnose import diagnose_clipping
from workbench.topics.clipping.grad_norm_figures import plot_grad_norm, plot_grad_norm_histogram


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


def test_far_outliers_do_not_squeeze_the_hump_and_are_still_accounted_for() -> None:
    hump = np.linspace(1.6, 2.0, 400)
    ax = plot_grad_norm_histogram(one_trial(np.concatenate([[201.0, 150.0], hump])), ax=blank())
    (bars,) = ax.patches
    counts = bars.get_data().values
    assert counts.sum() == 400
    assert (counts > 0).sum() >= 30, "the hump is more than a few bars"
    assert ax.get_xlim()[1] < 3
    assert ax.get_title(loc="left").endswith("402 steps, 2 beyond the axis")


def test_a_wide_hump_keeps_its_tail_on_the_axis() -> None:
    norms = np.exp(np.random.default_rng(0).normal(size=500))
    ax = plot_grad_norm_histogram(one_trial(norms), ax=blank())
    assert ax.patches[0].get_data().values.sum() == 500
    assert "beyond" not in ax.get_title(loc="left")


def test_histogram_of_equal_norms_is_one_bin() -> None:
    (bars,) = plot_grad_norm_histogram(one_trial(np.full(30, 0.7)), ax=blank()).patches
    assert sorted(bars.get_data().values)[-2:] == [0, 30]


@pytest.mark.parametrize("draw", [plot_grad_norm, plot_grad_norm_histogram])
@pytest.mark.parametrize("percentile", [50.0, 75.0, 90.0])
def test_a_percentile_replaces_the_proposed_threshold_and_says_what_it_clips(draw, percentile: float) -> None:
    norms = np.random.default_rng(0).lognormal(size=400)
    record = one_trial(norms)
    threshold = np.percentile(norms[40:], percentile)
    ax = draw(record, said(), percentile=percentile, ax=blank())
    x, y = drawn(ax, f"{percentile:g}th percentile {threshold:.3g}: {(norms > threshold).mean():.0%} of the steps")
    assert (y if draw is plot_grad_norm else x).tolist() == pytest.approx([threshold, threshold])
    assert not [line for line in ax.lines if "proposed" in str(line.get_label())]


def test_the_share_is_of_the_finite_norms() -> None:
    norms = np.array([1.0, 2.0, 3.0, 4.0] * 10 + [np.nan, np.inf] * 5)
    ax = plot_grad_norm(one_trial(norms, max_grad_norm=2.5), ax=blank())
    assert drawn(ax, "clipped above 2.5: 50% of the steps").size


def test_a_percentile_that_cannot_be_had_says_why() -> None:
    ax = plot_grad_norm(one_trial(np.full(50, 0.7)), percentile=90.0, ax=blank())
    assert drawn(ax, "no threshold: all gradient norms are equal").size


def test_on_the_trial_of_the_threshold_each_tenth_has_its_percentile() -> None:
    norms = np.random.default_rng(0).lognormal(size=400) * np.linspace(4, 1, 400)
    record = one_trial(norms)
    found = diagnose_clipping(record)
    (stairs,) = plot_grad_norm(record, found, ax=blank()).patches
    assert stairs.get_label() == "90th percentile of each tenth of the run"
    assert stairs.get_data().values == pytest.approx([np.percentile(part, 90) for part in norms.reshape(10, 40)])
    assert stairs.get_data().edges.tolist() == list(range(0, 401, 40))
    assert not plot_grad_norm(record, said(), ax=blank()).patches, "measured elsewhere"
    assert not plot_grad_norm(record, found, percentile=50.0, ax=blank()).patches, "another percentile is asked for"


def test_windows_without_a_finite_norm_leave_a_gap() -> None:
    norms = np.random.default_rng(0).lognormal(size=400)
    norms[40:80] = np.nan
    (stairs,) = plot_grad_norm(one_trial(norms), diagnose_clipping(one_trial(norms)), ax=blank()).patches
    assert np.isnan(stairs.get_data().values).tolist() == [False, True, *[False] * 8]
