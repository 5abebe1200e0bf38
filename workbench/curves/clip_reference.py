"""`reference_threshold`: the run whose gradient norms a clipping threshold is taken from, and the threshold."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.curves.clip_threshold import ClipThreshold, arrival, choose_threshold, steady_stretch
from workbench.curves.judged import judged
from workbench.curves.lr_points import objective
from workbench.curves.trials import RecordLike, TrialVerdict
from workbench.record.roles import SHORT

__all__ = ["ReferenceNorms", "max_grad_norm_of", "norms_of", "reference_norms", "reference_threshold"]


@dataclass(frozen=True, kw_only=True)
class ReferenceNorms:
    """The norms that thresholds are taken from.

    Attributes:
        item: the trial, with the verdict on its loss.
        norms: L2 norms of its gradient before clipping, shape (steps,).
        first: index of the first step of its steady stretch.
        end: index behind the last one.
    """

    item: TrialVerdict
    norms: NDArray[np.float64]
    first: int
    end: int

    @property
    def clipped(self) -> bool:
        """The run was itself clipped: its norms before clipping are known, its path is another one."""
        return max_grad_norm_of(self.item.curve.config) is not None

    def threshold(self, percentile: float, **settings: Any) -> ClipThreshold:
        """Return `choose_threshold` of these norms."""
        return choose_threshold(self.norms, percentile=percentile, first=self.first, end=self.end, **settings)


def reference_norms(record: RecordLike, *, skip_frac: float = 0.1) -> ReferenceNorms | None:
    """Return the norms of the run that says what is typical; None when there is none.

    It is a full-length trial without clipping that trains stably, at the lr which a clipping study asked for, else
    at the baseline's, else the one with the lowest loss. Where no run is stable, the steps before its loss rises count.

    Args:
        record: a study, or a single trial.
        skip_frac: see `steady_stretch`.
    """
    usable = judged(record).verdicts(lambda c: c.stage not in SHORT and "grad_norm" in c.steps)
    if not usable:
        return None
    wanted = [_number(record.facts.get("clipping_reference_lr")), _number(record.config.get("peak_lr"))]
    item = min(usable, key=lambda found: _preference(found, wanted))
    rises = [(rise.onset_step, rise.back_step) for rise in item.verdict.rises]
    warmup = int(item.curve.config.get("warmup_steps") or 0)
    norms = norms_of(item)
    first, end = steady_stretch(arrival(norms), warmup_steps=warmup, rises=rises, skip_frac=skip_frac)
    return ReferenceNorms(item=item, norms=norms, first=first, end=end)


def reference_threshold(record: RecordLike, *, percentile: float = 90.0) -> ClipThreshold:
    """Return the clipping threshold that a record suggests, with the reason where it suggests none.

    Args:
        record: a study, or a single trial.
        percentile: see `choose_threshold`.
    """
    found = reference_norms(record)
    return choose_threshold([], percentile=percentile) if found is None else found.threshold(percentile)


def norms_of(item: TrialVerdict) -> NDArray[np.float64]:
    """Return the gradient norms of a trial before clipping, shape (steps,)."""
    return item.curve.steps["grad_norm"].to_numpy(dtype=np.float64, na_value=np.nan)


def max_grad_norm_of(config: Mapping[str, Any]) -> float | None:
    """Return the clipping threshold of a trial's row; None where clipping is off."""
    value = _number(config.get("max_grad_norm"))
    return value if math.isfinite(value) else None


def _preference(item: TrialVerdict, wanted: Sequence[float]) -> tuple[float, ...]:
    """Return a key that is smallest for the best reference."""
    curve = item.curve
    unstable = item.verdict.is_lasting or item.verdict.high
    other_lr = [not math.isclose(curve.lr, lr, rel_tol=1e-9) for lr in wanted]
    clipped = max_grad_norm_of(curve.config) is not None
    level = objective(curve) if all(other_lr) else 0.0
    other_stage = not curve.point
    return (unstable, clipped, other_stage, not curve.finished, *other_lr, level, curve.trial)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else math.nan
