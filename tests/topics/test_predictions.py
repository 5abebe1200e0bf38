"""The history of tracked examples, counted by hand and drawn."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tests.helpers.evaluations import predicted
from workbench.errors import UsageError
from workbench.plots.style import why_not_measured
from workbench.topics.predictions.figures import plot_predictions, prediction_history, same_prediction


def test_the_worst_comes_first_with_its_course() -> None:
    worst, other = prediction_history(predicted().predictions)
    assert (worst.example, other.example) == (3, 8)
    assert worst.steps.tolist() == [0, 10, 20, 30, 40]
    assert list(worst.predictions) == [7, 7, 4, 4, 4]
    assert list(worst.right) == [False, False, True, True, True]


def test_what_is_not_finite_is_worst_of_all() -> None:
    table = predicted().predictions
    table.loc[(table["example"] == 8) & (table["step"] == 40), "loss"] = np.inf
    table.loc[(table["example"] == 3) & (table["step"] == 40), "prediction"] = 9
    found = prediction_history(table)
    assert [one.example for one in found] == [8, 3]
    assert prediction_history(pd.DataFrame()) == []


@pytest.mark.parametrize(
    ("prediction", "label", "same"),
    [(3, 3, True), (3, 4, False), (0.5, 0.5, None), ([1, 2], [1, 2], True), ([1, 2], [2, 1], False), ([1, 2], 1, None)],
)
def test_classes_are_compared_and_numbers_are_not(prediction: object, label: object, same: bool | None) -> None:
    assert same_prediction(prediction, label) is same


def blank() -> Axes:
    return Figure().subplots()


def line(ax: Axes, label: str) -> list[float]:
    (found,) = [one for one in ax.lines if one.get_label() == label]
    return [float(x) for x in found.get_xdata()]


def test_right_and_wrong_predictions_have_their_own_marks() -> None:
    ax = plot_predictions(predicted(), 3, ax=blank())
    assert line(ax, "wrong") == [0, 10]
    assert line(ax, "correct") == [20, 30, 40]
    assert [t.get_text() for t in ax.texts] == ["7", "7", "4", "4", "4"]
    assert (ax.get_title(loc="left"), ax.get_xlabel()) == ("Example 3, label 4", "step")
    many = plot_predictions(predicted(30), 3, ax=blank())
    assert many.get_xlabel() == f"step (a number is a prediction: {len(many.texts)} of 30 are written)"


def test_an_example_or_a_trial_that_was_not_tracked_is_refused() -> None:
    with pytest.raises(UsageError, match=r"example=5 was not tracked; these were: 3, 8"):
        plot_predictions(predicted(), 5, ax=blank())
    with pytest.raises(UsageError, match=r"trial=7 has no tracked predictions; there are trials 0"):
        plot_predictions(predicted(), 3, trial=7, ax=blank())


@pytest.mark.parametrize(
    ("shape", "kept", "shown"),
    [((1, 8, 8), (), 1), ((3, 8, 8), (), 1), ((64,), [8, 8], 1), ((63,), [8, 8], 0)],
)
def test_an_image_is_shown(shape: tuple[int, ...], kept: Any, shown: int) -> None:
    data = {3: (np.arange(np.prod(shape), dtype=float).reshape(shape), 4)}
    insets = plot_predictions(predicted(), 3, data=data, image_shape=kept, ax=blank()).child_axes
    assert [inset.images[0].get_array().shape[:2] for inset in insets] == [(8, 8)] * shown


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
    assert line(ax, "correct") == [0, 10, 20, 30, 40]


def test_what_is_not_finite_or_not_there() -> None:
    for loss in (np.nan, np.inf):
        assert "never finite" in str(why_not_measured(plot_predictions(predicted(loss=loss), 3, ax=blank())))
    for nothing in (SimpleNamespace(), SimpleNamespace(predictions=pd.DataFrame())):
        assert "no tracked predictions" in str(why_not_measured(plot_predictions(nothing, ax=blank())))
    record = predicted()
    record.predictions.loc[0, "loss"] = np.inf
    plot_predictions(record, ax=(ax := blank()))
    assert (why_not_measured(ax), ax.get_title(loc="left")) == (None, "Example 3, label 4"), (
        "the worst, where none is named"
    )
