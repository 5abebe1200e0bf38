"""The studies of a folder as one picture: the best value of each, in the order in which they were begun."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from workbench.plots.style import BASELINE, GOOD, INK, Size, drawing, legend, not_measured, short

LONGEST_NAME = 24


def plot_studies(table: pd.DataFrame, *, size: Size = "page", ax: Axes | None = None) -> Axes:
    """Draw the best value of every study of a table, with its number of trials beside it.

    Healthy: values that improve from study to study, or a study that says why it did not. Sick: a study without a point, of which
    no selected checkpoint is known; or a best value that was found long ago, with many trials spent since.

    Args:
        table: of `list_studies`; in the order of its column `created` where that was asked for.
        ax: where to draw, one row a study, the first at the top; a new figure by default.

    Source: P5.1 (one row a study), P5.5 and P5.6 (number of trials, best value).
    """
    with drawing(ax, size, (6.8, 3.6)) as axes:
        if not len(table):
            return not_measured(axes, "the table has no study")
        rows = table.sort_values("created", kind="stable") if "created" in table else table
        values = rows["best_value"].to_numpy(dtype=np.float64, na_value=np.nan)
        if not np.isfinite(values).any():
            return not_measured(axes, "no study has a best value")
        places, known = np.arange(len(rows)), np.isfinite(values)
        least = float(values[known].min())
        line: dict[str, Any] = {"color": BASELINE, "linewidth": 1.0, "label": "distance to the smallest value"}
        axes.hlines(places[known], least, values[known], **line)
        axes.plot(values[known], places[known], "o", color=GOOD, markersize=7, label="best selected checkpoint")
        for place, value, trials in zip(places, values.tolist(), rows["trials"], strict=True):
            best, at = (short(value), value) if np.isfinite(value) else ("no value", least)
            words = f"{best}, {trials} trials"
            axes.annotate(words, (at, place), xytext=(8, 4), textcoords="offset points", color=INK, fontsize=8)
        names = [str(name) for name in rows["study"]]
        names = [name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…" for name in names]
        axes.set_yticks(places, names, parse_math=False)
        axes.set_ylim(len(rows) - 0.5, -0.7)
        axes.set(xlabel="best value", ylabel="study", title="What the studies found")
        axes.margins(x=0.25)
        legend(axes)
    return axes
