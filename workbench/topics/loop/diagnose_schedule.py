"""Findings about how a loop steps its learning-rate schedulers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from scipy import stats

from workbench.findings.finding import Codes, Finding

SCHEDULE_CODES = Codes({"loop.scheduler_unit": "F3.5", "loop.scheduler_order": "F3.5"})
_ONCE = ("CosineAnnealingLR", "OneCycleLR", "LinearLR", "PolynomialLR")
"""Schedulers that are meant to be stepped through once, over the whole run."""
_PAST = {"CosineAnnealingLR": "climbs again", "PolynomialLR": "stays at 0"}
"""What those do that are stepped past their length, and tell nobody."""
Facts = Mapping[str, Any]
Say = Callable[..., Finding]


def schedule_findings(facts: Facts, *, early: float = 0.5, least: float = 0.1, rest: float = 1e-6) -> list[Finding]:
    """Return the findings of `SCHEDULE_CODES`.

    Args:
        early: share of the updates before which a schedule that is meant for the whole run is over (rule of thumb).
        least: share of its own length that a schedule goes through in a run that came to its end (rule of thumb).
        rest: share of the learning rate that is nothing any more, where a stepwise decay has brought it there (rule of thumb).
    """
    rows, updates = facts["schedulers"], facts["updates"]
    say: Say = partial(SCHEDULE_CODES.finding, "loop.scheduler_unit", evidence={"schedulers": rows, "updates": updates})
    order: Say = partial(SCHEDULE_CODES.finding, "loop.scheduler_order", evidence={"schedulers": rows})
    if not rows:
        none = "Does not apply: no scheduler of torch.optim.lr_scheduler is stepped."
        return [say("ok", none), order("ok", none)]
    return [
        _unit(rows, updates, say, early=early, least=least, rest=rest, ended=facts["ended"]),
        _order(rows, order),
    ]


def _unit(
    rows: list[Facts], updates: int, say: Say, *, early: float, least: float, rest: float, ended: bool
) -> Finding:
    for row in rows:
        if row.get("mode") is not None and (wrong := _direction(row, say)) is not None:
            return wrong
        horizon, calls = row["horizon"], row["calls"]
        if not horizon or not updates:
            continue
        line = f" ({row['line']})" if row["line"] else ""
        per_update, through = calls / updates, calls / horizon
        once = row["name"] in _ONCE and not row["rises"]
        reached = row["updates_at_horizon"]
        over = (once and reached is not None and reached < early * updates) or (
            row["name"] == "MultiStepLR" and reached is not None and reached < least * updates
        )
        gone = row["decay"] is not None and row["decay"] ** through < rest
        if per_update > 0.5 and (gone or over):
            at = (
                f"is reached after {reached:,} of {updates:,} updates"
                if over
                else f"repeats {through:.0f} times in {updates:,} updates"
            )
            return say(
                "fail", f"{row['name']} is stepped at every update{line}, and its length of {horizon:,} {at}: it seems to be meant in epochs.",
                value=through, unit="times its length", advice=["Step the scheduler once an epoch, or give its length in updates."],
            )  # fmt: skip
        in_updates = 0.75 * updates <= horizon <= 1.25 * updates
        if ended and per_update < 0.5 and once and calls > 1 and (through < least or in_updates):
            return say(
                "fail", f"{row['name']} has a length of {horizon:,} and is stepped {calls:,} times{line} in {updates:,} updates: the learning rate hardly follows it.",
                value=through, unit="times its length", threshold=least, advice=["Step it at every update, or give its length in epochs."],
            )  # fmt: skip
        if row["name"] in _PAST and through > 1.25:
            return say(
                "warn", f"{row['name']} is stepped {calls:,} times{line}, past its length of {horizon:,}: the learning rate {_PAST[row['name']]}.",
                value=through, unit="times its length", advice=["Give it the number of steps that are really made."],
            )  # fmt: skip
    return say("ok", "Schedulers are stepped in the unit of their length, as far as they have one.")


def _direction(row: Facts, say: Say, *, least: int = 5, trend: float = 0.8, damage: float = 0.1) -> Finding | None:
    """Return an alarm where ReduceLROnPlateau lowers the learning rate as its metric moves steadily against its mode; None where it does not.

    A metric that falls under "max" is a loss. One that rises under "min" may be a loss that overfits from the first value on, which then
    leaves the range of a share: it is a warning alone.

    Args:
        least: values that it takes.
        trend: rank correlation with time that is steady.
        damage: share of the learning rate that is left where it is a failure (rules of thumb).
    """
    values, left = row["metrics"], row["lrs"][-1] / row["lrs"][0] if row["lrs"] and row["lrs"][0] else 1.0
    finite = all(isinstance(value, float) and math.isfinite(value) for value in values)
    if not finite or len(set(values)) < least or left >= 1.0:
        return None
    rho, loss = float(stats.spearmanr(range(len(values)), values).statistic), row["mode"] == "max"
    if not (
        rho <= -trend
        if loss
        else rho >= trend and min(values) >= 0.0 and max(values) <= (1.0 if values[0] <= 1.0 else 100.0)
    ):
        return None
    line, way = f" ({row['line']})" if row["line"] else "", "falls" if loss else "rises"
    said = "so it is a loss" if loss else "as an accuracy does"
    return say(
        "fail" if loss and left <= damage else "warn",
        f"ReduceLROnPlateau has mode={row['mode']!r}{line} and is given a metric that {way} from {values[0]:.4g} to {values[-1]:.4g}, {said}: it "
        f"takes every improvement for none, and has lowered the learning rate to {left:.2g} times its first value.",
        value=left, unit="of the first learning rate", advice=[f"Use mode={'min' if loss else 'max'!r} for this metric."],
    )  # fmt: skip


def _order(rows: list[Facts], say: Say) -> Finding:
    wrong = next((row for row in rows if row["before_first_update"]), None)
    if wrong is None:
        return say("ok", "Schedulers are stepped after the optimizer.")
    line = f" ({wrong['line']})" if wrong["line"] else ""
    return say(
        "warn", f"{wrong['name']} is stepped before the first update{line}: its first value is skipped.", value=float(wrong["before_first_update"]), unit="calls",
        advice=["Call scheduler.step() after optimizer.step()."],
    )  # fmt: skip
