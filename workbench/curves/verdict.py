"""What a loss curve shows, as data: `Rise`, one stretch of it, and `CurveVerdict`, all of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["CurveVerdict", "Outcome", "Rise", "When"]

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
