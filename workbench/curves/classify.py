"""When one loss curve became unstable, and what came of it (F1.5, F1.8, F1.10).

A rise is judged against what had been learned before it, so the verdict is free of the loss's scale and offset.
What looks like a rise and is none: noise around a level, a standstill, the ripple of training at the edge of stability,
and the swing with which momentum overshoots and settles.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from workbench.curves.rises import (
    USUAL,
    Curve,
    CurveThresholds,
    CurveVerdict,
    Rise,
    end_level,
    find_rises,
    tail_steps,
)
from workbench.curves.smoothing import MEDIAN_PENALTY, fill_gaps, noise_per_step, smooth


def chance_loss(classes: int) -> float:
    """Return the cross-entropy of guessing uniformly among `classes`: log(classes)."""
    return math.log(classes)


def ignorance(start: float, chance: float | None) -> float:
    """Return the loss of knowing nothing: that of the initial model, or of guessing where the initial model is worse.

    An untrained model that is confidently wrong starts far above chance; coming down to it takes no learning.

    Args:
        start: loss before the first update.
        chance: loss of guessing, None where unknown.
    """
    return start if chance is None else min(start, chance)


FloatArray = NDArray[np.float64]
_WORSE: dict[str, int] = {"none": 0, "recovered": 1, "settling": 2, "lasting": 3, "divergent": 4}


def classify_curve(
    loss: ArrayLike,
    *,
    loss_se: ArrayLike | None = None,
    full_batch: bool = False,
    total_steps: int | None = None,
    memory: float = 0.0,
    study_progress: float | None = None,
    study_best_end: float | None = None,
    loss_ref: float | None = None,
    chance: float | None = None,
    thresholds: CurveThresholds = USUAL,
) -> CurveVerdict:
    """Say when a training-loss curve became unstable and what came of it.

    A step is *hot* when the smoothed loss stands above its running minimum by `rise_frac` of what this run had
    learned, by `study_frac` of what the study's best trial learned, and by `noise_sds` of the noise. A rise is a
    stretch of hot steps. It *recovers* when the last tenth is back near the trough, is *settling* when the last tenth
    stands clearly below the tenth before, is *divergent* when the run ended non-finite or where it began, and is
    *lasting* otherwise.

    Args:
        loss: training loss before each update, shape (steps,); a run that diverged ends with its first non-finite one.
        loss_se: standard error of each step's loss, shape (steps,), NaN where unknown.
        full_batch: every step sees all training examples, so that the curve has no sampling noise.
        total_steps: planned number of steps; None takes the length of `loss`.
        memory: momentum or beta1 of the optimizer; its damped swing in the first steps is no instability.
        study_progress: what the best trial of the study learned; None takes this run's own.
        study_best_end: the lowest end loss in the study; None takes this run's own.
        loss_ref: loss before the first update; None takes `loss[0]`.
        chance: loss of guessing, where known: below it only the distance to it counts as learned.
        thresholds: when the curve counts as having risen and come back.

    Returns:
        A verdict; it does not change when the loss is multiplied by a positive number or shifted.
    """
    raw = np.asarray(loss, dtype=np.float64).ravel()
    finite, ended_nonfinite = fill_gaps(raw)
    total = max(int(total_steps or raw.size), 1)
    special = _nothing_to_read(raw, finite, ended_nonfinite, thresholds)
    if special is not None:
        return special
    start = float(finite[0]) if loss_ref is None or not math.isfinite(loss_ref) else float(loss_ref)
    se = None if loss_se is None else np.asarray(loss_se, dtype=np.float64).ravel()
    step_noise = noise_per_step(finite, se, full_batch=full_batch)
    smoothed, noise, width = smooth(
        finite, step_noise, loss_ref=start, total_steps=total, progress=study_progress, full_batch=full_batch,
        max_noise_frac=thresholds.max_noise_frac,
    )  # fmt: skip
    curve = _prepare(
        finite, smoothed, noise, step_noise, width=width, limits=thresholds, loss_ref=start, chance=chance, total_steps=total,
        ended_nonfinite=ended_nonfinite, study_progress=study_progress, study_best_end=study_best_end,
    )  # fmt: skip
    rises = find_rises(curve, full_batch=full_batch, memory=memory, limits=thresholds)
    return _verdict(curve, rises, thresholds)


def _nothing_to_read(raw: FloatArray, finite: FloatArray, ended: bool, limits: CurveThresholds) -> CurveVerdict | None:
    if raw.size and not math.isfinite(raw[0]):
        reason = "The loss is non-finite before the first update: the learning rate is not the cause."
        return CurveVerdict(when="early", outcome="divergent", onset_step=0, end_loss=math.inf, reason=reason)
    if not ended and finite.size < limits.min_steps:
        reason = f"{finite.size} steps are too few to tell; {limits.min_steps} are needed."
        return CurveVerdict(when="none", outcome="not_measured", reason=reason)
    return None


def _prepare(
    loss: FloatArray,
    smoothed: FloatArray,
    noise: FloatArray,
    step_noise: FloatArray,
    *,
    width: int,
    limits: CurveThresholds,
    loss_ref: float,
    chance: float | None,
    total_steps: int,
    ended_nonfinite: bool,
    study_progress: float | None,
    study_best_end: float | None,
) -> Curve:
    trough = np.minimum.accumulate(np.minimum(smoothed, loss_ref))
    lowest = np.maximum.accumulate(np.where(smoothed <= trough, np.arange(loss.size), 0))
    level, spread = ignorance(loss_ref, chance), limits.noise_sds * noise[lowest]
    learned = np.where(trough < level, level, loss_ref) - trough
    progress = float(learned[-1]) if study_progress is None else max(float(study_progress), 0.0)
    tail = tail_steps(loss.size, limits)
    end, near = float(np.median(loss[-tail:])), limits.recover_frac * progress
    unsure = min(limits.noise_sds * MEDIAN_PENALTY * float(step_noise[-1]) / math.sqrt(tail), near)
    return Curve(
        loss=loss,
        smoothed=smoothed,
        trough=trough,
        needed=np.maximum(np.maximum(limits.rise_frac * learned, limits.study_frac * progress), spread),
        back=trough + limits.recover_frac * learned + spread,
        noise=noise[lowest],
        step_noise=step_noise[lowest],
        width=width,
        loss_ref=loss_ref,
        ignorance=level,
        progress=progress,
        best_end=end if study_best_end is None else min(float(study_best_end), level),
        reached=-math.inf if study_best_end is None else float(study_best_end) + near + unsure,
        total_steps=total_steps,
        ended_nonfinite=ended_nonfinite,
    )


def _verdict(curve: Curve, rises: list[Rise], limits: CurveThresholds) -> CurveVerdict:
    end, high = end_level(curve, limits)
    noise = float(curve.noise[-1])
    if not rises:
        reason = "The loss never rises for a stretch" + (" but ends where it began." if high else ".")
        return CurveVerdict(
            when="none", outcome="none", trough_loss=float(curve.trough[-1]), reason=reason, high=high, width=curve.width,
            noise=noise, end_loss=end, loss_ref=curve.loss_ref,
            progress=curve.progress,
        )  # fmt: skip
    worst = max(rises, key=lambda r: _WORSE[r.outcome])
    return CurveVerdict(
        when=worst.when, outcome=worst.outcome, onset_step=worst.onset_step, peak_step=worst.peak_step,
        peak_loss=worst.peak_loss, trough_loss=worst.trough_loss, reason=_reason(worst, end, curve), high=high,
        width=curve.width, noise=noise, rises=tuple(rises), end_loss=end, loss_ref=curve.loss_ref,
            progress=curve.progress,
    )  # fmt: skip


def _reason(rise: Rise, end: float, curve: Curve) -> str:
    peak = "a non-finite value" if math.isinf(rise.peak_loss) else f"{rise.peak_loss:.4g} at step {rise.peak_step}"
    came = {
        "recovered": f"came back and ended at {end:.4g}",
        "settling": f"was still coming down at {end:.4g} when the run ended",
        "lasting": f"ended at {end:.4g}, well above the trough",
        "divergent": "ended non-finite" if curve.ended_nonfinite else f"ended at {end:.4g}, no better than it began",
    }[rise.outcome]
    return f"The loss rose from {rise.trough_loss:.4g} after step {rise.onset_step} to {peak} and {came}."
