"""What a step takes, and what it would take with another input pipeline (P1.1).

A small model of loading beside computing, from measured parts. Without worker processes a step takes loading plus computing; with k
of them whichever is slower, loading divided by k or computing with the hand-over of a batch; and never less than all processor time
over the processors that other programs leave. What workers take to start is shared out over the batches of an epoch.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

Row = Mapping[str, Any]


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
        """Share of the step that is waited for data, without what other programs took of both."""
        return self.wait_s / self.own_s if self.own_s > 0 else math.nan


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A change ("workers", "in_process", "cache", "drop", "persistent" or "no_sync"), its value, and the step time that the model gives it."""

    change: str
    value: Any
    period_s: float


def loop_period(rounds: Sequence[Row], batches: int | None) -> tuple[float, float, float]:
    """Return (period_s, wait_s, start_s) of rounds of a loop, medians; the very first start is not counted where there are more."""
    starts = [s for r in rounds for s in r["starts"]]
    start = float(np.median(starts[1:] or starts)) if starts else math.nan
    steady, wait = (_median([r[name] for r in rounds]) for name in ("steady_s", "wait_s"))
    if math.isnan(steady):  # epochs of one batch
        return start + _median([r["step_s"] for r in rounds]), start, start
    extra = max(0.0, start - wait) / batches if batches and not math.isnan(start) else 0.0
    return steady + extra, wait + extra, start


def knee(rows: Sequence[Row], *, share: float = 0.9) -> int | None:
    """Return the smallest number of workers whose throughput is this share of the best one (rule of thumb); None without rows."""
    best = min((row["batch_s"] for row in rows), default=0.0)
    return min((int(row["workers"]) for row in rows if best >= share * row["batch_s"]), default=None)


class Pipeline:
    """The facts of `audit_input`, read."""

    def __init__(self, facts: Mapping[str, Any]) -> None:
        self.facts, self.loader, self.ahead = facts, facts["loader"], bool(facts["ahead"])
        self.batches, self.stream = self.loader.get("batches"), bool(self.loader.get("stream"))
        self.workers, self.has_step = self.loader.get("num_workers") or 0, facts["step"] != "none"
        fetch = facts.get("fetch")
        self.fetch_s = math.nan if not fetch else float(fetch["items_s"] + fetch["collate_s"])
        self.tried: dict[str, list[Row]] = {}
        for row in facts.get("variants", ()):
            self.tried.setdefault(row["change"], []).append(row)
        self.as_is: Row | None = next(iter(self.tried.get("as_is", ())), None)

    def median(self, *names: str) -> float:
        """Return the median over the rounds of a value, or of a sum; NaN where no round has a finite one."""
        return _median([sum(math.nan if r.get(n, 0.0) is None else r.get(n, 0.0) for n in names) for r in self.facts["rounds"]])  # fmt: skip

    @cached_property
    def now(self) -> StepTime:
        """Where the time of a step goes."""
        period, wait, start = loop_period(self.facts["rounds"], self.batches)
        compute, fetch, restart = self.median("cached_s"), self.fetch_s, 0.0
        if self.ahead:  # the host runs ahead of the device: what it waits for may be hidden behind the device's work
            wait = max(0.0, period - compute)
        if self.workers and self.batches and not math.isnan(start):
            # workers that have just started share the processors with those that start
            first = _made_s(self.as_is) if self.as_is else fetch
            restart = max(0.0, start - (0.0 if math.isnan(first) else first)) / self.batches
        hidden = math.nan if math.isnan(fetch) else max(0.0, fetch - wait)
        if self.loader.get("num_workers") == 0 and not self.ahead:
            hidden = 0.0
        return StepTime(
            period_s=period, wait_s=wait, compute_s=compute, fetch_s=fetch, hidden_s=hidden, restart_s=min(restart, wait),
            queued_s=self.median("queued_s"),
        )  # fmt: skip

    @cached_property
    def busy_share(self) -> float:
        """How much of the time that a step wants a processor other programs have it; 0 where nobody can tell."""
        queued, cpu = self.median("cached_queued_s"), self.median("cached_cpu_s")
        return queued / (queued + cpu) if queued + cpu > 0 else 0.0

    @cached_property
    def shares_out(self) -> bool | None:
        """Whether worker processes give each example once; None for a stream whose examples could not be counted."""
        epochs = self.facts.get("epochs")
        return bool(epochs["same"]) if epochs else None if self.stream else True

    @property
    def storable(self) -> bool:
        """Whether items can be stored ready-made: they have an index, and are the same whenever they are asked for."""
        return not self.stream and self.facts.get("items_repeat") is not False

    @cached_property
    def predictions(self) -> list[Prediction]:
        """What each change that was tried in short would make of the step."""
        now, batches, found = self.now, self.batches, []
        # a step after a wait is slower than one right after another
        compute = now.compute_s if self.ahead else max(now.compute_s, self.median("step_s"))
        for row in self.facts.get("variants", ()):
            change, value = row["change"], row["value"]
            more = change == "workers"
            if change == "as_is" or (more and value <= self.workers):
                continue
            if (more and value > 1 and not self.shares_out) or (change == "cache" and not self.storable):
                continue  # workers would repeat each other's examples, or nobody knows whether they would
            # to free a batch takes time in the step; without its bulk that is gone, too
            period = self._with(now.compute_s if change == "drop" else compute, row)
            if more and batches:  # they persist: an epoch begins with one batch that is waited for
                period += now.fetch_s / batches
            elif batches and row["workers"]:
                period += now.restart_s
            found.append(Prediction(change=change, value=value, period_s=period))
        if self.workers and not self.loader.get("persistent_workers") and now.restart_s > 0:
            stays = now.period_s - now.restart_s
            if self.as_is:  # as the loader does when it never ends, and the first batch of an epoch waited for
                first = float(_made_s(self.as_is) / self.loader["batches"])
                stays = min(now.period_s, self._with(now.compute_s, self.as_is) + first)
            found.append(Prediction(change="persistent", value=True, period_s=stays))
        syncs = self.facts.get("syncs")
        if self.ahead and syncs and syncs["per_step"] > 0:
            waited = loop_period(self.facts["rounds"], batches)[1]
            found.append(Prediction(change="no_sync", value=None, period_s=max(now.compute_s, waited)))
        return found

    def _with(self, compute_s: float, row: Row) -> float:
        if not row["workers"]:
            return float(compute_s + row["batch_s"])
        busy = (self.median("cached_cpu_s") + row["cpu_s"]) / self._cores
        return float(max(compute_s + row["handoff_s"], row["batch_s"], busy))

    @cached_property
    def _cores(self) -> float:
        """Processors for this training, what other programs take left out where a step shows it."""
        shows = self.median("cached_cpu_s", "cached_queued_s") >= 0.5 * self.median("cached_s")
        return max(1.0, float(self.facts["cores"])) * (1 - self.busy_share if shows else 1.0)

    @cached_property
    def speedups(self) -> dict[str, float] | None:
        """The "predicted" and the "measured" speed-up of the change that was tried in full; None where none was."""
        fix = self.facts.get("fix")
        if not fix:
            return None
        rounds, found = fix.get("rounds", ()), dict[str, float]()
        for name, after, each in (
            ("predicted", fix["predicted_s"], [(r["before_s"], p) for r in rounds for p in r["predicted_s"]]),
            ("measured", fix["after_s"], [(r["before_s"], r["after_s"]) for r in rounds]),
        ):
            point = _ratio(fix["before_s"], after)
            known = [ratio for pair in each if math.isfinite(ratio := _ratio(*pair))]
            low, high = (min(point, *known), max(point, *known)) if known else (math.nan, math.nan)
            found |= {name: point, f"{name}_low": low, f"{name}_high": high}
        return found


def _made_s(row: Row) -> float:
    return float(row["items_s"] + row["collate_s"])


def _median(values: Sequence[float | None]) -> float:
    finite = [v for v in values if v is not None and math.isfinite(v)]
    return float(np.median(finite)) if finite else math.nan


def _ratio(before: float | None, after: float | None) -> float:
    return before / after if before and after else math.nan  # None is what was no number, read back from JSON
