"""What a panel points out in a figure lies where it was asked for, and the rest of the figure stays."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import workbench as wb
from tests.helpers.evaluations import predicted
from tests.helpers.records import one_trial, study
from tests.helpers.simulated_norms import study as norms


def blank() -> Axes:
    return Figure().subplots()


@pytest.mark.parametrize(
    ("draw", "label", "x"),
    [
        (lambda mark, ax: wb.lr_sweep.plot(study(), mark=mark, ax=ax), "lr 0.04", 0.04),
        (lambda mark, ax: wb.batch_norm.plot(norms({8: [0.6, 0.7], None: [0.5, 0.5]}), mark=mark, ax=ax), "32 examples", 32),
        (lambda mark, ax: wb.predictions.plot(predicted(), 3, step=mark, ax=ax), "step 20", 20),
    ],
)  # fmt: skip
def test_a_mark_is_one_line_where_it_was_asked_for(draw: Callable[..., Axes], label: str, x: float) -> None:
    marked, plain = draw(x, blank()), draw(None, blank())
    (line,) = [line for line in marked.lines if line.get_label() == label]
    assert float(np.ravel(line.get_xdata())[0]) == x
    assert len(marked.lines) == len(plain.lines) + 1
    assert marked.get_xlim() == plain.get_xlim()


def test_clipped_steps_are_marked_at_their_norms() -> None:
    norms_ = np.random.default_rng(0).lognormal(size=200)
    ax = wb.clipping.plot_grad_norm(one_trial(norms_), percentile=90.0, ax=blank())
    (dots,) = [line for line in ax.lines if line.get_marker() == "o"]
    limit = np.percentile(norms_[20:], 90)
    assert np.asarray(dots.get_xdata()).tolist() == np.flatnonzero(norms_ > limit).tolist()
    assert np.asarray(dots.get_ydata()).tolist() == norms_[norms_ > limit].tolist()
