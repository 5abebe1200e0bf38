"""What a figure says of what it draws: how many updates were measured, which run is recommended, how many seeds a curve stands for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import workbench as wb
from tests.helpers.records import LRS, diagnosis, one_trial, study
from workbench.report.write import FIGURES, shown_here

NORMS = np.linspace(1.0, 2.0, 40)


def axes() -> Axes:
    return Figure().subplots()


def labels(ax: Axes) -> list[str]:
    return [str(label) for label in ax.get_legend_handles_labels()[1]]


def test_gradient_norms_of_some_updates_are_points_and_those_of_each_a_line() -> None:
    figure = next(figure for figure in FIGURES if figure.name == "grad-norm")
    each, some = one_trial(NORMS, "baseline"), one_trial(NORMS, "baseline")
    looked = np.arange(40) % 10 == 0
    some.steps["looked"] = looked.astype(float)
    some.steps["grad_norm"] = some.steps["grad_norm"].where(looked)

    whole, part = (wb.clipping.plot_grad_norm(record, ax=axes()) for record in (each, some))
    assert (whole.get_title(loc="left"), whole.lines[0].get_linestyle()) == ("Gradient norm at each step", "-")
    assert (part.get_title(loc="left"), part.lines[0].get_linestyle()) == ("Gradient norm in 4 of 40 updates", "None")
    assert part.lines[0].get_xdata().tolist() == [0, 10, 20, 30]
    assert "the median is 1.5, of the first fifth of the steps 1.09, of the last 1.91." in shown_here(
        figure, each, diagnosis()
    )
    assert "spike" not in shown_here(figure, each, diagnosis())
    assert "A single spike" in shown_here(figure, one_trial(np.append(NORMS, 20.0), "baseline"), diagnosis())
    said = shown_here(figure, some, diagnosis())
    assert said.startswith("Trial 0: gradient norm in 4 of 40 updates; the largest of those is 1.769")
    assert "spike" not in said


def test_a_recommended_lr_is_marked_beside_that_of_the_lowest_training_loss() -> None:
    found, record = diagnosis(), study()
    chosen = {"config": {"peak_lr": LRS[0]}, "chosen": {"trial": 1}, "adopted": True}
    apart = replace(found, recommendation={**(found.recommendation or {}), **chosen})
    refused = replace(apart, recommendation={**(apart.recommendation or {}), "adopted": False})

    at = f"recommended {LRS[0]:.3g}"
    assert {at, "lowest training loss 0.08 (shaded: where that may lie)"} <= {
        *labels(wb.lr_sweep.plot(record, apart, ax=axes()))
    }
    for other in (found, refused):
        assert not any("recommended" in label for label in labels(wb.lr_sweep.plot(record, other, ax=axes())))
    drawn = labels(wb.lr_sweep.plot_loss_curves(record, diagnosis=apart, ax=axes()))
    assert [label.partition(",")[0] for label in drawn if "recommended" in label] == [f"lr {LRS[0]:.3g}"]
    assert drawn[0] == "lr 0.08"


def test_seeds_of_one_lr_are_one_entry_of_a_legend() -> None:
    record = one_trial(NORMS)
    record.trials = pd.concat([record.trials.assign(trial=k, seed=k) for k in range(4)])
    record.steps = pd.concat([record.steps.assign(trial=k) for k in range(4)])
    ax = wb.lr_sweep.plot_loss_curves(record, trials=range(4), mark=float(record.trials["peak_lr"].iloc[0]), ax=axes())
    assert [label.partition(": ")[2] for label in labels(ax)] == ["4 seeds"]


def test_a_shading_is_named_where_it_is_wide_enough_to_be_seen() -> None:
    found, record = diagnosis(), study()
    edge = found["lr.unstable"]
    for lower, seen in ((edge.value / 1.02, False), (edge.value / 2, True)):
        bracket = replace(edge, evidence=edge.evidence | {"lower": lower, "upper": edge.value * 1.02})
        told = replace(found, findings=tuple(bracket if f.code == "lr.unstable" else f for f in found))
        assert any("not tried" in label for label in labels(wb.lr_sweep.plot(record, told, ax=axes()))) == seen


def test_a_loss_that_leaps_is_drawn_calm_over_a_band_and_another_one_as_it_is() -> None:
    """Bursts of 12 of 40 steps to a million times the loss; beside it noise of a few per cent."""
    steps = np.arange(1000)
    noise = 1 + 0.05 * np.random.default_rng(0).standard_normal(1000)
    leaps = np.where((steps % 40 < 12) & (steps > 100), 1e6, 1.0) * 1e-6 * noise
    for losses, moves in ((leaps, 4), (noise, 0)):
        record = one_trial(losses)
        ax = wb.lr_sweep.plot_loss_curves(record, trials=[0], ax=axes())
        drawn = np.asarray(ax.lines[0].get_ydata(), dtype=float)
        assert (np.abs(np.diff(np.log10(drawn))) > 0.5).sum() <= moves
        assert len(ax.lines) == len(ax.collections) == 1, "the median and its band"
    assert np.ptp(drawn) > 0.02, "a calm loss keeps what can be seen of it"
