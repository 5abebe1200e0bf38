"""How far validation is from training by curves that somebody else's loop logged, where no model is there to be evaluated."""

import math
from typing import Any

import numpy as np

from workbench.curves.judged import judged
from workbench.curves.selection import FEWEST_TO_SEE_NOISE, selected_rows, wobble
from workbench.curves.sweep import mean_and_error
from workbench.curves.trial_curves import RecordLike

_NEAR = 0.05  # share of the run on each side of an evaluation whose training losses it is held against (rule of thumb)


def facts_of_curves(record: RecordLike, trial: int) -> dict[str, Any]:
    """Return the facts that `diagnose_generalisation_gap` reads, from one trial's training losses and logged validation losses."""
    rows = selected_rows(record, trial).sort_values("step")
    curve = judged(record).curve(trial)
    select, steps = str(record.config.get("select", "")), rows["step"].to_numpy(dtype=np.int64)
    values = rows["value"].to_numpy(dtype=np.float64)
    reason = None
    if not select.endswith("/loss") or not values.size:
        reason = "the log has no validation loss"
    elif curve is None or curve.diverged or not np.isfinite(values).all():
        reason = "a loss is not finite"
    elif values.size < FEWEST_TO_SEE_NOISE:
        reason = f"{values.size} validation losses do not show their noise, {FEWEST_TO_SEE_NOISE} do"
    if reason is not None or curve is None:
        return {"generalisation": {"reason": reason}}
    near = _NEAR * curve.total_steps

    def row(place: int) -> dict[str, Any]:
        around = curve.loss[
            np.abs(curve.at_steps - steps[place]) <= max(near, np.abs(curve.at_steps - steps[place]).min())
        ]
        loss, error = mean_and_error([around[np.isfinite(around)]])
        unknown = dict.fromkeys(("classes", "score", "renumbered"))
        train = {"loss": loss, "se": error if math.isfinite(error) else 0.0, "examples": 0, **unknown}
        held = {"loss": float(values[place]), "se": wobble(values), "examples": 0, **unknown}
        return {"step": int(steps[place]), "train": train, "validation": held}

    last, best = row(values.size - 1), row(int(np.argmin(values)))
    head = curve.loss[: max(1, round(0.02 * curve.loss.size))]
    return {
        "generalisation": {
            "last": last,
            "selected": best,
            "training_mode": last["train"],
            "how": "as they were logged",
        },
        "preflight": {"train": {"loss": float(np.median(head))}},
    }
