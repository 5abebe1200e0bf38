"""Is the instability above lr* harmful? What the fix runs show (F1.4, F1.8)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from workbench.curves.lr_points import SweepTable

__all__ = ["is_harmful"]


def is_harmful(
    table: SweepTable,
    fixes: Sequence[Mapping[str, Any]],
    *,
    noise_sds: float = 2.0,
    loss_tolerance: float = 0.02,
    material_frac: float = 0.01,
) -> bool | None:
    """Tell whether a fix makes an unstable lr train well, to a loss that lies clearly below the one at lr*.

    Args:
        table: the sweep.
        fixes: what `judged_runs` returns for the stage "fix".
        noise_sds: standard errors of the loss at lr* that count as equal.
        loss_tolerance: relative difference that counts as equal (O1).
        material_frac: a gain below this share of what lr* learned costs nobody anything (rule of thumb).

    Returns:
        None when no fix was tried: silence is not health.
    """
    if not fixes or table.best is None:
        return None
    lowest = table.points[table.best]
    se = lowest.loss_se if math.isfinite(lowest.loss_se) else 0.0
    margin = max(noise_sds * se, loss_tolerance * table.loss_scale, material_frac * table.progress)
    by_seed = dict(zip(lowest.seeds, lowest.losses, strict=True))
    return any(not fix["lasting"] and fix["loss"] < by_seed.get(fix["seed"], lowest.loss) - margin for fix in fixes)
