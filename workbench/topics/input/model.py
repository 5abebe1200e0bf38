"""What a step would take with another input pipeline: a small model of loading beside computing, from measured parts (P1.1).

Without worker processes a step takes loading plus computing; with k of them whichever is slower, loading divided by k or
computing with the hand-over of a batch; and never less than all processor time over the processors that other programs leave.
What workers take to start is shared out over the batches of an epoch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = [
    "Prediction",
    "StepTime",
    "busy_share",
    "free_cores",
    "knee",
    "loop_period",
    "predictions",
    "shares_out",
    "step_time",
    "storable",
]


_WANTED, _TOOK = ("cached_cpu_s", "cached_queued_s"), ("cached_s",)


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of a step, each the median over rounds of means over steps.

    Attributes:
        period_s: from one step to the next, what an epoch takes to start shared out over its batches.
        wait_s: of it, waited for data: exposed.
        compute_s: a step on a batch that is there already: what would be left.
        fetch_s: spent on making a batch, by whatever process; NaN where nobody can tell.
        hidden_s: of that, not waited for.
        restart_s: of the wait, what an epoch takes to start beyond fetching its first batch.
        queued_s: neither waited for data nor computed: the loop was ready, and other programs had the processors.
    """

    period_s: float
    wait_s: float
    compute_s: float
    fetch_s: float
    hidden_s: float
    restart_s: float
    queued_s: float

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
    """A change and the step time that the model gives it.

    Attributes:
        change: "workers", "in_process", "cache", "drop", "persistent" or "no_sync".
        value: for example how many workers.
        period_s: predicted.
    """

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
    """Return where the time of a step goes.

    Args:
        facts: of `audit_input`.
    """
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
    """Return how much of the time that a step wants a processor other programs have it; 0 where nobody can tell.

    Args:
        facts: of `audit_input`.
    """
    queued, cpu = (_median([r.get(name, 0.0) for r in facts["rounds"]]) for name in ("cached_queued_s", "cached_cpu_s"))
    return queued / (queued + cpu) if queued + cpu > 0 else 0.0


def free_cores(facts: Mapping[str, Any]) -> float:
    """Return how many processors there are for this training, what other programs take left out where a step shows it.

    A step that mostly sleeps, or waits for a device, says how late a processor comes when it is asked for, and not how much of it.
    """
    wanted, took = (_median([sum(r.get(n, 0.0) for n in names) for r in facts["rounds"]]) for names in (_WANTED, _TOOK))
    return max(1.0, float(facts["cores"])) * (1 - busy_share(facts) if wanted >= 0.5 * took else 1.0)


def fetch_s(facts: Mapping[str, Any]) -> float:
    """Return the seconds that making a batch takes one process, NaN where nobody can tell."""
    fetch = facts.get("fetch")
    return math.nan if not fetch else float(fetch["items_s"] + fetch["collate_s"])


def predictions(facts: Mapping[str, Any]) -> list[Prediction]:
    """Return what each change that was tried in short would make of the step.

    Args:
        facts: of `audit_input`.
    """
    now, loader = step_time(facts), facts["loader"]
    batches = loader.get("batches")
    cpu = _median([r["cached_cpu_s"] for r in facts["rounds"]])
    step = _median(
        [r["step_s"] for r in facts["rounds"]]
    )  # between batches, after a wait: slower than one right after another
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
        if (
            row["change"] == "workers" and batches
        ):  # the workers persist: an epoch begins with one batch that is waited for
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
    """Tell whether worker processes give each example once; None for a stream whose examples could not be counted.

    Args:
        facts: of `audit_input`.
    """
    epochs = facts.get("epochs")
    if epochs:
        return bool(epochs["same"])
    return None if facts["loader"].get("stream") else True


def storable(facts: Mapping[str, Any]) -> bool:
    """Tell whether items can be stored ready-made: they have an index, and are the same whenever they are asked for.

    Args:
        facts: of `audit_input`.
    """
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
    """Return the smallest number of workers whose throughput is this share of the best one; None without rows.

    Args:
        rows: with "workers" and "batch_s".
        share: of the best throughput (rule of thumb).
    """
    if not rows:
        return None
    best = min(row["batch_s"] for row in rows)
    return min(int(row["workers"]) for row in rows if best >= share * row["batch_s"])


def _median(values: list[float]) -> float:
    finite = [v for v in values if v is not None and math.isfinite(v)]
    return float(np.median(finite)) if finite else math.nan
