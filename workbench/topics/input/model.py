"""What a step takes, what makes it wait for data, and what it would take with another input pipeline (P1.1).

A small model of loading beside computing, from measured parts. Without worker processes a step takes loading plus computing; with k
of them whichever is slower, loading divided by k or computing with the hand-over of a batch; and never less than all processor time
over the processors that other programs leave. What workers take to start is shared out over the batches of an epoch. "facts" are
those of `audit_input` throughout.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

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
class StepTime:
    """Seconds of a step, each the median over rounds of means over steps."""

    period_s: float  # from one step to the next, what an epoch takes to start shared out over its batches
    wait_s: float  # of it, waited for data: exposed
    compute_s: float  # a step on a batch that is there already: what would be left
    fetch_s: float  # spent on making a batch, by whatever process; NaN where nobody can tell
    hidden_s: float  # of that, not waited for
    restart_s: float  # of the wait, what an epoch takes to start beyond fetching its first batch
    queued_s: float  # neither waited for data nor computed: the loop was ready, and other programs had the processors

    @property
    def own_s(self) -> float:
        """Seconds of the step without what other programs took."""
        return max(self.wait_s, self.period_s - self.queued_s)

    @property
    def wait_share(self) -> float:
        """Share of the step that is waited for data, what other programs took left out of both."""
        return self.wait_s / self.own_s if self.own_s > 0 else math.nan

    @property
    def recoverable_s(self) -> float:
        """Seconds of a step that a perfect pipeline would save."""
        return max(0.0, self.period_s - self.compute_s)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A change ("workers", "in_process", "cache", "drop", "persistent" or "no_sync"), its value, and the step time that the model gives it."""

    change: str
    value: Any
    period_s: float


def loop_period(rounds: Sequence[Mapping[str, Any]], batches: int | None) -> tuple[float, float, float]:
    """Return (period_s, wait_s, start_s) of rounds of a loop, medians; the very first start is not counted where there are more.

    Args:
        rounds: each with "steady_s" and "wait_s" (means within an epoch) and "starts" (waits for first batches).
        batches: of an epoch, None where it has no end.
    """
    starts = [s for r in rounds for s in r["starts"]]
    start = float(np.median(starts[1:] or starts)) if starts else math.nan
    steady = _median([r["steady_s"] for r in rounds])
    wait = _median([r["wait_s"] for r in rounds])
    if math.isnan(steady):  # epochs of one batch
        step = _median([r["step_s"] for r in rounds])
        return start + step, start, start
    extra = max(0.0, start - wait) / batches if batches and not math.isnan(start) else 0.0
    return steady + extra, wait + extra, start


def step_time(facts: Mapping[str, Any]) -> StepTime:
    """Return where the time of a step goes."""
    rounds, batches = facts["rounds"], facts["loader"].get("batches")
    period, wait, start = loop_period(rounds, batches)
    compute = _median([r["cached_s"] for r in rounds])
    fetch = fetch_s(facts)
    if facts["ahead"]:  # the host runs ahead of the device: what it waits for may be hidden behind the device's work
        wait = max(0.0, period - compute)
    restart = 0.0
    if facts["loader"].get("num_workers") and batches and not math.isnan(start):
        drained = [r["items_s"] + r["collate_s"] for r in facts.get("variants", ()) if r["change"] == "as_is"]
        first = (
            drained[0] if drained else fetch
        )  # workers that have just started share the processors with those that start
        restart = max(0.0, start - (0.0 if math.isnan(first) else first)) / batches
    hidden = math.nan if math.isnan(fetch) else max(0.0, fetch - wait)
    if facts["loader"].get("num_workers") == 0 and not facts["ahead"]:
        hidden = 0.0
    return StepTime(
        period_s=period, wait_s=wait, compute_s=compute, fetch_s=fetch, hidden_s=hidden, restart_s=min(restart, wait),
        queued_s=_median([r.get("queued_s", 0.0) for r in rounds]),
    )  # fmt: skip


def busy_share(facts: Mapping[str, Any]) -> float:
    """Return how much of the time that a step wants a processor other programs have it; 0 where nobody can tell."""
    queued, cpu = (_median([r.get(name, 0.0) for r in facts["rounds"]]) for name in ("cached_queued_s", "cached_cpu_s"))
    return queued / (queued + cpu) if queued + cpu > 0 else 0.0


def free_cores(facts: Mapping[str, Any]) -> float:
    """Return how many processors there are for this training, what other programs take left out where a step shows it.

    A step that mostly sleeps, or waits for a device, says how late a processor comes when it is asked for, and not how much of it.
    """
    wanted = _median([r.get("cached_cpu_s", 0.0) + r.get("cached_queued_s", 0.0) for r in facts["rounds"]])
    took = _median([r.get("cached_s", 0.0) for r in facts["rounds"]])
    return max(1.0, float(facts["cores"])) * (1 - busy_share(facts) if wanted >= 0.5 * took else 1.0)


def fetch_s(facts: Mapping[str, Any]) -> float:
    """Return the seconds that making a batch takes one process, NaN where nobody can tell."""
    fetch = facts.get("fetch")
    return math.nan if not fetch else float(fetch["items_s"] + fetch["collate_s"])


def predictions(facts: Mapping[str, Any]) -> list[Prediction]:
    """Return what each change that was tried in short would make of the step."""
    now, loader = step_time(facts), facts["loader"]
    batches = loader.get("batches")
    cpu = _median([r["cached_cpu_s"] for r in facts["rounds"]])
    step = _median([r["step_s"] for r in facts["rounds"]])  # after a wait: slower than one right after another
    compute = now.compute_s if facts["ahead"] else max(now.compute_s, step)
    ours = free_cores(facts)
    found = []
    for row in facts.get("variants", ()):
        if row["change"] in ("as_is", "null_transform"):
            continue
        if row["change"] == "workers" and row["value"] <= (loader.get("num_workers") or 0):
            continue
        if row["change"] == "workers" and row["value"] > 1 and not shares_out(facts):
            continue  # they would repeat each other's examples, or nobody knows whether they would
        if row["change"] == "cache" and not storable(facts):
            continue
        warm = row["change"] == "drop"  # to free a batch takes time in the step; without its bulk that is gone, too
        period = _with(now.compute_s if warm else compute, cpu, row, ours)
        if row["change"] == "workers" and batches:  # they persist: an epoch begins with one batch that is waited for
            period += now.fetch_s / batches
        elif batches and row["workers"]:
            period += now.restart_s
        found.append(Prediction(change=row["change"], value=row["value"], period_s=period))
    if loader.get("num_workers") and not loader.get("persistent_workers") and now.restart_s > 0:
        found.append(Prediction(change="persistent", value=True, period_s=_persistent(facts, now, cpu)))
    syncs = facts.get("syncs")
    if facts["ahead"] and syncs and syncs["per_step"] > 0:
        waited = loop_period(facts["rounds"], batches)[1]
        found.append(Prediction(change="no_sync", value=None, period_s=max(now.compute_s, waited)))
    return found


def shares_out(facts: Mapping[str, Any]) -> bool | None:
    """Tell whether worker processes give each example once; None for a stream whose examples could not be counted."""
    epochs = facts.get("epochs")
    if epochs:
        return bool(epochs["same"])
    return None if facts["loader"].get("stream") else True


def storable(facts: Mapping[str, Any]) -> bool:
    """Tell whether items can be stored ready-made: they have an index, and are the same whenever they are asked for."""
    return not facts["loader"].get("stream") and facts.get("items_repeat") is not False


def _persistent(facts: Mapping[str, Any], now: StepTime, cpu: float) -> float:
    """Return the step with workers that stay: as the loader does when it never ends, and the first batch of an epoch waited for."""
    as_is = [row for row in facts.get("variants", ()) if row["change"] == "as_is"]
    if not as_is:
        return now.period_s - now.restart_s
    first = (as_is[0]["items_s"] + as_is[0]["collate_s"]) / facts["loader"]["batches"]
    return min(now.period_s, _with(now.compute_s, cpu, as_is[0], free_cores(facts)) + float(first))


def _with(compute_s: float, compute_cpu_s: float, row: Mapping[str, Any], cores: float) -> float:
    if not row["workers"]:
        return float(compute_s + row["batch_s"])
    busy = (compute_cpu_s + row["cpu_s"]) / cores
    return float(max(compute_s + row["handoff_s"], row["batch_s"], busy))


def knee(rows: Sequence[Mapping[str, Any]], *, share: float = 0.9) -> int | None:
    """Return the smallest number of workers whose throughput is this share of the best one (rule of thumb); None without rows."""
    if not rows:
        return None
    best = min(row["batch_s"] for row in rows)
    return min(int(row["workers"]) for row in rows if best >= share * row["batch_s"])


def _median(values: list[float]) -> float:
    finite = [v for v in values if v is not None and math.isfinite(v)]
    return float(np.median(finite)) if finite else math.nan


@dataclass(frozen=True, kw_only=True)
class Cause:
    """What the waiting comes from."""

    # one of `CAUSES`; "mixed" where making a batch is most of the wait, and no part of that is; "unknown" where making
    # a batch explains under half of the wait, or the loader cannot be taken apart
    name: str
    # seconds of a batch by what they are spent on: "latency", "preprocessing", "collate", "unused_features"
    parts: Mapping[str, float]
    fix: Prediction | None  # the change that is predicted to answer it best; None where no change was tried that does


def find_cause(facts: Mapping[str, Any], *, hidden_share: float = 0.2, most: float = 0.5) -> Cause:
    """Return the cause of waiting, whether there is much of it or not.

    A synchronisation in every step, or workers that start again, are the cause where they explain most of what could be saved;
    too few workers where there are some and more of them would hide all loading. Where the loader alone is twice as fast as the step,
    it is the way of a batch from a worker to the training process. Else it is the largest part of making a batch, where that is most
    of the wait: what explains under half of it is no cause.

    Args:
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
