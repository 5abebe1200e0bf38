"""Numbers under the figures of the report."""

from __future__ import annotations

from typing import Any

import numpy as np

from workbench.findings.diagnosis import Diagnosis
from workbench.plots.frames import curve, evaluations, lr_of, trials_in
from workbench.plots.words import first_and_end, number_text

__all__ = ["confirm_numbers", "probe_numbers"]

EVERY_STEPS = 100
"""The coarse interval that the picture of the probe draws (F1.10)."""
MAX_RUNS = 4
"""Runs that a sentence names one by one."""


def probe_numbers(record: Any, _: Diagnosis) -> str:
    """Return the peak of the probe, and what a coarse evaluation would have shown of it."""
    trial = trials_in(record, "probe")[0]
    steps, values = evaluations(record, trial, split="validation", metric="loss")
    if steps.size < 3:
        steps, values = curve(record, trial, "loss")
    peak = int(np.argmax(np.where(np.isfinite(values), values, np.inf)))
    coarse = values[steps % EVERY_STEPS == 0]
    return (
        f"At lr {number_text(lr_of(record, trial))} the loss starts at {number_text(float(values[0]))} and is largest, "
        f"{number_text(float(values[peak]))}, at step {int(steps[peak]):,}; every {EVERY_STEPS} steps would have shown "
        f"at most {number_text(float(np.where(np.isfinite(coarse), coarse, np.inf).max()))}."
    )


def confirm_numbers(record: Any, _: Diagnosis) -> str:
    """Return where the runs above the best learning rate went."""
    lines = []
    for trial in trials_in(record, "confirm")[:MAX_RUNS]:
        values = curve(record, trial, "loss")[1]
        first, end = first_and_end(values)
        how = f"goes from {number_text(first)} to {number_text(end)}" if np.isfinite(end) else "ends non-finite"
        lines.append(f"lr {number_text(lr_of(record, trial))} {how}")
    return f"The loss at {'; that at '.join(lines)}." if lines else ""
