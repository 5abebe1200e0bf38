"""The history of one example: marks, words, and the input beside it."""

from __future__ import annotations

import io
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tests.helpers.evaluations import predicted
from workbench.errors import UsageError
from workbench.plots.style import why_not_measured
from workbench.topics.predictions.figures import plot_predictions


def blank() -> Axes:
    return Figure().subplots()


def line(ax: Axes, label: str) -> list[float]:
    (found,) = [one for one in ax.lines if one.get_label() == label]
    return [float(x) for x in found.get_xdata()]


def test_right_and_wrong_predictions_have_their_own_marks() -> None:
    ax = plot_predictions(predicted(), 3, ax=blank())
    assert line(ax, "prediction is another") == [0, 10]
    assert line(ax, "prediction is the label") == [20, 30, 40]
    assert [t.get_text() for t in ax.texts] == ["7", "7", "4", "4", "4"]
    assert ax.get_title(loc="left") == "Example 3, label 4"


def test_the_worst_example_is_drawn_where_none_is_named() -> None:
    assert ax_title(plot_predictions(predicted(), ax=blank())).startswith("Example 3")


def ax_title(ax: Axes) -> str:
    return ax.get_title(loc="left")


def test_an_example_or_a_trial_that_was_not_tracked_is_refused() -> None:
    with pytest.raises(UsageError, match=r"example=5 was not tracked; these were: 3, 8"):
        plot_predictions(predicted(), 5, ax=blank())
    with pytest.raises(UsageError, match=r"trial=7 has no tracked predictions; there are trials 0"):
        plot_predictions(predicted(), 3, trial=7, ax=blank())


@pytest.mark.parametrize("shape", [(8, 8), (1, 8, 8), (3, 8, 8)])
def test_an_image_is_shown(shape: tuple[int, ...]) -> None:
    data = {3: (np.arange(np.prod(shape), dtype=float).reshape(shape), 4)}
    ax = plot_predictions(predicted(), 3, data=data, ax=blank())
    ((inset),) = ax.child_axes
    assert inset.images[0].get_array().shape[:2] == (8, 8)


def test_a_flat_image_is_shown_in_its_shape_and_another_row_is_not() -> None:
    for size, shown in ((64, 1), (63, 0)):
        ax = plot_predictions(predicted(), 3, data={3: (np.arange(float(size)), 4)}, image_shape=[8, 8], ax=blank())
        assert len(ax.child_axes) == shown


def test_a_text_is_shown_and_so_are_predicted_texts() -> None:
    text = np.frombuffer(b"import os", dtype=np.uint8).astype(np.int64)
    column = np.empty(10, dtype=object)
    column[:] = [text + 0] * 10
    record = predicted()
    record.predictions = record.predictions.assign(prediction=column, label=column)
    ax = plot_predictions(record, 3, data={3: (text, text)}, ax=blank())
    said = " ".join(t.get_text() for t in ax.texts)
    assert "input 'import os'" in said
    assert said.count("import os") >= 5
    assert line(ax, "prediction is the label") == [0, 10, 20, 30, 40]


def test_numbers_are_written_and_never_called_wrong() -> None:
    record = predicted(prediction=0.25, label=0.5)
    ax = plot_predictions(record, 3, ax=blank())
    assert "prediction is another" not in [one.get_label() for one in ax.lines]
    assert {t.get_text() for t in ax.texts} == {"0.25"}


@pytest.mark.parametrize("loss", [np.nan, np.inf])
def test_what_is_never_finite_is_not_measured(loss: float) -> None:
    assert "never finite" in str(why_not_measured(plot_predictions(predicted(loss=loss), 3, ax=blank())))


def test_some_values_that_are_not_finite_still_render() -> None:
    record = predicted()
    record.predictions.loc[0, "loss"] = np.inf
    plot_predictions(record, 3, ax=(ax := blank()))
    ax.get_figure(root=True).savefig(io.BytesIO())
    assert why_not_measured(ax) is None
    assert ax.lines


@pytest.mark.parametrize("record", [SimpleNamespace(), SimpleNamespace(predictions=pd.DataFrame())])
def test_a_record_without_predictions_says_so(record: SimpleNamespace) -> None:
    assert "no tracked predictions" in str(why_not_measured(plot_predictions(record, ax=blank())))


def test_predictions_that_are_left_out_are_counted() -> None:
    assert plot_predictions(predicted(), 3, ax=blank()).get_xlabel() == "step"
    ax = plot_predictions(predicted(30), 3, ax=blank())
    assert ax.get_xlabel() == f"step (a number is a prediction: {len(ax.texts)} of 30 are written)"
