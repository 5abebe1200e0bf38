"""The figures of batch sizes: what they draw, from a diagnosis made before, and what they say where there is nothing."""

from __future__ import annotations

import math

import pytest

from tests.helpers.simulated_batches import batches
from tests.helpers.simulated_records import record
from workbench.findings.diagnosis import Diagnosis, Finding
from workbench.plots.style import why_not_measured
from workbench.record.json_values import to_json
from workbench.topics.batch_size.diagnose import diagnose_batch_size
from workbench.topics.batch_size.figures import plot_batch_size, plot_tuned_lr

BEST = {16: 0.0125, 64: 0.1, 256: 0.4}
NOISE = {"noise_scale": [{"step": 0, "value": 100.0, "low": 50.0, "high": 200.0, "examples": 1024, "micro_batch": 16}]}


def heights(ax, label):
    line = next(line for line in ax.get_lines() if line.get_label() == label)
    return dict(zip(line.get_xdata(), line.get_ydata(), strict=True))


def test_settings_that_fit_one_batch_size_lie_apart_and_tuned_ones_together():
    ax = plot_batch_size(batches(BEST, facts=NOISE))
    fixed, tuned = (heights(ax, f"{name}, equal steps") for name in ("settings of the baseline", "tuned for each"))
    assert len(fixed) == len(tuned) == 3
    assert max(fixed.values()) / min(fixed.values()) > 2
    assert max(tuned.values()) / min(tuned.values()) < 1.05
    assert [line.get_xdata()[0] for line in ax.get_lines() if "noise scale" in str(line.get_label())] == [100.0]


def test_the_tuned_lrs_and_the_two_rules():
    ax = plot_tuned_lr(batches(BEST))
    assert list(heights(ax, "best at equal steps").values()) == pytest.approx(list(BEST.values()))
    assert heights(ax, "proportional to the batch")[256] == pytest.approx(0.1 * 4)
    assert heights(ax, "to its square root")[16] == pytest.approx(0.1 / 2)


@pytest.mark.parametrize("plot", [plot_batch_size, plot_tuned_lr])
def test_from_a_diagnosis_that_was_read_back(plot):
    r = batches(BEST)
    found = diagnose_batch_size(r)
    fields = Finding.__dataclass_fields__
    again = Diagnosis(findings=tuple(Finding(**{n: to_json(getattr(f, n)) for n in fields}) for f in found))
    one, other = plot(r, found), plot(r, again)
    assert [list(a.get_ydata()) for a in one.get_lines()] == [list(b.get_ydata()) for b in other.get_lines()]


@pytest.mark.parametrize("plot", [plot_batch_size, plot_tuned_lr])
@pytest.mark.parametrize("r", [record([]), batches({64: 0.1}), batches({16: 0.1, 64: 0.1}, extra={16: math.nan, 64: math.nan})],
                         ids=["empty", "one size", "NaN"])  # fmt: skip
def test_where_there_is_little_it_says_so_or_draws_what_there_is(plot, r):
    ax = plot(r)
    assert why_not_measured(ax) or ax.get_lines()


def test_a_sweep_of_the_batch_size_alone_has_no_tuned_lr():
    assert "no learning rate was tuned" in why_not_measured(plot_tuned_lr(batches(BEST, lrs=[0.1])))


def test_where_nothing_was_tuned_nothing_is_called_tuned():
    labels = plot_batch_size(batches(BEST, lrs=[0.1])).get_legend_handles_labels()[1]
    assert labels
    assert not [label for label in labels if "tuned" in label]


def test_a_best_that_lies_at_the_end_is_hollow_and_the_legend_says_so():
    inside, at_end = (plot_tuned_lr(batches({64: 0.1, 256: best})) for best in (0.4, 1.6))
    assert "hollow: at the end of what was tried" not in inside.get_legend_handles_labels()[1]
    assert "hollow: at the end of what was tried" in at_end.get_legend_handles_labels()[1]


def test_the_rules_lie_under_what_was_found():
    lines = {line.get_label(): line.get_zorder() for line in plot_tuned_lr(batches(BEST)).get_lines()}
    assert lines["to its square root"] < lines["best at equal steps"]
