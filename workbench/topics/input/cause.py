"""What makes a step wait for its data, and which change answers it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.topics.input.model import Prediction, StepTime, predictions, step_time

__all__ = ["CAUSES", "Cause", "find_cause", "fix_speedups"]

CAUSES = (
    "sync",
    "worker_restart",
    "too_few_workers",
    "hand_over",
    "unused_features",
    "latency",
    "preprocessing",
    "collate",
)
_ANSWERS = {
    "sync": ("no_sync",),
    "worker_restart": ("persistent", "in_process"),
    "too_few_workers": ("workers",),
    "unused_features": ("drop",),
    "hand_over": ("in_process",),
    "latency": ("workers", "cache"),
    "preprocessing": ("workers", "cache"),
    "collate": ("workers",),
    "mixed": ("workers", "cache"),
}


@dataclass(frozen=True, kw_only=True)
class Cause:
    """What the waiting comes from.

    Attributes:
        name: one of `CAUSES`; "mixed" where making a batch is most of the wait, and no part of that is; "unknown" where making a
            batch explains under half of the wait, or the loader cannot be taken apart.
        parts: seconds of a batch by what they are spent on: "latency", "preprocessing", "collate", "unused_features".
        fix: the change that is predicted to answer it best; None where no change was tried that does.
    """

    name: str
    parts: Mapping[str, float]
    fix: Prediction | None


def find_cause(facts: Mapping[str, Any], *, hidden_share: float = 0.2, most: float = 0.5) -> Cause:
    """Return the cause of waiting, whether there is much of it or not.

    A synchronisation in every step, or workers that start again, are the cause where they explain most of what could be saved;
    too few workers where there are some and more of them would hide all loading. Where the loader alone is twice as fast as the step,
    it is the way of a batch from a worker to the training process. Else it is the largest part of making a batch, where that is most
    of the wait: what explains under half of it is no cause.

    Args:
        facts: of `audit_input`.
        hidden_share: of a step that may be left to wait with more workers, for "too few workers" (above it the TensorFlow
            profiler calls a step highly input-bound).
        most: of the recoverable time that a sync or restarts must explain, of the wait that a part of making a batch must, and of
            the steps that must fetch (rule of thumb).
    """
    now, tried = step_time(facts), predictions(facts)
    parts = _parts(facts)
    name = _explained(facts, now, tried, most) or _hand_over(facts, now) or _too_few(facts, now, tried, hidden_share)
    if name is None:
        name = _largest(facts, now, parts, most)
    answers = _ANSWERS.get(name, ())
    if facts["step"] == "none":  # without a step to hide behind, ready-made items would always be best
        answers = answers[:1]
    fitting = [p for change in answers for p in tried if p.change == change]
    return Cause(name=name, parts=parts, fix=_best(fitting, now.period_s))


def _explained(facts: Mapping[str, Any], now: StepTime, tried: Sequence[Prediction], most: float) -> str | None:
    if facts["step"] == "none":
        return None
    often = (facts.get("syncs") or {"share": 0.0})["share"] >= most
    for name, change in (("sync", "no_sync"), ("worker_restart", "persistent")):
        if name == "sync" and not often:
            continue
        saved = [now.period_s - p.period_s for p in tried if p.change == change]
        if saved and saved[0] >= most * now.recoverable_s > 0:
            return name
    return None


def _hand_over(facts: Mapping[str, Any], now: StepTime, *, ahead: float = 0.5) -> str | None:
    """Tell whether batches are ready long before they are taken (a rule of thumb: twice as fast as the step).

    Or are waited for longer than one process takes to make one: what is made beforehand is not waited for that long.
    """
    as_is = [row for row in facts.get("variants", ()) if row["change"] == "as_is"]
    if not as_is or not as_is[0]["workers"]:
        return None
    ready = as_is[0]["batch_s"] < ahead * now.compute_s or now.wait_s - now.restart_s > now.fetch_s
    return "hand_over" if ready else None


def _too_few(facts: Mapping[str, Any], now: StepTime, tried: Sequence[Prediction], share: float) -> str | None:
    if not facts["loader"].get("num_workers") or facts["step"] == "none":
        return None
    more = [p.period_s for p in tried if p.change == "workers"]
    return "too_few_workers" if more and min(more) <= now.compute_s / (1 - share) else None


def _largest(facts: Mapping[str, Any], now: StepTime, parts: Mapping[str, float], most: float) -> str:
    """Return the part of making a batch that the wait comes from; beside workers, whose making is hidden, it is most of the making."""
    made = sum(parts.values())
    wait = made if facts["loader"].get("num_workers") or not math.isfinite(now.wait_s) else now.wait_s
    if not parts or made < most * wait:
        return "unknown"
    name = max(parts, key=lambda part: parts[part])
    return name if parts[name] >= most * min(wait, made) else "mixed"


def _parts(facts: Mapping[str, Any]) -> dict[str, float]:
    fetch = facts.get("fetch")
    if not fetch:
        return {}
    dropped = [row for row in facts.get("variants", ()) if row["change"] == "drop"]
    unused = max(0.0, fetch["collate_s"] - dropped[0]["collate_s"]) if dropped else 0.0
    work = max(0.0, fetch["items_s"] - fetch["items_blocked_s"] - fetch["items_queued_s"])
    return {
        "latency": fetch["items_blocked_s"],
        "preprocessing": work,
        "collate": max(0.0, fetch["collate_s"] - unused - fetch.get("collate_queued_s", 0.0)),
        "unused_features": unused,
    }


def _best(fitting: Sequence[Prediction], period_s: float, *, close: float = 0.8) -> Prediction | None:
    """Return the first prediction that saves nearly as much as the best: fewer workers, and workers before stored items."""
    if not fitting or math.isnan(period_s):
        return None
    saved = [period_s - p.period_s for p in fitting]
    if max(saved) <= 0:
        return None
    return next(p for p, s in zip(fitting, saved, strict=True) if s >= close * max(saved))


def fix_speedups(facts: Mapping[str, Any]) -> dict[str, float] | None:
    """Return the "predicted" and the "measured" speed-up of the change that was tried in full; None where none was.

    Each has its "_low" and "_high", the smallest and the largest of the rounds of the trial: what the machine did in between moves
    them apart. Predictions are made by the step as it is in the loop and as it is on a batch at hand. NaN where rounds are not known.
    """
    fix = facts.get("fix")
    if not fix:
        return None
    rounds = fix.get("rounds", ())
    return {
        **_spread("predicted", _ratio(fix["before_s"], fix["predicted_s"]), [_ratio(r["before_s"], p) for r in rounds for p in r["predicted_s"]]),
        **_spread("measured", _ratio(fix["before_s"], fix["after_s"]), [_ratio(r["before_s"], r["after_s"]) for r in rounds]),
    }  # fmt: skip


def _spread(name: str, point: float, rounds: Sequence[float]) -> dict[str, float]:
    known = [value for value in rounds if math.isfinite(value)]
    low, high = (min(point, *known), max(point, *known)) if known else (math.nan, math.nan)
    return {name: point, f"{name}_low": low, f"{name}_high": high}


def _ratio(before: float | None, after: float | None) -> float:
    return before / after if before and after else math.nan  # None is what was no number, read back from JSON
