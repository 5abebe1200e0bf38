"""A figure that is drawn again and again: the pixels are those of matplotlib's own way, whatever was drawn before."""

from __future__ import annotations

import io
import threading
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib import image
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import workbench as wb
from tests.helpers.panels import pixels
from tests.helpers.records import diagnosis, study
from tests.helpers.server_facts import facts, served
from tests.helpers.simulated_checkpoints import evaluated, overfitted
from workbench.plots.render import Draw, Redrawn
from workbench.plots.style import house_style, not_measured

SIZE = (4.9, 3.9)
CURVES = evaluated([overfitted(seed=k) for k in range(2)])
FIGURES: dict[str, Draw] = {
    "two logarithmic axes": lambda ax: wb.lr_sweep.plot(study(), diagnosis(), ax=ax),
    "text as ticks, upside down": lambda ax: wb.checkpoints.plot_early_stopping(CURVES, ax=ax),
    "shares": lambda ax: wb.checkpoints.plot(CURVES, ax=ax),
    "a legend below": lambda ax: wb.ps.plot(served(facts()), ax=ax),
    "nothing": lambda ax: not_measured(ax, "nobody looked"),
    "values on either side of 0": lambda ax: ax.set_yscale("symlog", linthresh=1) or ax.plot([-50, 0.1, 900]),
    "an offset": lambda ax: ax.plot([1e9, 1e9 + 3]),
}  # fmt: skip


def by_matplotlib(draws: Sequence[Draw]) -> np.ndarray:
    """The same figures as `Figure.savefig` draws them."""
    with house_style():
        figure = Figure(figsize=(SIZE[0] * len(draws), SIZE[1]), layout="constrained")
        for draw, ax in zip(draws, figure.subplots(1, len(draws), squeeze=False)[0], strict=True):
            draw(ax)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=100)
    buffer.seek(0)
    return np.asarray(image.imread(buffer, format="png"))[..., :3]


def differing(one: np.ndarray, other: np.ndarray) -> float:
    """Share of the pixels that look different."""
    return float((np.abs(one - other).max(axis=-1) > 0.15).mean())


@pytest.mark.parametrize("name", FIGURES)
def test_it_draws_what_matplotlib_draws(name: str) -> None:
    draws = [FIGURES[name], FIGURES["shares"]]
    expected, canvas = by_matplotlib(draws), Redrawn(size=SIZE)
    for _ in range(2):
        assert differing(pixels(canvas.png(draws)), expected) < 1e-3
    assert differing(pixels(canvas.png([curve(1.0), curve(2.0)])), expected) > 1e-2, "the measure sees others"


def test_whatever_was_drawn_before_the_picture_is_the_same() -> None:
    """Of those with a layout of their own; elsewhere longer labels before leave more room than need be."""
    canvas = Redrawn(size=SIZE)
    alone = {name: pixels(Redrawn(size=SIZE).png([draw])) for name, draw in FIGURES.items()}
    for name, draw in [*FIGURES.items(), *reversed(FIGURES.items())]:
        shown = pixels(canvas.png([draw]))
        if name in ("nothing", "a legend below", "text as ticks, upside down"):
            assert np.array_equal(shown, alone[name])
        assert np.flatnonzero((shown[..., :3] < 0.6).any(axis=(0, 2))).min() > 0, "nothing is cut off"


def curve(height: float) -> Draw:
    return lambda ax: ax.plot([0, height], label="curve") and ax.set(xlabel="step", ylabel="loss")


def test_what_is_inside_moves_over_a_frame_that_stays() -> None:
    def at(step: float) -> Draw:
        def draw(ax: Axes) -> Any:
            ax.plot([0, 10], [0, 1])
            ax.set_xlim(0, 10)
            ax.axvline(step, color="#ff0000")

        return draw

    canvas = Redrawn(size=SIZE)
    red = []
    for step in (2.0, 8.0):
        shown = pixels(canvas.png([at(step)]))
        red.append(np.flatnonzero(((shown[..., 0] > 0.9) & (shown[..., 1] < 0.1)).any(axis=0)))
    assert red[0].max() < red[1].min(), "one line each, and none of the picture before"


def test_threads_that_draw_at_once_leave_the_style_alone() -> None:
    before, failed = mpl.rcParams.copy(), []

    def many() -> None:
        try:
            canvas = Redrawn(size=(2.0, 2.0))
            for k in range(10):
                canvas.png([curve(float(k + 1))])
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=many) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert mpl.rcParams == before
