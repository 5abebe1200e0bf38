"""`prediction_history`: what was predicted for each tracked example over a run, the worst examples first (P2.12)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from workbench.errors import UsageError

__all__ = ["ExampleHistory", "prediction_history", "same_prediction"]


@dataclass(frozen=True, kw_only=True)
class ExampleHistory:
    """One tracked example.

    Attributes:
        example: its index in the split.
        label: what it should be.
        steps: of the evaluations, shape (evaluations,).
        losses: its loss at each, shape (evaluations,).
        predictions: what was predicted at each.
        right: whether that is the label; None where predictions are numbers, which are never quite.
    """

    example: int
    label: Any
    steps: NDArray[np.int64]
    losses: NDArray[np.float64]
    predictions: Sequence[Any]
    right: Sequence[bool | None]

    @property
    def last_loss(self) -> float:
        """Loss at the last evaluation; NaN where it is not finite."""
        return float(self.losses[-1]) if np.isfinite(self.losses[-1]) else float("nan")

    @property
    def changes(self) -> int:
        """How often the prediction changed from one evaluation to the next."""
        each = [np.asarray(prediction) for prediction in self.predictions]
        return sum(a.shape != b.shape or bool((a != b).any()) for a, b in itertools.pairwise(each))

    @property
    def right_since(self) -> int | None:
        """Step from which on the prediction stayed the label to the end; None where the last one is not."""
        since = None
        for step, right in zip(self.steps[::-1], list(self.right)[::-1], strict=True):
            if right is not True:
                break
            since = int(step)
        return since


def prediction_history(predictions: pd.DataFrame, *, trial: int | None = None) -> list[ExampleHistory]:
    """Return the tracked examples of a trial, the one with the largest loss at the end first.

    Args:
        predictions: `.predictions` of a study or a trial.
        trial: number of the trial; None is the first.

    Raises:
        UsageError: the trial has none.
    """
    if not len(predictions):
        return []
    number = int(predictions["trial"].iloc[0]) if trial is None else trial
    mine = predictions[predictions["trial"] == number]
    if mine.empty:
        known = ", ".join(map(str, sorted(predictions["trial"].unique())[:20]))
        raise UsageError(f"trial={trial} has no tracked predictions; there are trials {known}.")
    found = [_history(int(str(example)), rows) for example, rows in mine.groupby("example")]
    return sorted(found, key=lambda one: (-np.nan_to_num(one.last_loss, nan=np.inf), one.example))


def same_prediction(prediction: Any, label: Any) -> bool | None:
    """Return whether a class, or a list of them, is the label; None for numbers, which are never quite."""
    one, other = np.asarray(prediction), np.asarray(label)
    if one.dtype.kind not in "iu" or other.dtype.kind not in "iu" or one.shape != other.shape:
        return None
    return bool((one == other).all())


def _history(example: int, rows: pd.DataFrame) -> ExampleHistory:
    rows = rows.sort_values("step", kind="stable")
    label = rows["label"].iloc[-1]
    predictions = rows["prediction"].tolist()
    return ExampleHistory(
        example=example,
        label=label,
        steps=rows["step"].to_numpy(dtype=np.int64),
        losses=rows["loss"].to_numpy(dtype=np.float64, na_value=np.nan),
        predictions=predictions,
        right=[same_prediction(prediction, label) for prediction in predictions],
    )
