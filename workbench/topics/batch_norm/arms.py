"""What a study of batch norm trained: virtual batches, held and coupled statistics, devices and other norms (P6.1, P6.2, P6.4, P6.5)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from workbench.curves.selection import selected_by_seed
from workbench.curves.trials import RecordLike

__all__ = ["NormArm", "better_arms", "chance_better", "norm_rows", "read_norm_arms"]


class NormArm(NamedTuple):
    """One setting under several seeds.

    Attributes:
        stat_examples: asked for in a statistic; None is the whole batch of a device.
        batch_size: examples in an update.
        devices: that they are split over.
        values: seed -> selected metric; inf (-inf where larger is better) for a run that diverged.
    """

    stat_examples: int | None
    batch_size: int
    devices: int
    values: Mapping[int, float]

    @property
    def statistic(self) -> int:
        """Examples that a statistic is made of."""
        whole = self.batch_size // self.devices
        return whole if self.stat_examples is None else min(whole, self.stat_examples)

    @property
    def mean(self) -> float:
        """Mean over the seeds."""
        return float(np.mean(list(self.values.values())))

    @property
    def se(self) -> float:
        """Standard error of the mean over seeds, NaN for a single one."""
        found = list(self.values.values())
        if not np.isfinite(found).all():
            return math.nan
        return float(np.std(found, ddof=1) / math.sqrt(len(found))) if len(found) > 1 else math.nan


def read_norm_arms(record: RecordLike, stage: str) -> list[NormArm]:
    """Return the arms of a stage, in the order of batch size, devices and statistic examples, the whole batch last."""
    if not len(record.trials) or "stage" not in record.trials:
        return []
    lost = math.inf if record.config["select_mode"] == "min" else -math.inf
    asked = set(record.facts.get(stage) or ())
    rows = [row for row in record.trials.to_dict("records") if int(row["trial"]) in asked]
    arms: dict[tuple[int, int, int | None], dict[int, float]] = {}
    for row in rows:
        if row["state"] not in ("complete", "diverged"):
            continue
        examples = row.get("bn_stat_examples")
        known = examples is not None and math.isfinite(examples)
        key = (int(row["batch_size"]), int(row["accumulate_steps"]), int(examples) if known else None)  # type: ignore[arg-type]
        found = selected_by_seed(record, [int(row["trial"])]) if row["state"] == "complete" else {}
        arms.setdefault(key, {})[int(row["seed"])] = found.get(int(row["seed"]), lost)
    ordered = sorted(arms.items(), key=lambda item: (item[0][0], item[0][1], item[0][2] or math.inf))
    return [NormArm(stat, size, devices, values) for (size, devices, stat), values in ordered]


def norm_rows(arms: Sequence[NormArm]) -> list[dict[str, Any]]:
    """Return arms as JSON values for a table or a figure."""
    return [
        {"stat_examples": a.stat_examples, "statistic": a.statistic, "batch_size": a.batch_size, "devices": a.devices,
         "values": list(a.values.values()), "mean": a.mean, "se": a.se}
        for a in arms
    ]  # fmt: skip


def better_arms(arms: Sequence[NormArm], own: NormArm, *, sign: float) -> dict[int, float]:
    """Return, by statistic examples, how likely it is by chance that one of so many arms is better by as much as this one.

    Args:
        arms: that were tried beside it; those that diverged are left out.
        own: what they are held against.
        sign: 1 where a smaller metric is better, else -1.
    """
    tried = [arm for arm in arms if math.isfinite(arm.mean)]
    found = {arm.statistic: len(tried) * chance_better(arm, own, sign=sign) for arm in tried}  # Bonferroni
    return {size: min(chance, 1.0) for size, chance in found.items() if not math.isnan(chance)}


def chance_better(ours: NormArm, theirs: NormArm, *, sign: float) -> float:
    """Return how likely a mean gain over `theirs` as large as ours is by chance: Student's t over the seeds that both have.

    Args:
        ours: held to be better.
        theirs: what it is held against.
        sign: 1 where a smaller metric is better, else -1.
    """
    seeds = sorted(set(ours.values) & set(theirs.values))
    gains = np.array([sign * (theirs.values[seed] - ours.values[seed]) for seed in seeds])
    if len(gains) < 2 or not np.isfinite(gains).all():
        return math.nan
    se = gains.std(ddof=1) / math.sqrt(len(gains))
    if se == 0:
        return 0.0 if gains.mean() > 0 else 1.0
    return float(stats.t.sf(gains.mean() / se, len(gains) - 1))
