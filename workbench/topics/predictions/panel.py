"""`predictions_panel`: the history of one tracked example, the worst first, with examples and steps on sliders (P2.12)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from workbench.panels.controls import Answer, Choice, Control, controls_panel, needs, nothing
from workbench.topics.predictions.figures import plot_predictions, prediction_history, prediction_text

ALT = "The loss of one example at each evaluation, with what was predicted for it."


def predictions_panel(
    record: Any,
    data: Any = None,
    *,
    trial: int | None = None,
    image_shape: Sequence[int] = (),
    live: bool | None = None,
) -> Any:
    """Return the history of one example below sliders for the example, the worst first, and for the evaluation.

    Args:
        record: a study or a trial with tracked predictions.
        data: the split that the examples are from, as in `plot_predictions`.
        trial: number of the trial; None is the first.
        image_shape: as in `plot_predictions`.
        live: None asks the environment: `WORKBENCH_LIVE=0` means that nobody is looking.

    Returns:
        See `controls_panel`.

    Raises:
        UsageError: the trial has no tracked predictions.

    Source: P2.12.
    """
    needs("predictions_panel", record, "predictions")
    histories = prediction_history(record.predictions, trial=trial)
    if not histories:
        why = "the record has no tracked predictions. Run wb.Trainer(track=[0, 1, 2]).run(workload, config, out=...)."
        return nothing("predictions_panel", why, alt=ALT, live=live)
    number = int(record.predictions["trial"].iloc[0]) if trial is None else trial
    by_example = {one.example: (rank, one) for rank, one in enumerate(histories, 1)}
    steps = sorted({int(step) for one in histories for step in one.steps})

    def answer(example: int, step: int) -> Answer:
        rank, one = by_example[example]
        count = len(histories)
        place = "the worst" if rank == 1 < count else f"place {rank:,} of {count:,}"
        head = f"Example {example}, label {prediction_text(one.label)}: {place} by its loss at the end."
        draw = lambda ax: plot_predictions(  # noqa: E731 - an answer holds functions
            record, example, trial=number, data=data, image_shape=image_shape, step=step, ax=ax
        )
        at, course = f"It was not evaluated at step {step:,}.", ""
        for k in np.flatnonzero(one.steps == step)[:1]:
            how = {True: " (right)", False: " (wrong)", None: ""}[one.right[k]]
            at = f"At step {step:,}: {prediction_text(one.predictions[k])}{how}, loss {one.losses[k]:.4g}."
        if any(right is not None for right in one.right):
            since = "wrong at the end" if one.right_since is None else f"right from step {one.right_since:,} to the end"
            course = f"The prediction changed {one.changes:,} time{'s' * (one.changes != 1)}; {since}."
        return Answer(f"{head} {at} {course}", [draw])

    controls: dict[str, Control] = {
        "example": Choice(
            label="worst first",
            options=[(f"{one.example} (loss {one.losses[-1]:.3g})", one.example) for one in histories],
            start=histories[0].example,
        ),
        "step": Choice(label="step", options=[(f"{step:,}", step) for step in steps], start=steps[-1]),
    }
    return controls_panel("predictions_panel", answer, controls, alt=ALT, live=live, size=(8.0, 4.0))
