"""The panel of predictions: worst first, and what was predicted when."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from tests.helpers.evaluations import predicted
from tests.helpers.panels import said
from workbench.topics.predictions.panel import predictions_panel


def test_the_worst_example_comes_first() -> None:
    panel = predictions_panel(predicted(), live=True)
    assert [value for _, value in panel.controls["example"].options] == [3, 8]
    assert said(panel).startswith("Example 3, label 4: the worst by its loss at the end.")


@pytest.mark.parametrize(
    ("step", "words"), [(10, "At step 10: 7 (wrong), loss 1."), (20, "At step 20: 4 (right), loss 0.6667.")]
)
def test_what_was_predicted_at_a_step(step: int, words: str) -> None:
    panel = predictions_panel(predicted(), live=True)
    panel.controls["step"].value = step
    assert words in said(panel)
    assert "The prediction changed 1 time; right from step 20 to the end." in said(panel)


def test_a_loss_that_is_not_finite_is_the_worst() -> None:
    table = predicted().predictions
    table.loc[(table["example"] == 8) & (table["step"] == table["step"].max()), "loss"] = np.nan
    record = SimpleNamespace(trials=pd.DataFrame({"trial": [0]}), predictions=table)
    assert predictions_panel(record, live=True).controls["example"].value == 8
