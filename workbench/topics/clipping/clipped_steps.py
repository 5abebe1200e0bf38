"""`clipped_steps`: which steps of a run a threshold at some percentile of its norms would clip (F4.9, F4.11)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from workbench.curves.clip_threshold import ClipThreshold, choose_threshold
from workbench.findings.diagnosis import Diagnosis

__all__ = ["ClippedSteps", "clipped_steps", "listed_steps"]


class ClippedSteps(NamedTuple):
    """A threshold, and what it touches.

    Attributes:
        chosen: the threshold, with the norms that it comes from.
        steps: those whose norm is finite and above it, in order; empty where there is no threshold.
    """

    chosen: ClipThreshold
    steps: NDArray[np.int64]


def clipped_steps(
    steps: ArrayLike,
    norms: ArrayLike,
    *,
    percentile: float,
    diagnosis: Diagnosis | None = None,
    trial: int | None = None,
) -> ClippedSteps:
    """Choose a threshold as `diagnose_clipping` does, and tell which steps it would clip.

    Args:
        steps: of one trial, shape (steps,).
        norms: L2 norms of the gradient before clipping, shape (steps,).
        percentile: of the norms in the steady stretch (F4.9).
        diagnosis: where its `clipping.threshold` was measured on this trial, its steady stretch is used.
        trial: which one the norms are of.
    """
    first = end = None
    if diagnosis is not None and "clipping.threshold" in diagnosis:
        evidence = diagnosis["clipping.threshold"].evidence
        if trial is not None and evidence.get("trial") == trial and "first_step" in evidence:
            first, end = int(evidence["first_step"]), int(evidence["last_step"]) + 1
    values = np.asarray(norms, dtype=np.float64).ravel()
    chosen = choose_threshold(values, percentile=percentile, first=first, end=end)
    limit = np.inf if chosen.threshold is None else chosen.threshold
    above = np.isfinite(values) & (values > limit)
    return ClippedSteps(chosen, np.asarray(steps, dtype=np.int64).ravel()[above])


def listed_steps(steps: ArrayLike, *, most: int = 8) -> str:
    """Return step numbers as words, neighbours as one stretch: "3, 17, 40 to 44".

    Args:
        steps: in order.
        most: stretches that are named; the others are counted.
    """
    values = np.asarray(steps, dtype=np.int64).ravel()
    runs = np.split(values, np.flatnonzero(np.diff(values) > 1) + 1) if values.size else []
    named = [f"{run[0]:,}" if run.size == 1 else f"{run[0]:,} to {run[-1]:,}" for run in runs[:most]]
    rest = int(sum(run.size for run in runs[most:]))
    return ", ".join(named) + (f" and {rest:,} more" if rest else "")
