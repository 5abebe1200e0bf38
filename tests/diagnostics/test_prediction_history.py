"""The history of tracked examples, counted by hand."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from tests.helpers.evaluations import predicted
from workbench.errors import UsageError
from workbench.topics.predictions.figures import prediction_history, same_prediction


def test_the_worst_comes_first_with_its_course() -> None:
    worst, other = prediction_history(predicted().predictions)
    assert (worst.example, other.example) == (3, 8)
    assert worst.steps.tolist() == [0, 10, 20, 30, 40]
    assert list(worst.predictions) == [7, 7, 4, 4, 4]
    assert list(worst.right) == [False, False, True, True, True]
    assert (worst.changes, worst.right_since) == (1, 20)
    assert (other.changes, other.right_since) == (0, 0)


def test_a_prediction_that_is_wrong_at_the_end_was_never_settled() -> None:
    table = predicted().predictions
    table.loc[(table["example"] == 3) & (table["step"] == 40), "prediction"] = 9
    worst = prediction_history(table)[0]
    assert (worst.changes, worst.right_since) == (2, None)


def test_what_is_not_finite_is_worst_of_all() -> None:
    table = predicted().predictions
    table.loc[(table["example"] == 8) & (table["step"] == 40), "loss"] = np.inf
    assert [one.example for one in prediction_history(table)] == [8, 3]


def test_nothing_tracked_is_nothing_and_another_trial_is_refused() -> None:
    assert prediction_history(pd.DataFrame()) == []
    with pytest.raises(UsageError, match="trial=5 has no tracked predictions; there are trials 0"):
        prediction_history(predicted().predictions, trial=5)


@pytest.mark.parametrize(
    ("prediction", "label", "same"),
    [(3, 3, True), (3, 4, False), (0.5, 0.5, None), ([1, 2], [1, 2], True), ([1, 2], [2, 1], False), ([1, 2], 1, None)],
)
def test_classes_are_compared_and_numbers_are_not(prediction: object, label: object, same: bool | None) -> None:
    assert same_prediction(prediction, label) is same
