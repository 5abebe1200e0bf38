"""The history of one tracked example: its loss, and what was predicted for it at every evaluation (P2.12)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from numpy.typing import NDArray

from workbench.errors import UsageError
from workbench.plots.style import BAD, GOOD, INK, Size, drawing, legend, log_scale, not_measured

MAX_SHOWN = 12  # predictions written out beside the curve; more would overlap
MAX_CHARACTERS = 28


@dataclass(frozen=True, kw_only=True)
class ExampleHistory:
    """One tracked example; `right` says of each prediction whether it is the label, None where predictions are numbers, which are never quite."""

    example: int  # its index in the split
    label: Any  # what it should be
    steps: NDArray[np.int64]  # of the evaluations, shape (evaluations,)
    losses: NDArray[np.float64]  # its loss at each, shape (evaluations,)
    predictions: Sequence[Any]  # what was predicted at each
    right: Sequence[bool | None]


def prediction_history(predictions: pd.DataFrame, *, trial: int | None = None) -> list[ExampleHistory]:
    """Return the tracked examples of a trial (None is the first), the one with the largest loss at the end first."""
    if not len(predictions):
        return []
    number = int(predictions["trial"].iloc[0]) if trial is None else trial
    mine = predictions[predictions["trial"] == number].sort_values("step", kind="stable")
    if mine.empty:
        raise UsageError(f"trial={trial} has no tracked predictions; there are trials {_listed(predictions['trial'])}.")
    found = [
        ExampleHistory(
            example=int(str(example)), label=rows["label"].iloc[-1], steps=rows["step"].to_numpy(dtype=np.int64),
            losses=rows["loss"].to_numpy(dtype=np.float64, na_value=np.nan), predictions=rows["prediction"].tolist(),
            right=[same_prediction(prediction, rows["label"].iloc[-1]) for prediction in rows["prediction"]],
        )
        for example, rows in mine.groupby("example")
    ]  # fmt: skip
    return sorted(found, key=lambda one: -one.losses[-1] if np.isfinite(one.losses[-1]) else -np.inf)


def _listed(values: pd.Series) -> str:
    return ", ".join(str(v) for v in sorted(values.unique())[:20])


def same_prediction(prediction: Any, label: Any) -> bool | None:
    """Return whether a class, or a list of them, is the label; None for numbers, which are never quite."""
    one, other = np.asarray(prediction), np.asarray(label)
    if one.dtype.kind not in "iu" or other.dtype.kind not in "iu" or one.shape != other.shape:
        return None
    return bool((one == other).all())


def plot_predictions(
    record: Any,
    example: int | None = None,
    *,
    trial: int | None = None,
    data: Any = None,
    image_shape: Sequence[int] = (),
    size: Size = "page",
    ax: Axes | None = None,
) -> Axes:
    """Draw the loss of one example against step, with what was predicted for it written beside each evaluation.

    Healthy: the loss falls, and the predictions settle on the label. Sick: the prediction flips to and fro, or stays wrong while
    the loss grows: a wrong label, an example unlike the others, or a model that unlearns it.

    Args:
        record: a study or a trial with tracked predictions.
        example: its id; None is the one with the largest loss at the end.
        trial: number of the trial; None is the first.
        data: the split that the example is from: an item that begins with an image (2-D, or 3-D with 1 or 3 channels), or with
            the integers of a text below 256, is shown.
        image_shape: of an image that is kept as a flat row of as many numbers, such as (28, 28).

    Raises:
        UsageError: the example, or the trial, was not tracked.

    Source: P2.12 (predictions for a chosen set of examples).
    """
    with drawing(ax, size, (7.2, 4.0)) as axes:
        table = getattr(record, "predictions", pd.DataFrame())
        if not len(table):
            return not_measured(axes, "the record has no tracked predictions (Trainer(track=...))")
        histories = {one.example: one for one in prediction_history(table, trial=trial)}
        if example is None:
            example = max(histories, key=lambda k: np.nan_to_num(histories[k].losses[-1], nan=-np.inf, posinf=-np.inf))
        if example not in histories:
            known = _listed(table["example"])
            raise UsageError(f"example={example} was not tracked; these were: {known}. Choose others with Trainer(track=[...]).")  # fmt: skip
        one = histories[example]
        steps, values, right = one.steps, one.losses, np.array(one.right, dtype=object)
        if not np.isfinite(values).any():
            return not_measured(axes, f"the loss of example {example} is never finite")
        axes.plot(steps, values, color=GOOD, label="loss of the example")
        marks = ((True, "o", GOOD, "correct"), (False, "x", BAD, "wrong"))
        for wanted, marker, color, name in marks:
            at = right == wanted
            if at.any():
                axes.plot(steps[at], values[at], linestyle="none", marker=marker, color=color, label=name)
        written = _write(axes, steps, values, one.predictions)
        left_out = 0 < written < len(steps)
        said = f"step (a number is a prediction: {written} of {len(steps)} are written)" if left_out else "step"
        axes.set(xlabel=said, ylabel="loss", title=f"Example {example}, label {prediction_text(one.label)}")
        if np.nanmin(values) > 0 and np.nanmax(values) > 20 * np.nanmin(values):
            log_scale(axes, "y")
        axes.margins(x=0.06, y=0.16)
        if data is not None:
            _show_input(axes, data[example], image_shape)
        legend(axes)
    return axes


def _write(axes: Axes, steps: NDArray[np.int64], values: NDArray[np.float64], predictions: Sequence[Any]) -> int:
    """Write predictions beside the curve, and return how many of them; 0 for lists, which say their step."""
    shown = np.unique(np.linspace(0, len(steps) - 1, min(MAX_SHOWN, len(steps))).astype(int))
    if np.asarray(predictions[0]).ndim:  # lists get a line each below one another
        lines = [f"{int(steps[i]):>6}  {prediction_text(predictions[i])}" for i in shown[-6:]]
        axes.text(0.02, 0.02, "\n".join(lines), transform=axes.transAxes, fontsize=7.5, family="monospace", va="bottom")
        return 0
    for i in shown:
        if np.isfinite(values[i]):
            at, text = (steps[i], values[i]), prediction_text(predictions[i])
            axes.annotate(text, at, (0, 7), textcoords="offset points", ha="center", fontsize=8.5, color=INK)
    return len(shown)


def prediction_text(value: Any) -> str:
    """Return a class, a number, an array of them or a text as a few characters."""
    array = np.asarray(value)
    if array.ndim == 0:
        return f"{array.item():.3g}" if array.dtype.kind == "f" else str(array.item())
    if array.dtype.kind in "iu" and array.size and array.min() >= 0 and array.max() < 256:
        said = repr(bytes(array.astype(np.uint8)).decode("latin-1"))
    else:
        said = ", ".join(f"{v:.3g}" for v in array.ravel()[:8])
    return said if len(said) <= MAX_CHARACTERS else f"{said[:MAX_CHARACTERS]}..."


def _show_input(axes: Axes, item: Any, image_shape: Sequence[int]) -> None:
    """Draw the image of an item, or its text as a line under the title."""
    first = np.asarray(item[0] if isinstance(item, (tuple, list)) else item)
    if image_shape and first.size == np.prod(image_shape):
        first = first.reshape(tuple(image_shape))
    if first.ndim == 3 and first.shape[0] in (1, 3):
        first = np.moveaxis(first, 0, -1)
    if first.ndim == 3 and first.shape[-1] == 1:
        first = first[..., 0]
    if first.ndim == 2 or (first.ndim == 3 and first.shape[-1] == 3):
        low, high = float(first.min()), float(first.max())
        inset = axes.inset_axes((1.02, 0.62, 0.28, 0.38))
        inset.imshow((first - low) / (high - low or 1.0), cmap="gray")
        inset.set_axis_off()
    elif first.ndim == 1 and first.dtype.kind in "iu":
        how: dict[str, Any] = {"transform": axes.transAxes, "ha": "center", "va": "top", "family": "monospace"}
        axes.text(0.5, 0.98, f"input {prediction_text(first)}", fontsize=8, **how)
