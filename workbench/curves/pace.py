"""What one run tells of its learning rate: a loss that does not slow down has hardly learned anything yet, one that rose above that of the untrained model lost its first weights."""

import math
from typing import Any

import numpy as np

from workbench.curves.trial_curves import FloatArray, TrialCurve

PACE = 0.8


def unslowed(
    curve: TrialCurve,
    chance: float | None,
    *,
    least: int = 150,
    pace: float = PACE,
    learned: float = 0.5,
    noise_sds: float = 3.0,
) -> dict[str, Any] | None:
    """Return "start" and "end", the loss in the first and last quarter, "pace" and "learned" of a run whose loss does not slow down; else None.

    The pace is the fall from the third quarter to the last over that from the first to the second, the smaller of quarters with as many updates, and of
    those with equal sums of the learning rate: a schedule slows nothing down.

    Args:
        curve: the run.
        chance: loss of the best constant output; None takes the first loss.
        least: updates below which nothing is said (rule of thumb).
        pace: from which a loss is not slowing down (rule of thumb: of 70 healthy trainings of others half have 0.08 or less, all but two 0.35, and these 0.60 and 0.78).
        learned: share of the way from chance to 0 that a run comes whose pace says nothing (rule of thumb).
        noise_sds: standard errors by which the loss has to fall (rule of thumb).
    """
    rows = np.isfinite(curve.loss)
    losses = curve.loss[rows]
    if losses.size < least:
        return None
    lr = np.nan_to_num(curve.column("lr")[rows]).clip(min=0)
    found = [_quarters(losses, weights) for weights in (np.ones(losses.size), lr) if weights.any()]
    if None in found:
        return None
    paces = [_pace(levels, error, noise_sds) for levels, error in filter(None, found)]
    (levels, _), slowest = found[0] or (np.zeros(4), 0.0), min(paces)
    begun = float(losses[0]) if chance is None else chance
    share = (begun - float(levels[3])) / begun if begun > 0 else math.inf
    if slowest < pace or levels[3] < 0 or share >= learned:
        return None
    return {"start": float(levels[0]), "end": float(levels[3]), "pace": slowest, "learned": share}


def blown(
    curve: TrialCurve,
    chance: float | None,
    *,
    window: int = 5,
    rise: float = 1.25,
    growth: float = 6.0,
    learned: float = 0.85,
    noise_sds: float = 3.0,
) -> dict[str, Any] | None:
    """Return "rise", "growth", "learned" and "update" of a run whose loss rose above that of the untrained model, whose parameters grew many times over, and which did not come far since; else None.

    Each alone has healthy reasons: losses of small batches scatter, small first weights have to grow, and a noisy target leaves much unlearned.

    Args:
        curve: the run.
        chance: loss of the best constant output; None takes the first loss, and so does one that begins above it.
        window: losses in a row of which the mean logarithm is taken.
        rise: times the loss of the untrained model, less `noise_sds` standard errors, from which it has risen (rule of thumb, as all here).
        growth: of the norm of all parameters, from which they grew (healthy trainings: 4.9 at most).
        learned: share of the way from that loss to 0 from which on nothing is said.
        noise_sds: standard errors of a window.
    """
    losses, norms = (column[np.isfinite(column)] for column in (curve.loss, curve.column("param_norm")))
    if losses.size < 10 * window or norms.size < 2 or not (losses > 0).all() or not norms[0] > 0:
        return None
    start = max(float(losses[0]), chance or 0.0)
    windows = np.lib.stride_tricks.sliding_window_view(np.log(losses / start), window)
    sure = windows.mean(1) - noise_sds * windows.std(1, ddof=1) / math.sqrt(window)
    share, grown = 1 - float(np.median(losses[-(losses.size // 10) :])) / start, float(norms.max() / norms[0])
    if sure.max() < math.log(rise) or grown < growth or share >= learned:
        return None
    return {"rise": float(np.exp(windows.mean(1).max())), "growth": grown, "learned": share, "update": int(sure.argmax()), "start": start}  # fmt: skip


def _quarters(losses: FloatArray, weights: FloatArray) -> tuple[FloatArray, float] | None:
    """Return the median loss in each quarter of a sum of weights, and the standard error of the first minus the last."""
    passed = np.cumsum(weights)
    parts = np.split(losses, np.searchsorted(passed, passed[-1] * np.arange(1, 4) / 4))
    if min(map(len, parts)) < 5:
        return None
    # of a median, by differences of neighbours, which a slope does not widen
    errors = [1.25 * np.diff(part).std() / math.sqrt(2 * len(part)) for part in parts]
    return np.array([np.median(part) for part in parts]), math.hypot(errors[0], errors[3])


def _pace(levels: FloatArray, error: float, noise_sds: float) -> float:
    """Return the last fall over the first, infinity where there was none; 0 where the loss falls no further than its noise."""
    first, last = levels[0] - levels[1], levels[2] - levels[3]
    if levels[0] - levels[3] < noise_sds * error or last <= 0:
        return 0.0
    return float(last / first) if first > 0 else math.inf
