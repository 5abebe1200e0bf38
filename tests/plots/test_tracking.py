"""One row a study, where its best value is."""

from __future__ import annotations

import math

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from workbench.plots.style import why_not_measured
from workbench.topics.tracking.figures import plot_studies

TABLE = pd.DataFrame(
    {
        "study": ["b", "a" * 40, "$c$"],
        "trials": [3, 7, 1],
        "best_value": [0.5, 0.25, math.nan],
        "created": ["2", "1", "3"],
    }
)


def blank() -> Axes:
    return Figure().subplots()


def points(ax: Axes) -> list[tuple[float, float]]:
    (line,) = [line for line in ax.lines if line.get_label() == "best selected checkpoint"]
    return [(float(x), float(y)) for x, y in zip(*line.get_data(), strict=True)]


def test_studies_stand_in_the_order_in_which_they_were_begun() -> None:
    ax = plot_studies(TABLE, ax=blank())
    assert points(ax) == [(0.25, 0), (0.5, 1)]
    assert [text.get_text() for text in ax.texts] == ["0.25, 7 trials", "0.5, 3 trials", "no value, 1 trials"]
    names = [text.get_text() for text in ax.get_yticklabels()]
    assert names[0].endswith("…")
    assert names[1:] == ["b", "$c$"]
    assert points(plot_studies(TABLE.drop(columns="created"), ax=blank())) == [(0.5, 0), (0.25, 1)]


def test_nothing_to_draw() -> None:
    assert why_not_measured(plot_studies(TABLE.iloc[:0], ax=blank()))
    assert why_not_measured(plot_studies(TABLE.iloc[2:], ax=blank()))
