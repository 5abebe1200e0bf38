"""The numbers in the pictures are the numbers of the record."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tests.helpers.records import BEST, DIVERGED, DIVERGED_AT, LASTING, LRS, diagnosis, falling, losses_of, study
from workbench.topics.lr_sweep.figures import plot_loss_curves, plot_lr_sweep


def blank() -> Axes:
    return Figure().subplots()


def drawn(ax: Axes, label: str) -> np.ndarray:
    """Data of the one line whose label starts with `label`, shape (2, points)."""
    (line,) = [line for line in ax.lines if str(line.get_label()).startswith(label)]
    return np.asarray(line.get_data(), dtype=float)


def labels(ax: Axes) -> list[str]:
    return ax.get_legend_handles_labels()[1]


def test_feasible_points_are_the_tail_means() -> None:
    x, y = drawn(plot_lr_sweep(study(), diagnosis(), ax=blank()), "trained")
    feasible = [lr for lr in LRS if lr < LASTING]
    assert x.tolist() == feasible
    assert y == pytest.approx([falling(lr)[-12:].mean() for lr in feasible])


def test_each_infeasible_lr_is_marked_once_by_its_kind() -> None:
    ax = plot_lr_sweep(study(), diagnosis(), ax=blank())
    assert drawn(ax, "diverged (1)")[0].tolist() == [DIVERGED]
    assert drawn(ax, "unstable to the end (1)")[0].tolist() == [LASTING]
    markers = {line.get_marker() for line in ax.lines if str(line.get_label()).startswith(("diverged", "unstable to"))}
    assert len(markers) == 2


@pytest.mark.parametrize("count", [0, 1, 3, 6])
def test_number_of_crosses_is_the_number_of_diverged_lrs(count: int) -> None:
    said = diagnosis()
    points = [dict(p) for p in said["lr.best"].evidence["points"]]
    for index, point in enumerate(points):
        point |= {"loss": float("inf") if index < count else 1.0, "unstable": index < count}
    findings = (replace(said["lr.best"], evidence={"points": points}),)
    ax = plot_lr_sweep(study(), replace(said, findings=findings), ax=blank())
    crosses = [line for line in ax.lines if str(line.get_label()).startswith("diverged")]
    assert sum(len(line.get_xdata()) for line in crosses) == count


def test_best_unstable_and_baseline_lines_stand_at_their_lr() -> None:
    ax = plot_lr_sweep(study(), diagnosis(), ax=blank())
    for label, lr in (("lr* ", BEST), ("unstable from", LASTING), ("baseline", 0.02)):
        assert set(drawn(ax, label)[0].tolist()) == {lr}
    spans = sorted((p.get_x(), p.get_x() + p.get_width()) for p in ax.patches)
    assert np.ravel(spans) == pytest.approx([0.057, 0.113, 0.152, 0.16])


def test_without_a_diagnosis_the_points_come_from_the_record() -> None:
    ax = plot_lr_sweep(study(), ax=blank())
    x, y = drawn(ax, "trained")
    assert y == pytest.approx([falling(lr)[-12:].mean() for lr in x])
    assert DIVERGED in drawn(ax, "diverged")[0]
    assert not [label for label in labels(ax) if label.startswith("lr*")]


def test_negative_losses_get_a_linear_axis() -> None:
    said = diagnosis()
    points = [{**p, "loss": p["loss"] - 5.0} for p in said["lr.best"].evidence["points"] if np.isfinite(p["loss"])]
    ax = plot_lr_sweep(
        study(), replace(said, findings=(replace(said["lr.best"], evidence={"points": points}),)), ax=blank()
    )
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "linear")


def test_curves_at_and_just_above_the_best_lr_are_the_recorded_losses() -> None:
    ax = plot_loss_curves(study(), diagnosis=diagnosis(), ax=blank())
    assert drawn(ax, "lr 0.08 = lr*")[1] == pytest.approx(losses_of(BEST))
    assert drawn(ax, "lr 0.16 = 2 x")[1] == pytest.approx(losses_of(LASTING))
    assert drawn(ax, "lr 0.32 = 4 x")[1][:DIVERGED_AT] == pytest.approx(losses_of(DIVERGED)[:DIVERGED_AT])
    assert not [label for label in labels(ax) if label.startswith(("lr 0.01", "lr 0.02", "lr 0.04"))]


def test_diverged_end_is_marked_at_the_last_finite_loss() -> None:
    ax = plot_loss_curves(study(), diagnosis=diagnosis(), ax=blank())
    x, y = drawn(ax, f"lr 0.32 diverged at step {DIVERGED_AT}")
    assert (x[0], y[0]) == pytest.approx((DIVERGED_AT - 1, falling(BEST, DIVERGED_AT)[-1]))


@pytest.mark.parametrize(("above", "count"), [(0, 1), (1, 2), (9, 3)])
def test_how_many_lrs_above(above: int, count: int) -> None:
    ax = plot_loss_curves(study(), diagnosis=diagnosis(), above=above, ax=blank())
    assert len([label for label in labels(ax) if "diverged" not in label]) == count


def test_lrs_and_trials_choose_the_curves() -> None:
    assert labels(plot_loss_curves(study(), lrs=[0.01, 0.04], ax=blank())) == ["lr 0.01", "lr 0.04"]
    assert labels(plot_loss_curves(study(), trials=[1, 2], ax=blank())) == ["lr 0.01", "lr 0.02"]


def test_neighbouring_curves_differ_in_line_style_too() -> None:
    ax = plot_loss_curves(study(), lrs=LRS, ax=blank())
    lines = [line for line in ax.lines if "diverged" not in str(line.get_label())]
    assert len(lines) == len(LRS)
    styles = [line.get_linestyle() + str(line._unscaled_dash_pattern) for line in lines]
    assert len(set(styles)) == len(LRS)
    assert len({line.get_color() for line in lines}) == len(LRS)


def test_an_interpolated_best_lr_starts_the_curves_at_the_trained_one_below() -> None:
    said = diagnosis()
    between = replace(said["lr.best"], value=0.05, evidence={"measured_lr": 0.04})
    ax = plot_loss_curves(study(), diagnosis=replace(said, findings=(between,)), above=1, ax=blank())
    assert labels(ax) == ["lr 0.04 = 0.8 x lr*", "lr 0.08 = 1.6 x lr*"]


def test_lrs_of_the_search_for_the_unstable_one_count_as_above() -> None:
    record = study()
    record.trials.loc[record.trials["peak_lr"] > BEST, "stage"] = "lr_unstable"
    assert len(plot_loss_curves(record, diagnosis=diagnosis(), above=2, ax=blank()).get_legend().get_texts()) == 4


def test_title_claims_lr_star_only_where_it_was_chosen() -> None:
    assert plot_loss_curves(study(), diagnosis=diagnosis(), ax=blank()).get_title(loc="left").endswith("just above")
    for choice in ({"lrs": [0.01]}, {"trials": [1]}):
        ax = plot_loss_curves(study(), diagnosis=diagnosis(), ax=blank(), **choice)
        assert ax.get_title(loc="left") == "Training loss"


def test_a_bracket_of_close_lrs_is_drawn_once() -> None:
    record = study()
    close = record.trials["peak_lr"] == DIVERGED
    record.trials.loc[close, "peak_lr"] = 1.05 * LASTING
    shown = labels(plot_loss_curves(record, diagnosis=diagnosis(), ax=blank()))
    assert [label.split()[1] for label in shown] == ["0.08", "0.16"]


def test_without_lr_star_the_curves_stay_few() -> None:
    ax = plot_loss_curves(study(), most=3, ax=blank())
    assert [label for label in labels(ax) if "diverged" not in label] == ["lr 0.01", "lr 0.04", "lr 0.32"]


def test_a_run_that_passes_through_huge_losses_can_be_drawn() -> None:
    record = study()
    rows = record.steps.index[record.steps["trial"] == record.trials["trial"].iloc[-3]]
    record.steps.loc[rows[-3:], "loss"] = [1e150, 1e307, 1.7e308]
    ax = plot_loss_curves(record, trials=record.trials["trial"].tolist(), ax=blank())
    ax.figure.canvas.draw()
    assert ax.get_yscale() == "log"


def test_a_clipped_run_says_so_beside_one_without_at_the_same_lr() -> None:
    record = study()
    labels = plot_loss_curves(record, trials=[5, 10], ax=blank()).get_legend_handles_labels()[1]
    assert labels == ["lr 0.16", "lr 0.16: clipped above 0.5"]


def test_where_none_lies_far_enough_above_the_last_one_nearer_by_is_drawn() -> None:
    ax = plot_loss_curves(study(), diagnosis=diagnosis(), spacing=100.0, ax=blank())
    assert [label for label in labels(ax) if label.startswith("lr") and "diverged" not in label][1:] == [
        "lr 0.32 = 4 x lr*"
    ]
