"""When one loss curve became unstable, and what came of it (F1.5, F1.8, F1.10).

A rise is judged against what had been learned before it, so the verdict is free of the loss's scale and offset. No rises are: noise
around a level, a standstill, the ripple of training at the edge of stability, and the swing with which momentum settles.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from workbench.curves.smoothing import MEDIAN_PENALTY, fill_gaps, noise_per_step, smooth

FloatArray = NDArray[np.float64]
When = Literal["none", "early", "mid"]
Outcome = Literal["none", "recovered", "settling", "lasting", "divergent", "not_measured"]
_WORSE: dict[str, int] = {"none": 0, "recovered": 1, "settling": 2, "lasting": 3, "divergent": 4}


def chance_loss(classes: int) -> float:
    """Return the cross-entropy of guessing uniformly among `classes`."""
    return math.log(classes)


def ignorance(start: float, chance: float | None) -> float:
    """Return the loss of knowing nothing: that of the initial model, or of guessing (where known) where that is lower."""
    return start if chance is None else min(start, chance)


@dataclass(frozen=True, kw_only=True)
class Rise:
    """One stretch in which the loss went up and stayed up; early rises start in the first tenth of the planned steps."""

    when: When
    outcome: Outcome
    onset_step: int  # last step at the trough before the rise
    # peak_step, peak_loss: of the highest loss; None and infinite when the run became non-finite
    peak_step: int | None
    peak_loss: float
    trough_loss: float  # lowest smoothed loss before the rise
    back_step: int | None  # first step back near the trough, None if there is none

    @property
    def steps_to_recover(self) -> int | None:
        """Steps from the onset until the loss was back, None if it never was."""
        return None if self.back_step is None else self.back_step - self.onset_step


@dataclass(frozen=True, kw_only=True)
class CurveVerdict:
    """When a loss curve became unstable and the outcome, those of its worst rise (see `Rise`)."""

    when: When
    outcome: Outcome  # "settling" is coming back at the end
    onset_step: int | None = None
    peak_step: int | None = None
    peak_loss: float | None = None
    end_loss: float | None = None  # median of the last tenth of the steps, infinite when the run became non-finite
    trough_loss: float | None = None
    reason: str = ""
    loss_ref: float | None = None  # loss before the first update
    progress: float = 0.0  # what the study's best trial learned, or this run where no study sets the scale
    high: bool = False  # the run ended about where it began, though the study shows that more can be learned
    width: int = 1  # steps in the smoothing median
    noise: float | None = None  # standard deviation of the smoothed loss at its lowest point
    rises: tuple[Rise, ...] = ()

    @property
    def is_lasting(self) -> bool:
        """True when the run did not come back: lasting or divergent."""
        return self.outcome in ("lasting", "divergent")


@dataclass(frozen=True, kw_only=True)
class CurveThresholds:
    """When a loss curve counts as having risen, and as having come back; rules of thumb, where no source is named."""

    rise_frac: float = 0.5  # rise needed, as a share of what the run had learned
    study_frac: float = 0.1  # rise needed, as a share of what the study's best trial learned
    # a run that ends with less than this share of what the study's best trial learned is uncharacteristically high (a
    # network stuck at chance learns a little when it starts above chance)
    high_frac: float = 0.25
    # rise needed, in standard deviations of the smoothed loss: of its root mean square there and at the trough (rule
    # of thumb; simulated, 1 % of healthy noisy curves of 20 to 1,000 losses rise by more for a stretch)
    noise_sds: float = 6.0
    recover_frac: float = 0.1  # distance from the trough that counts as back, as a share of what was learned
    early_frac: float = 0.1  # a rise that starts in this share of the planned steps is early (the cap on warmup, F3.10)
    # settling means that the excess of the last tenth is below this share of the tenth before
    settle_ratio: float = 0.8
    tail_frac: float = 0.1  # share of the steps whose median is the end loss
    max_noise_frac: float = 0.025  # noise left by the smoothing, as a share of the progress
    min_steps: int = 10  # shorter finite curves are `not_measured`
    # stretch_steps, sure_stretch_steps: hot steps in a row that make a rise; for a full batch, or above the initial
    # loss
    stretch_steps: int = 5
    sure_stretch_steps: int = 3
    memory_spans: float = 5.0  # an optimizer with memory may swing for this many times 1 / (1 - memory) steps,
    memory_frac: float = 0.5  # and for no more than this share of the planned steps: who swings longer does not settle
    calm_frac: float = 0.05  # rises closer together than this share of the planned steps are one


USUAL = CurveThresholds()


@dataclass(frozen=True, kw_only=True)
class _Curve:
    """A finite curve with everything that the rules look at; arrays have shape (steps,)."""

    loss: FloatArray
    smoothed: FloatArray
    trough: FloatArray
    needed: FloatArray
    back: FloatArray
    noise: FloatArray
    step_noise: FloatArray
    width: int
    loss_ref: float
    ignorance: float
    progress: float
    best_end: float
    reached: float
    at_steps: FloatArray
    total_steps: int
    total_rows: int
    ended_nonfinite: bool
    full_batch: bool
    limits: CurveThresholds

    @property
    def rise(self) -> FloatArray:
        """Smoothed loss above its running minimum."""
        return self.smoothed - self.trough

    @property
    def end(self) -> tuple[float, bool]:
        """The end loss and whether it shows that little was learned: about where the run began, or at chance."""
        if self.ended_nonfinite:
            return math.inf, True
        tail = self.loss[-_tail(self.loss.size, self.limits) :]
        end, reachable = float(np.median(tail)), self.ignorance - self.best_end
        high = end >= self.ignorance - self.limits.high_frac * reachable
        return end, bool(high or np.mean(tail) > self.ignorance + 2 * self.limits.high_frac * reachable)


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
    at: ArrayLike | None = None,
    thresholds: CurveThresholds = USUAL,
) -> CurveVerdict:
    """Say when a training-loss curve became unstable and what came of it.

    A step is *hot* when the smoothed loss stands above its running minimum by `rise_frac` of what this run had learned, by
    `study_frac` of what the study's best trial learned, and by `noise_sds` of the noise. A rise is a stretch of hot steps. It
    *recovers* when the last tenth is back near the trough, is *settling* when the last tenth stands clearly below the tenth before,
    *divergent* when the run ended non-finite or where it began, and *lasting* otherwise.

    Args:
        loss: training loss before each update, shape (steps,); a run that diverged ends with its first non-finite one.
        loss_se: standard error of each step's loss, shape (steps,), NaN where unknown.
        full_batch: every step sees all training examples, so that the curve has no sampling noise.
        total_steps: planned number of steps; None takes the length of `loss`.
        memory: momentum or beta1 of the optimizer; its damped swing in the first steps is no instability.
        study_progress, study_best_end: what the best trial of the study learned, and the lowest end loss; None takes this run's own.
        loss_ref: loss before the first update; None takes `loss[0]`.
        chance: loss of guessing, where known: below it only the distance to it counts as learned.
        at: the step of each loss, ascending, where not every step was logged, shape (steps,); every step that the verdict names is one
            of these, and stretches are counted in logged losses. None is 0, 1, 2, ...
    """
    raw, limits = np.asarray(loss, dtype=np.float64).ravel(), thresholds
    finite, ended_nonfinite = fill_gaps(raw)
    places = np.arange(raw.size, dtype=np.float64) if at is None else np.asarray(at, dtype=np.float64).ravel()
    total = max(int(total_steps or (places[-1] + 1 if raw.size else 1)), 1)
    rows = planned_rows(places, total)
    if raw.size and not math.isfinite(raw[0]):
        reason = "The loss is non-finite before the first update: the learning rate is not the cause."
        return CurveVerdict(
            when="early", outcome="divergent", onset_step=int(places[0]), end_loss=math.inf, reason=reason
        )
    if not ended_nonfinite and finite.size < limits.min_steps:
        what = "steps" if rows == total else "logged losses"
        reason = f"{finite.size} {what} are too few to tell; {limits.min_steps} are needed."
        return CurveVerdict(when="none", outcome="not_measured", reason=reason)
    start = float(finite[0]) if loss_ref is None or not math.isfinite(loss_ref) else float(loss_ref)
    se = None if loss_se is None else np.asarray(loss_se, dtype=np.float64).ravel()
    step_noise = noise_per_step(finite, se, full_batch=full_batch)
    smoothed, noise, width = smooth(
        finite, step_noise, loss_ref=start, total_steps=rows, progress=study_progress, full_batch=full_batch,
        max_noise_frac=limits.max_noise_frac,
    )  # fmt: skip
    trough = np.minimum.accumulate(np.minimum(smoothed, start))
    lowest = np.maximum.accumulate(np.where(smoothed <= trough, np.arange(finite.size), 0))
    level, spread = ignorance(start, chance), limits.noise_sds * _of_both(noise, lowest)
    learned = np.where(trough < level, level, start) - trough
    progress = float(learned[-1]) if study_progress is None else max(float(study_progress), 0.0)
    tail = _tail(finite.size, limits)
    end, near = float(np.median(finite[-tail:])), limits.recover_frac * progress
    unsure = min(limits.noise_sds * MEDIAN_PENALTY * float(step_noise[-1]) / math.sqrt(tail), near)
    curve = _Curve(
        loss=finite, smoothed=smoothed, trough=trough, noise=noise[lowest], step_noise=_of_both(step_noise, lowest), width=width, loss_ref=start,
        needed=np.maximum(np.maximum(limits.rise_frac * learned, limits.study_frac * progress), spread),
        back=trough + limits.recover_frac * learned + limits.noise_sds * noise[lowest], ignorance=level, progress=progress,
        at_steps=places, total_steps=total, total_rows=rows,
        best_end=end if study_best_end is None else min(float(study_best_end), level),
        reached=-math.inf if study_best_end is None else float(study_best_end) + near + unsure,
        ended_nonfinite=ended_nonfinite, full_batch=full_batch, limits=limits,
    )  # fmt: skip
    return _verdict(curve, _find_rises(curve, memory))


def _of_both(noise: FloatArray, lowest: NDArray[np.intp]) -> FloatArray:
    """Return the noise of a loss and of the trough before it: their root mean square, for a noisier beginning has higher losses too.

    No more counts than three times what the run had on its way to the trough (rule of thumb, as an estimate scatters): the noise of a
    loss that explodes would explain any rise.
    """
    seen = 3.0 * np.maximum.accumulate(noise)[lowest]
    out: FloatArray = np.hypot(np.minimum(noise, seen), noise[lowest]) / math.sqrt(2.0)
    return out


def planned_rows(at: ArrayLike, total_steps: int) -> int:
    """Return how many losses a run of `total_steps` has, logged as often as those at the steps `at`, ascending."""
    places = np.asarray(at, dtype=np.float64)
    if places.size < 2:
        return max(total_steps, 1)
    spacing = (places[-1] - places[0]) / (places.size - 1)
    return max(1, round(places.size * total_steps / float(places[-1] + spacing)))


def _tail(size: int, limits: CurveThresholds) -> int:
    return max(1, round(limits.tail_frac * size))


def _find_rises(curve: _Curve, memory: float) -> list[Rise]:
    """Return every rise; two stretches that the loss did not come back between, or only briefly, are one."""
    limits, last_step = curve.limits, curve.loss.size - 1
    hot = (curve.rise >= curve.needed) & (curve.rise > 0)
    # A stretch shorter than half the window is lost in the median, but not when it stands out of the bare noise.
    bare = curve.loss - curve.trough
    hot |= (bare >= np.maximum(curve.needed, limits.noise_sds * curve.step_noise)) & (bare > 0)
    if memory > 0:
        swing = min(limits.memory_spans / (1.0 - memory), limits.memory_frac * curve.total_steps)
        hot &= (curve.at_steps[: curve.loss.size] > swing) | (curve.smoothed >= curve.loss_ref)
    sure = curve.smoothed > curve.loss_ref + limits.study_frac * curve.progress
    found: list[tuple[int, int]] = []
    for first, last in _runs(hot):
        into_nonfinite = curve.ended_nonfinite and last == last_step
        short = curve.full_batch or any(
            b - a + 1 >= limits.sure_stretch_steps for a, b in _runs(sure[first : last + 1])
        )
        if last - first + 1 < (limits.sure_stretch_steps if short else limits.stretch_steps) and not into_nonfinite:
            continue
        if found:
            began, ended = found[-1]
            back = np.flatnonzero(curve.smoothed[ended:first] <= curve.back[began])
            if not (back.size > 0 and first - (ended + int(back[0])) > limits.calm_frac * curve.total_rows):
                found[-1] = (began, last)
                continue
        found.append((first, last))
    if curve.ended_nonfinite and (not found or found[-1][1] < last_step):
        found.append((last_step, last_step))
    return [_rise(curve, first, last, final=(first, last) == found[-1]) for first, last in found]


def _runs(mask: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Return first and last index of every stretch that is True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))
    return [(int(a), int(b) - 1) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def _rise(curve: _Curve, first: int, last: int, *, final: bool) -> Rise:
    onset = int(curve.at_steps[_onset(curve, first)])
    after = np.flatnonzero(curve.smoothed[last + 1 :] <= curve.back[first])
    peak = first + int(np.argmax(curve.loss[first : last + 1]))
    nonfinite = final and curve.ended_nonfinite
    return Rise(
        when="early" if onset <= curve.limits.early_frac * curve.total_steps else "mid",
        outcome=_outcome(curve, first) if final else "recovered",
        onset_step=onset,
        peak_step=None if nonfinite else int(curve.at_steps[peak]),
        peak_loss=math.inf if nonfinite else float(curve.loss[peak]),
        trough_loss=float(curve.trough[first]),
        back_step=int(curve.at_steps[last + 1 + int(after[0])]) if after.size else None,
    )


def _onset(curve: _Curve, first: int) -> int:
    """Return the last step at the trough; within one window of it, the bare loss places the step more sharply."""
    needed, noise = curve.needed[first], curve.noise[first]
    near, far = (np.flatnonzero(curve.rise[: first + 1] <= max(f * needed, 2.0 * noise)) for f in (0.1, 0.01))
    if not near.size:
        return 0
    recent = far[far >= near[-1] - 0.02 * curve.total_rows]
    onset = int(recent[-1] if recent.size else near[-1])
    stop = min(first, onset + curve.width - 1)
    bare = curve.loss[onset : stop + 1] - curve.trough[first]
    low = np.flatnonzero(bare <= max(0.1 * needed, 2.0 * curve.step_noise[first]))
    return onset + int(low[-1]) if low.size else onset


def _outcome(curve: _Curve, first: int) -> Outcome:
    """Return what came of the last rise."""
    if curve.ended_nonfinite:
        return "divergent"
    limits, tail, (end, high) = curve.limits, _tail(curve.loss.size, curve.limits), curve.end
    near_best = end <= curve.best_end + limits.rise_frac * curve.progress
    if not high and (end <= curve.reached or (end <= curve.back[first] and near_best)):
        return "recovered"
    earlier = [float(np.median(curve.loss[-k * tail : -(k - 1) * tail])) for k in (2, 3) if k * tail <= curve.loss.size]
    floor = min(float(curve.trough[first]), curve.best_end)
    falls = all(end - floor < limits.settle_ratio**k * (e - floor) for k, e in enumerate(earlier, start=1))
    if earlier and falls:
        return "settling"
    return "divergent" if high else "lasting"


def _verdict(curve: _Curve, rises: list[Rise]) -> CurveVerdict:
    end, high = curve.end
    known: dict[str, Any] = {
        "high": high, "width": curve.width, "noise": float(curve.noise[-1]), "end_loss": end, "loss_ref": curve.loss_ref,
        "progress": curve.progress, "rises": tuple(rises),
    }  # fmt: skip
    if not rises:
        reason = "The loss never rises for a stretch" + (" but ends where it began." if high else ".")
        if high and end > curve.loss_ref + curve.limits.study_frac * curve.progress:
            reason = f"The loss ended at {end:.4g}, above the {curve.loss_ref:.4g} of the initial model; no later rise stands out of its noise."
        return CurveVerdict(when="none", outcome="none", trough_loss=float(curve.trough[-1]), reason=reason, **known)
    worst = max(rises, key=lambda r: _WORSE[r.outcome])
    peak = "a non-finite value" if math.isinf(worst.peak_loss) else f"{worst.peak_loss:.4g} at step {worst.peak_step}"
    came = {
        "recovered": f"recovered and ended at {end:.4g}",
        "settling": f"was still falling at {end:.4g} when the run ended",
        "lasting": f"ended at {end:.4g}, well above the trough",
        "divergent": "ended non-finite" if curve.ended_nonfinite else f"ended at {end:.4g}, no better than it began",
    }[worst.outcome]
    reason = f"The loss rose from {worst.trough_loss:.4g} after step {worst.onset_step} to {peak} and {came}."
    return CurveVerdict(
        when=worst.when, outcome=worst.outcome, onset_step=worst.onset_step, peak_step=worst.peak_step, peak_loss=worst.peak_loss,
        trough_loss=worst.trough_loss, reason=reason, **known,
    )  # fmt: skip
