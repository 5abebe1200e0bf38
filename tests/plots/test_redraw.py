"""A figure that is drawn again and again: it is the same whatever was drawn before, and its words stay inside."""

from __future__ import annotations

import re
import threading

import matplotlib as mpl
import pytest
from matplotlib.axes import Axes

import workbench as wb
from tests.helpers.records import diagnosis, study
from tests.helpers.server_facts import facts, served
from tests.helpers.simulated_checkpoints import evaluated, overfitted
from workbench.plots.render import Draw, Redrawn
from workbench.plots.style import not_measured

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


def curve(height: float) -> Draw:
    return lambda ax: ax.plot([0, height], label="curve") and ax.set(xlabel="step", ylabel="loss")


@pytest.mark.parametrize("name", FIGURES)
def test_it_is_drawn_at_once_as_it_is_the_first_time(name: str) -> None:
    canvas = Redrawn(size=SIZE)
    first, again = (canvas.html([FIGURES[name]], alt=name) for _ in range(2))
    assert again == first
    assert first != canvas.html([curve(1.0)], alt=name)


def test_labels_that_grow_wider_get_more_room() -> None:
    canvas, boxes = Redrawn(size=SIZE), []

    def at(height: float) -> Draw:
        def draw(ax: Axes) -> None:
            ax.plot([0, height])
            boxes.append(ax)

        return draw

    for height in (1.0, 1e-5, 123456.0, 1.0):
        canvas.html([at(height)], alt="")
    left = [ax.get_position().x0 for ax in boxes]
    assert left[0] < left[2]
    assert all(ax.yaxis.get_tightbbox().x0 >= 0 for ax in boxes)


def test_figures_side_by_side_have_one_name_and_ids_of_their_own() -> None:
    html = Redrawn(size=SIZE).html([curve(1.0), curve(2.0)], alt='a "curve"')
    assert re.findall('<svg[^>]*(role="img" aria-label="a &quot;curve&quot;"|aria-hidden="true")', html)
    assert html.count("role=") == 1
    ids = re.findall(r'\bid="([^"]*)"', html)
    assert len(set(ids)) == len(ids)


def test_threads_that_draw_at_once_leave_the_style_alone() -> None:
    before, failed = mpl.rcParams.copy(), []

    def many() -> None:
        try:
            canvas = Redrawn(size=(2.0, 2.0))
            for k in range(10):
                canvas.html([curve(float(k + 1))], alt="")
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=many) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert mpl.rcParams == before
