"""Findings about how a loop steps its learning-rate schedulers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from workbench.findings.finding import Codes, Finding

SCHEDULE_CODES = Codes({"loop.scheduler_unit": "F3.5", "loop.scheduler_order": "F3.5"})
_PERIODIC = ("CosineAnnealingLR", "OneCycleLR", "LinearLR", "PolynomialLR", "ConstantLR")
"""Schedulers that are meant to be stepped through once."""
Facts = Mapping[str, Any]
Say = Callable[..., Finding]


def schedule_findings(facts: Facts, *, early: float = 0.5, least: float = 0.1, decays: int = 10) -> list[Finding]:
    """Return the findings of `SCHEDULE_CODES`.

    Args:
        early: share of the updates before which a schedule that is meant for the whole run is over (rule of thumb).
        least: share of its own length that a schedule goes through in a run that came to its end (rule of thumb).
        decays: steps of a stepwise decay, as StepLR's, that leave nothing of the learning rate (rule of thumb: a factor of 10 each).
    """
    rows, updates = facts["schedulers"], facts["updates"]
    say: Say = partial(SCHEDULE_CODES.finding, "loop.scheduler_unit", evidence={"schedulers": rows, "updates": updates})
    order: Say = partial(SCHEDULE_CODES.finding, "loop.scheduler_order", evidence={"schedulers": rows})
    if not rows:
        none = "Does not apply: no scheduler of torch.optim.lr_scheduler is stepped."
        return [say("ok", none), order("ok", none)]
    return [
        _unit(rows, updates, say, early=early, least=least, decays=decays, ended=facts["ended"]),
        _order(rows, order),
    ]


def _unit(
    rows: list[Facts], updates: int, say: Say, *, early: float, least: float, decays: int, ended: bool
) -> Finding:
    for row in rows:
        horizon, calls = row["horizon"], row["calls"]
        if not horizon or not updates:
            continue
        line = f" ({row['line']})" if row["line"] else ""
        per_update = calls / updates
        through = calls / horizon
        stepwise = row["name"] in ("StepLR", "MultiStepLR")
        over = (
            row["name"] in _PERIODIC
            and row["updates_at_horizon"] is not None
            and row["updates_at_horizon"] < early * updates
        )
        if per_update > 0.5 and ((stepwise and row["name"] == "StepLR" and through > decays) or over):
            at = (
                f"after {row['updates_at_horizon']:,} of {updates:,} updates"
                if over
                else f"{through:.0f} times over {updates:,} updates"
            )
            return say(
                "fail", f"{row['name']} is stepped at every update{line}, and its length of {horizon:,} is reached {at}: it seems to be meant in epochs.",
                value=through, unit="times its length", advice=["Step it once an epoch, or give its length in updates."],
            )  # fmt: skip
        if ended and per_update < 0.5 and row["name"] in _PERIODIC and through < least and calls > 1:
            return say(
                "fail", f"{row['name']} has a length of {horizon:,} and is stepped {calls:,} times{line} in {updates:,} updates: the learning rate hardly follows it.",
                value=through, unit="times its length", threshold=least, advice=["Step it at every update, or give its length in epochs."],
            )  # fmt: skip
        if row["name"] == "CosineAnnealingLR" and through > 1.25:
            return say(
                "warn", f"{row['name']} is stepped {calls:,} times{line}, past its length of {horizon:,}: the learning rate climbs again.",
                value=through, unit="times its length", advice=["Give T_max the number of steps that are really made."],
            )  # fmt: skip
    return say("ok", "Schedulers are stepped in the unit of their length, as far as they have one.")


def _order(rows: list[Facts], say: Say) -> Finding:
    wrong = next((row for row in rows if row["before_first_update"]), None)
    if wrong is None:
        return say("ok", "Schedulers are stepped after the optimizer.")
    line = f" ({wrong['line']})" if wrong["line"] else ""
    return say(
        "warn", f"{wrong['name']} is stepped before the first update{line}: its first value is skipped.", value=float(wrong["before_first_update"]), unit="calls",
        advice=["Call scheduler.step() after optimizer.step()."],
    )  # fmt: skip
