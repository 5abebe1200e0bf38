"""Finding the rises of one smoothed loss curve: where each begins, and what comes of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

When = Literal["none", "early", "mid"]
Outcome = Literal["none", "recovered", "settling", "lasting", "divergent", "not_measured"]


@dataclass(frozen=True, kw_only=True)
class Rise:
    """One stretch in which the loss went up and stayed up.

    Attributes:
        when: "early" (starts in the first tenth of the planned steps) or "mid".
        outcome: what came of it.
        onset_step: last step at the trough before the rise.
        peak_step: step of the highest loss; None when the run became non-finite.
        peak_loss: loss there, infinite when the run became non-finite.
        trough_loss: lowest smoothed loss before the rise.
        back_step: first step back near the trough, None if there is none.
    """

    when: When
    outcome: Outcome
    onset_step: int
    peak_step: int | None
    peak_loss: float
    trough_loss: float
    back_step: int | None

    @property
    def steps_to_recover(self) -> int | None:
        """Steps from the onset until the loss was back, None if it never was."""
        return None if self.back_step is None else self.back_step - self.onset_step


@dataclass(frozen=True, kw_only=True)
class CurveVerdict:
    """What a loss curve shows: *when* it became unstable and the *outcome*, of its worst rise.

    Attributes:
        when: "none", "early" or "mid".
        outcome: "none", "recovered", "settling" (coming back at the end), "lasting", "divergent" or "not_measured".
        onset_step: last step at the trough before the rise.
        peak_step: step of the highest loss in the rise.
        peak_loss: loss there.
        end_loss: median of the last tenth of the steps, infinite when the run became non-finite.
        trough_loss: lowest smoothed loss before the rise.
        reason: one sentence.
        loss_ref: loss before the first update.
        progress: what the study's best trial learned, or this run where no study sets the scale.
        high: the run ended about where it began, though the study shows that more can be learned.
        width: steps in the smoothing median.
        noise: standard deviation of the smoothed loss at its lowest point.
        rises: every rise in order of time.
    """

    when: When
    outcome: Outcome
    onset_step: int | None = None
    peak_step: int | None = None
    peak_loss: float | None = None
    end_loss: float | None = None
    trough_loss: float | None = None
    reason: str = ""
    loss_ref: float | None = None
    progress: float = 0.0
    high: bool = False
    width: int = 1
    noise: float | None = None
    rises: tuple[Rise, ...] = ()

    @property
    def is_lasting(self) -> bool:
        """True when the run did not come back: lasting or divergent."""
        return self.outcome in ("lasting", "divergent")


FloatArray = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class CurveThresholds:
    """When a loss curve counts as having risen, and as having come back.

    Attributes:
        rise_frac: rise needed, as a share of what the run had learned (rule of thumb).
        study_frac: rise needed, as a share of what the study's best trial learned (rule of thumb).
        high_frac: a run that ends with less than this share of what the study's best trial learned is uncharacteristically
            high (rule of thumb; a network stuck at chance learns a little when it starts above chance).
        noise_sds: rise needed, in standard deviations of the smoothed loss (rule of thumb).
        recover_frac: distance from the trough that counts as back, as a share of what was learned (rule of thumb).
        early_frac: a rise that starts in this share of the planned steps is early (the cap on warmup, F3.10).
        settle_ratio: settling means that the excess of the last tenth is below this share of the tenth before (rule of thumb).
        tail_frac: share of the steps whose median is the end loss.
        max_noise_frac: noise left by the smoothing, as a share of the progress (rule of thumb).
        min_steps: shorter finite curves are `not_measured` (rule of thumb).
        stretch_steps: hot steps in a row that make a rise (rule of thumb).
        sure_stretch_steps: the same for a full batch, or above the loss of the initial model (rule of thumb).
        memory_spans: an optimizer with memory may swing for this many times 1 / (1 - memory) steps (rule of thumb).
        memory_frac: and for no more than this share of the planned steps: who swings longer does not settle (rule of thumb).
        calm_frac: rises closer together than this share of the planned steps are one (rule of thumb).
    """

    rise_frac: float = 0.5
    study_frac: float = 0.1
    high_frac: float = 0.25
    noise_sds: float = 6.0
    recover_frac: float = 0.1
    early_frac: float = 0.1
    settle_ratio: float = 0.8
    tail_frac: float = 0.1
    max_noise_frac: float = 0.025
    min_steps: int = 10
    stretch_steps: int = 5
    sure_stretch_steps: int = 3
    memory_spans: float = 5.0
    memory_frac: float = 0.5
    calm_frac: float = 0.05


USUAL = CurveThresholds()


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A finite curve with everything that the rules below look at; arrays have shape (steps,)."""

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
    total_steps: int
    ended_nonfinite: bool

    @property
    def rise(self) -> FloatArray:
        """Smoothed loss above its running minimum."""
        return self.smoothed - self.trough


def find_rises(curve: Curve, *, full_batch: bool, memory: float, limits: CurveThresholds) -> list[Rise]:
    """Return every rise; two stretches that the loss did not come back between, or only briefly, are one rise."""
    steps, calm_steps = np.arange(curve.loss.size), limits.calm_frac * curve.total_steps
    hot = (curve.rise >= curve.needed) & (curve.rise > 0)
    # A stretch shorter than half the window is lost in the median, but not when it stands out of the bare noise.
    bare = curve.loss - curve.trough
    hot |= (bare >= np.maximum(curve.needed, limits.noise_sds * curve.step_noise)) & (bare > 0)
    if memory > 0:
        swing = min(limits.memory_spans / (1.0 - memory), limits.memory_frac * curve.total_steps)
        hot &= (steps > swing) | (curve.smoothed >= curve.loss_ref)
    sure = curve.smoothed > curve.loss_ref + limits.study_frac * curve.progress
    found: list[tuple[int, int]] = []
    for first, last in _runs(hot):
        into_nonfinite = curve.ended_nonfinite and last == curve.loss.size - 1
        short = full_batch or any(b - a + 1 >= limits.sure_stretch_steps for a, b in _runs(sure[first : last + 1]))
        if last - first + 1 < (limits.sure_stretch_steps if short else limits.stretch_steps) and not into_nonfinite:
            continue
        if found and not _came_back(curve, *found[-1], first, calm_steps):
            found[-1] = (found[-1][0], last)
        else:
            found.append((first, last))
    if curve.ended_nonfinite and (not found or found[-1][1] < curve.loss.size - 1):
        found.append((curve.loss.size - 1, curve.loss.size - 1))
    return [_rise(curve, first, last, final=(first, last) == found[-1], limits=limits) for first, last in found]


def _came_back(curve: Curve, first: int, last: int, following: int, calm_steps: float) -> bool:
    back = np.flatnonzero(curve.smoothed[last:following] <= curve.back[first])
    return back.size > 0 and following - (last + int(back[0])) > calm_steps


def _runs(mask: NDArray[np.bool_]) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))
    return [(int(a), int(b) - 1) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def _rise(curve: Curve, first: int, last: int, *, final: bool, limits: CurveThresholds) -> Rise:
    onset = _onset(curve, first)
    after = np.flatnonzero(curve.smoothed[last + 1 :] <= curve.back[first])
    back = last + 1 + int(after[0]) if after.size else None
    peak = first + int(np.argmax(curve.loss[first : last + 1]))
    nonfinite = final and curve.ended_nonfinite
    return Rise(
        when="early" if onset <= limits.early_frac * curve.total_steps else "mid",
        outcome=_outcome(curve, first, limits) if final else "recovered",
        onset_step=onset,
        peak_step=None if nonfinite else peak,
        peak_loss=math.inf if nonfinite else float(curve.loss[peak]),
        trough_loss=float(curve.trough[first]),
        back_step=back,
    )


def _onset(curve: Curve, first: int) -> int:
    """Return the last step at the trough; within one window of it, the bare loss places the step more sharply."""
    needed, noise = curve.needed[first], curve.noise[first]
    near, far = (np.flatnonzero(curve.rise[: first + 1] <= max(f * needed, 2.0 * noise)) for f in (0.1, 0.01))
    if not near.size:
        return 0
    recent = far[far >= near[-1] - 0.02 * curve.total_steps]
    onset = int(recent[-1] if recent.size else near[-1])
    stop = min(first, onset + curve.width - 1)
    bare = curve.loss[onset : stop + 1] - curve.trough[first]
    low = np.flatnonzero(bare <= max(0.1 * needed, 2.0 * curve.step_noise[first]))
    return onset + int(low[-1]) if low.size else onset


def _outcome(curve: Curve, first: int, limits: CurveThresholds) -> Outcome:
    """Return what came of the last rise, from the level at the end of the run."""
    if curve.ended_nonfinite:
        return "divergent"
    tail = tail_steps(curve.loss.size, limits)
    end, high = end_level(curve, limits)
    near_best = end <= curve.best_end + limits.rise_frac * curve.progress
    if not high and (end <= curve.reached or (end <= curve.back[first] and near_best)):
        return "recovered"
    earlier = [float(np.median(curve.loss[-k * tail : -(k - 1) * tail])) for k in (2, 3) if k * tail <= curve.loss.size]
    floor = min(float(curve.trough[first]), curve.best_end)
    falls = all(end - floor < limits.settle_ratio**k * (e - floor) for k, e in enumerate(earlier, start=1))
    if earlier and falls:
        return "settling"
    return "divergent" if high else "lasting"


def tail_steps(size: int, limits: CurveThresholds) -> int:
    """Return how many of `size` steps make up the end."""
    return max(1, round(limits.tail_frac * size))


def end_level(curve: Curve, limits: CurveThresholds) -> tuple[float, bool]:
    """Return the end loss and whether it shows that little was learned: about where the run began, or at chance.

    A median at 0 between spikes that lift the mean above the loss of knowing nothing is no good end either.
    """
    if curve.ended_nonfinite:
        return math.inf, True
    tail = curve.loss[-tail_steps(curve.loss.size, limits) :]
    end, reachable = float(np.median(tail)), curve.ignorance - curve.best_end
    high = end >= curve.ignorance - limits.high_frac * reachable
    return end, bool(high or np.mean(tail) > curve.ignorance + 2 * limits.high_frac * reachable)
