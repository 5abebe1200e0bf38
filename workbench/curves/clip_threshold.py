"""`choose_threshold`: a clipping threshold from the gradient norms of one run (F4.5, F4.9, O6)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class ClipThreshold:
    """A threshold for `max_grad_norm`, with the norms that it comes from.

    Attributes:
        threshold: the percentile over the steady stretch; None when it cannot be measured.
        percentile: which one was asked for.
        reason: why there is no threshold, else "".
        all_steps: the same percentile over all finite norms, the first steps included; None without any.
        windows: the same percentile in each window of the whole run, in order of time; NaN for a window without finite norms.
        drift: largest over smallest median of as many windows of the steady stretch; None where unknown.
        median: of the steady stretch, the "typical" norm (F4.5).
        low: its 25th percentile.
        high: its 75th percentile.
        ratio: threshold / median (F4.5).
        clip_frac: share of the finite norms of the whole run that lie above the threshold: what would be clipped.
        first_step: index of the first step of the steady stretch.
        last_step: index of its last step.
        steps: norms given.
        nonfinite: how many of them are NaN or infinite: counted, never averaged.
        zeros: how many are exactly 0.
    """

    threshold: float | None
    percentile: float
    reason: str = ""
    all_steps: float | None = None
    windows: tuple[float, ...] = ()
    drift: float | None = None
    median: float | None = None
    low: float | None = None
    high: float | None = None
    ratio: float | None = None
    clip_frac: float | None = None
    first_step: int = 0
    last_step: int = -1
    steps: int = 0
    nonfinite: int = 0
    zeros: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self) | {"windows": list(self.windows)}


def ordinal(percentile: float) -> str:
    """Return a percentile as it is said: 90th, 51st, 12th."""
    ending = {1: "st", 2: "nd", 3: "rd"}.get(int(percentile) % 10, "th") if percentile % 1 == 0 else "th"
    return f"{percentile:g}{'th' if 10 <= percentile % 100 <= 20 else ending}"


def arrival(norms: ArrayLike, *, start_frac: float = 0.1, rounding: float = 1e-6) -> int:
    """Return the step from which on a run has nothing left to learn, or its length: its norms stay near rounding.

    Without noise gradients shrink for as long as training goes on; what they are at the end says nothing about training.

    Args:
        norms: shape (steps,).
        start_frac: share of the run whose median norm the others are held against (rule of thumb).
        rounding: norms below this share of it are rounding (rule of thumb: the resolution of float32).
    """
    values = np.asarray(norms, dtype=np.float64).ravel()
    head = values[: max(1, math.ceil(start_frac * values.size))]
    head = head[np.isfinite(head)]
    if not head.size or not head.any():
        return int(values.size)
    alive = np.flatnonzero(~(values <= rounding * float(np.median(head[head > 0]))))
    return int(alive[-1]) + 1


def steady_stretch(
    steps: int,
    *,
    warmup_steps: int = 0,
    rises: Sequence[tuple[int, int | None]] = (),
    skip_frac: float = 0.1,
) -> tuple[int, int]:
    """Return (first, end) of the steps whose norms are typical; `end` is exclusive.

    The first norms of a run, and those of an instability, are no guide to the rest of it (O6). What is left is the run
    after its start and its warmup; of a run with rises the longest stretch between them.

    Args:
        warmup_steps: updates during which the lr still grows.
        rises: for each rise of the loss the last step before it, and the first step back; None when it never was.
        skip_frac: share of the run that counts as its start, the cap on warmup of F3.10.
    """
    start = min(max(math.ceil(skip_frac * steps), warmup_steps), steps)
    stretches = []
    for onset, back in sorted(rises, key=lambda rise: rise[0]):
        stretches.append((start, max(start, min(onset + 1, steps))))
        start = steps if back is None else max(start, min(back, steps))
    return max([*stretches, (start, steps)], key=lambda stretch: stretch[1] - stretch[0])


def choose_threshold(
    norms: ArrayLike,
    *,
    percentile: float = 90.0,
    first: int | None = None,
    end: int | None = None,
    skip_frac: float = 0.1,
    windows: int = 10,
    min_steps: int = 20,
    equal_rtol: float = 1e-6,
) -> ClipThreshold:
    """Choose a clipping threshold: a percentile of the unclipped norms of a steady stretch of one run.

    Healthy norms are a hump with a tail, and the threshold lies just above the hump: about a tenth of the updates are
    then clipped. Large norms at the start of a run would lift a percentile over all steps above everything that comes
    later, so they are left out and the two are reported side by side.

    Args:
        norms: L2 norms of the gradient before clipping, shape (steps,).
        percentile: 90 is the playbook's start (F4.9), to be lowered where instability stays (F4.10).
        first: index of the first step of the steady stretch; None leaves out the start.
        end: index behind its last step; None is the end of the run.
        skip_frac: share of the run that counts as its start where `first` is None, the cap on warmup of F3.10.
        windows: how many windows of equal length the whole run is cut into.
        min_steps: fewer finite norms in the stretch choose nothing: a tenth of 20 is 2 (rule of thumb).
        equal_rtol: norms that differ by no more than this share are equal (rule of thumb: rounding of float32).

    Raises:
        ValueError: `percentile` is not above 0 and at most 100.
    """
    if not 0 < percentile <= 100:
        raise ValueError(f"percentile={percentile!r} must be above 0 and at most 100.")
    values = np.asarray(norms, dtype=np.float64).ravel()
    usual = steady_stretch(arrival(values), skip_frac=skip_frac)
    start, stop = (usual[0] if first is None else first), (usual[1] if end is None else end)
    finite = np.isfinite(values)
    common: dict[str, Any] = {
        "percentile": float(percentile),
        "first_step": start,
        "last_step": stop - 1,
        "steps": values.size,
        "nonfinite": int((~finite).sum()),
        "zeros": int((values == 0).sum()),
        "all_steps": float(np.percentile(values[finite], percentile)) if finite.any() else None,
        "windows": tuple(_percentile(part, percentile) for part in np.array_split(values, max(1, windows))),
    }
    steady = values[start:stop][finite[start:stop]]
    why = _useless(values, steady, percentile, min_steps, equal_rtol)
    if why:
        return ClipThreshold(threshold=None, reason=why, **common)
    low, median, high = (float(q) for q in np.percentile(steady, [25, 50, 75]))
    threshold = float(np.percentile(steady, percentile))
    return ClipThreshold(
        threshold=threshold,
        median=median,
        low=low,
        high=high,
        ratio=threshold / median if median > 0 else None,
        clip_frac=float((values[finite] > threshold).mean()),
        drift=_drift(values[start:stop], windows),
        **common,
    )


def _useless(values: FloatArray, steady: FloatArray, percentile: float, min_steps: int, equal_rtol: float) -> str:
    """Return why no threshold can be chosen from these norms, "" where one can."""
    if not values.size:
        return "no gradient norm was recorded"
    if not np.isfinite(values).any():
        return f"none of the {values.size} gradient norms is finite"
    if steady.size < min_steps:
        return f"the steady stretch has {steady.size} finite gradient norms, and {min_steps} are needed"
    if not steady.any():
        return "all gradient norms are 0: no gradient reaches the parameters"
    if np.ptp(steady) <= equal_rtol * steady.max():
        return f"all gradient norms are equal ({steady[0]:.4g}): a threshold would clip every step or none"
    if np.percentile(steady, percentile) <= 0:
        return (
            f"{(steady == 0).mean():.0%} of the gradient norms are 0, and so is their {ordinal(percentile)} percentile"
        )
    return ""


def _percentile(values: FloatArray, percentile: float) -> float:
    known = values[np.isfinite(values)]
    return float(np.percentile(known, percentile)) if known.size else math.nan


def _drift(steady: FloatArray, windows: int) -> float | None:
    """Return how far the typical norm moves within the stretch, as largest over smallest window."""
    found = [_percentile(part, 50.0) for part in np.array_split(steady, max(1, windows))]
    known = [value for value in found if value > 0]
    return max(known) / min(known) if len(known) > 1 else None
