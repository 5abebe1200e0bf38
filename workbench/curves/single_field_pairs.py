"""Twins: two trials of one study that differ in a single field, so that what differs in the outcome has a known cause."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.curves.judged import judged
from workbench.curves.judged_runs import equal, plain_cell
from workbench.curves.rules import TWIN, rule_view
from workbench.curves.selection import selected_by_seed
from workbench.curves.sweep import paired_difference
from workbench.curves.trials import RecordLike, TrialVerdict, judge

__all__ = ["TWIN_FIELDS", "Twin", "read_twins"]

TWIN_FIELDS = ("rules", "weight_decay", "beta2", "rho")
"""What a twin may differ in."""


@dataclass(frozen=True, kw_only=True)
class Twin:
    """A trial, and the same with one field changed.

    Attributes:
        field: what differs.
        before, after: its value in the trial and in the twin.
        own, twin: both with their stability verdict.
        gain: mean training loss of the trial less that of the twin over the last tenth of the steps: above 0 the twin is better.
        gain_se: standard error of that.
        selected_gain: the same of the selected metric of the best checkpoints; None where it was not evaluated.
        progress: what the rule learned at best.
    """

    field: str
    before: Any
    after: Any
    own: TrialVerdict
    twin: TrialVerdict
    gain: float
    gain_se: float
    selected_gain: float | None
    progress: float

    @property
    def optimizer(self) -> str:
        """The rule of both."""
        return str(self.own.curve.config["optimizer"])

    def differs(self, *, noise_sds: float, material_frac: float) -> bool:
        """Tell whether the twin trains otherwise: stable where the other is not, or to another loss by more than the noise."""
        if self.own.verdict.is_lasting != self.twin.verdict.is_lasting:
            return True
        return abs(self.gain) > self.bar(noise_sds=noise_sds, material_frac=material_frac)

    def bar(self, *, noise_sds: float, material_frac: float) -> float:
        """Return the smallest difference of the training loss that counts."""
        noise = self.gain_se if math.isfinite(self.gain_se) else 0.0
        return max(noise_sds * noise, material_frac * self.progress)

    def to_dict(self) -> dict[str, Any]:
        """Return both as JSON values."""
        return {
            "optimizer": self.optimizer, "lr": self.own.curve.lr, "field": self.field, "before": self.before,
            "after": self.after, "trial": self.own.curve.trial, "twin": self.twin.curve.trial,
            "outcome": self.own.verdict.outcome, "twin_outcome": self.twin.verdict.outcome, "gain": self.gain,
            "gain_se": self.gain_se, "selected_gain": self.selected_gain, "progress": self.progress,
        }  # fmt: skip


def read_twins(record: RecordLike, field: str) -> list[Twin]:
    """Return the pairs of a study that differ in one field alone, in order of the twin's number.

    Args:
        record: a study with trials of the stage "optimizers_twin".
        field: one of `TWIN_FIELDS`.
    """
    if not len(record.trials):
        return []
    rows = [{str(k): v for k, v in row.items()} for row in record.trials.to_dict("records")]
    found = []
    for twin in (row for row in rows if row["stage"] == TWIN):
        for own in (row for row in rows if row["stage"] != TWIN):
            if _differing(own, twin, list(record.config)) == [field]:
                pair = _compared(record, own, twin, field)
                found += [] if pair is None else [pair]
                break
    return found


def _differing(one: Mapping[str, Any], other: Mapping[str, Any], fields: Sequence[str]) -> list[str]:
    return [name for name in fields if not equal(plain_cell(one[name]), plain_cell(other[name]))]


def _compared(record: RecordLike, own: Mapping[str, Any], twin: Mapping[str, Any], field: str) -> Twin | None:
    curves = {c.trial: c for c in judged(record).curves if c.finished}
    numbers = [int(own["trial"]), int(twin["trial"])]
    if not all(number in curves for number in numbers):
        return None
    peers = rule_view(record, str(own["optimizer"])).full_length
    first, second = judge([curves[n] for n in numbers], peers)
    gain, se = paired_difference(first.curve, second.curve)
    sign = 1.0 if record.config.get("select_mode", "min") == "min" else -1.0
    values = [list(selected_by_seed(record, [n]).values()) for n in numbers]
    return Twin(
        field=field,
        before=plain_cell(own[field]),
        after=plain_cell(twin[field]),
        own=first,
        twin=second,
        gain=gain,
        gain_se=se,
        selected_gain=sign * (values[0][0] - values[1][0]) if all(values) else None,
        progress=first.verdict.progress,
    )
