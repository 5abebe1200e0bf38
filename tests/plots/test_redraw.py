"""Figures side by side: their ids are their own, and threads that draw at once leave the style alone."""

from __future__ import annotations

import re
import threading

import matplotlib as mpl

from workbench.plots.render import Draw, side_by_side


def curve(height: float) -> Draw:
    return lambda ax: ax.plot([0, height], label="curve") and ax.set(xlabel="step", ylabel="loss")


def test_figures_side_by_side_have_one_name_and_ids_of_their_own() -> None:
    html = side_by_side([curve(1.0), curve(2.0)], alt='a "curve"')
    assert re.findall('<svg[^>]*(role="img" aria-label="a &quot;curve&quot;"|aria-hidden="true")', html)
    assert html.count('role="img"') == html.count('aria-label="a &quot;curve&quot;"') == 1
    ids = re.findall(r'\bid="([^"]*)"', html)
    assert len(set(ids)) == len(ids)


def test_threads_that_draw_at_once_leave_the_style_alone() -> None:
    before, failed = mpl.rcParams.copy(), []

    def many() -> None:
        try:
            for k in range(10):
                side_by_side([curve(float(k + 1))], alt="", size=(2.0, 2.0))
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=many) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert mpl.rcParams == before
