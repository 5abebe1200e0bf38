"""Numbers under the figures of the report."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.findings.diagnosis import Diagnosis
from workbench.plots.frames import curve, default_trial
from workbench.plots.words import number_text

__all__ = ["histogram_numbers", "norm_numbers"]

Floats = NDArray[np.float64]


def norm_numbers(record: Any, diagnosis: Diagnosis) -> str:
    """Return the largest gradient norm beside the median."""
    trial = default_trial(record, diagnosis)
    steps, norms = _finite(*curve(record, trial, "grad_norm"))
    peak = int(np.argmax(norms))
    middle = float(np.median(norms))
    times = f", {number_text(float(norms[peak]) / middle)} times the median {number_text(middle)}" if middle else ""
    return f"Trial {trial}: the largest norm is {number_text(float(norms[peak]))}, at step {int(steps[peak]):,}{times}."


def histogram_numbers(record: Any, diagnosis: Diagnosis) -> str:
    """Return the quantiles of the gradient norms, and the proposed threshold."""
    trial = default_trial(record, diagnosis)
    _, norms = _finite(*curve(record, trial, "grad_norm"))
    low, high = (number_text(float(value)) for value in np.percentile(norms, (50, 90)))
    chosen = diagnosis["clipping.threshold"].value if "clipping.threshold" in diagnosis else None
    proposed = f"; the proposed clipping threshold is {number_text(chosen)}" if chosen is not None else ""
    return (
        f"Over all {norms.size:,} steps of trial {trial} the median is {low} and the 90th percentile {high}{proposed}."
    )


def _finite(steps: Floats, values: Floats) -> tuple[Floats, Floats]:
    known = np.isfinite(values)
    return steps[known], values[known]
