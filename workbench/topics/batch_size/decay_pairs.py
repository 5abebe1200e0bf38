"""Runs with weight decay beside the same without: how far the weights shrink, and what that costs (`optimizers.weight_decay_shrinks`)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.curves.replaced import Twin, read_twins
from workbench.curves.trials import RecordLike, TrialCurve

__all__ = ["DecayPair", "accumulated", "decay_pairs"]

REACHES_ALL = ("sgd", "momentum", "nesterov", "adamw")
"""Rules whose decay takes the same share of every weight; the others divide it by the size of the gradients first."""


@dataclass(frozen=True, kw_only=True)
class DecayPair:
    """One run with weight decay and its twin without.

    Attributes:
        twin: both runs.
        ratio: norm of the weights at the end with decay over that without; None where the norms were not recorded.
        accumulated: the decay that the run adds up to, see `accumulated`.
    """

    twin: Twin
    ratio: float | None
    accumulated: float | None

    def costs(self, *, noise_sds: float, material_frac: float) -> bool:
        """Tell whether the run without decay has the better checkpoint, or where none was selected, the lower end loss."""
        bar = self.twin.bar(noise_sds=noise_sds, material_frac=material_frac)
        gain = self.twin.gain if self.twin.selected_gain is None else self.twin.selected_gain
        return gain > bar

    def to_dict(self) -> dict[str, Any]:
        """Return the pair as JSON values."""
        return self.twin.to_dict() | {"norm_ratio": self.ratio, "accumulated_decay": self.accumulated}


def decay_pairs(record: RecordLike) -> list[DecayPair]:
    """Return every run with weight decay that has a twin without, in order of the twin's number."""
    return [
        DecayPair(twin=twin, ratio=_ratio(twin), accumulated=accumulated(twin.own.curve))
        for twin in read_twins(record, "weight_decay")
        if twin.after == 0
    ]


def accumulated(curve: TrialCurve) -> float | None:
    """Return the sum of lr * weight_decay over a run, momentum counted: without gradients weights would shrink to exp of minus that.

    None for the rules that divide coupled decay by the size of the gradients, where no such number exists.
    """
    name = str(curve.config["optimizer"])
    if name not in REACHES_ALL:
        return None
    longer = 1.0 / (1.0 - float(curve.config["momentum"])) if name in ("momentum", "nesterov") else 1.0
    lrs = curve.steps["lr"].to_numpy(dtype=np.float64)
    return float(np.nansum(lrs) * float(curve.config["weight_decay"]) * longer)


def _ratio(twin: Twin) -> float | None:
    norms = [_last_norm(side.curve) for side in (twin.own, twin.twin)]
    return norms[0] / norms[1] if all(math.isfinite(n) for n in norms) and norms[1] > 0 else None


def _last_norm(curve: TrialCurve) -> float:
    if "param_norm" not in curve.steps.columns:
        return math.nan
    norms = curve.steps["param_norm"].to_numpy(dtype=np.float64)
    finite = norms[np.isfinite(norms)]
    return float(finite[-1]) if finite.size else math.nan
