"""`collect_input`: where the time of a step goes, for a person's own loader and step (P1.1 to P1.9).

Short ablations say what the loading is made of; the change that they point to is then tried in full, turn and turn about with
the loader as it is, because other programs on the machine slow down both alike.
"""

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, default_collate, default_convert

from workbench.checks import check_integer, check_number
from workbench.errors import DataError
from workbench.topics.data.order import probe_workers, untouched
from workbench.topics.input.bound import find_cause
from workbench.topics.input.loaders import Spent, closed, is_stream, reads_all, torch_loader
from workbench.topics.input.throughput import Pipeline, loop_period
from workbench.topics.input.timed_loop import Loop, Step, Wait, as_round, at_once, fetch_parts, run_cached, run_loop
from workbench.topics.input.variants import (
    cached_items,
    drain,
    draws_alike,
    items_repeat,
    spec_loader,
    stream_epochs,
)  # fmt: skip
from workbench.topics.input.watch import count_syncs, observe_reads, stale_fetches
from workbench.train.lanes.threads import cores
from workbench.train.rng import isolated_rng
from workbench.workloads.items import IndexedDataset, leaf_bytes, leaves, length_of

ROUNDS = 3  # of the loader as it is, of a cached batch, and of the change: medians are taken over them (rule of thumb)
SLICES = 26  # parts that the budget is cut into; about so many pieces are timed
WORTH = 0.1  # share of waiting from which a change is tried in full
VISITS = 4 * 20  # items that `probe_workers` asks for in all, by two workers in two epochs


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How long to look: about `seconds` in all, `timeout_s` for a batch, at most `max_workers` worker processes."""

    seconds: float
    timeout_s: float
    max_workers: int

    def __post_init__(self) -> None:
        """Check the numbers."""
        check_number("seconds", self.seconds)
        check_number("timeout_s", self.timeout_s)
        check_integer("max_workers", self.max_workers, low=0, hint=": worker processes to try")

    @property
    def slice(self) -> dict[str, Any]:
        """Seconds of one piece, and of a batch."""
        return {"seconds": self.seconds / SLICES, "timeout_s": self.timeout_s}


@dataclass(frozen=True, kw_only=True)
class Stepping:
    """The step and how to watch it."""

    kind: str  # "none", "seconds", "function" or "workload"
    step: Step | None  # called with every batch; None does nothing
    wait: Wait  # returns when the device has done all its work; `at_once` where the host does not run ahead of it
    read: Step | None = None  # reads a batch, where that is not the step itself; called with what `prepare` returns
    prepare: Step | None = None  # done to a batch before it is read


def collect_input(loader: Any, stepping: Stepping, budget: Budget) -> dict[str, Any]:
    """Return JSON facts for `diagnose_input_pipeline`; random state and the loader's are left as they were."""
    with untouched(loader) if isinstance(loader, DataLoader) else isolated_rng():
        return _Audit(loader, torch_loader(loader), stepping, budget).run()


def _described(loader: Any, own: DataLoader[Any] | None) -> dict[str, Any]:
    """Return the settings of a loader that matter for its speed."""
    if own is None:
        return {"type": type(loader).__name__, "dataset": None, "num_workers": None, "batches": None, "examples": None}
    batched, collate = own.batch_size is not None or own.batch_sampler is None, own.collate_fn
    plain = collate is default_collate or collate is default_convert
    # how many batches an epoch should have, without asking the loader, which would hold a stream to it
    examples, size = length_of(own.dataset), own.batch_size or 1
    batches = None if examples is None else examples // size if own.drop_last else -(-examples // size)
    if not is_stream(own):
        batches = length_of(own.sampler if own.batch_sampler is None else own.batch_sampler)
    return {
        "type": type(own).__name__, "dataset": type(own.dataset).__name__, "stream": is_stream(own), "batch_size": own.batch_size,
        "sampler": type(own.sampler if batched else own.batch_sampler).__name__, "num_workers": own.num_workers,
        "prefetch_factor": own.prefetch_factor, "collate": "default" if plain else getattr(collate, "__name__", type(collate).__name__),
        "persistent_workers": own.persistent_workers, "pin_memory": own.pin_memory, "batches": batches,
        "examples": examples, "drop_last": own.drop_last,
    }  # fmt: skip


def _no_batch(loader: Any, own: DataLoader[Any] | None) -> DataError:
    if own is None:
        name = type(loader).__name__
        return DataError(f"the loader ({name}) gives no batch: an iterator that is used up, or an empty source.")
    length, name = length_of(own.dataset), type(own.dataset).__name__
    if length == 0:
        return DataError(f"the loader gives no batch: its dataset {name} has 0 examples.")
    claimed = "" if length is None else f", which says it has {length} examples,"
    return DataError(
        f"the loader gives no batch: its dataset {name}{claimed} yields none, its sampler is empty, or "
        f"drop_last drops the only batch (batch_size={own.batch_size}, drop_last={own.drop_last})."
    )


class _Audit:
    def __init__(self, loader: Any, own: DataLoader[Any] | None, stepping: Stepping, budget: Budget) -> None:
        self.loader, self.own, self.stepping, self.budget = loader, own, stepping, budget
        self.kept: list[Any] = []
        self.order: list[Any] = []
        self.repeats = False
        self.data: Any = None
        self.facts: dict[str, Any] = {
            "step": stepping.kind, "ahead": stepping.wait is not at_once, "loader": _described(loader, own), "cores": cores(),
            "variants": [], "syncs": None, "reads": None,
        }  # fmt: skip

    def run(self) -> dict[str, Any]:
        """Measure, ask for the cause, and try its answer."""
        own, facts, step, part = self.own, self.facts, self.stepping.step, self.budget.slice["seconds"]
        self._as_it_is()
        if own is not None:
            if reads_all(own) and (length := length_of(own.dataset)):
                IndexedDataset(own.dataset, split=None)[length - 1]  # a length that is too long ends in an error
            self.data = cached_items(own, seconds=part)
            facts["items_repeat"] = items_repeat(own.dataset, self.data, seconds=part)
            facts["item_bytes"] = {path: leaf_bytes(leaf) for path, leaf in leaves(self.data.items[0])}
        if step is not None and self.stepping.kind != "seconds":
            facts["reads"] = observe_reads(self.kept[0], self.stepping.read or step, prepare=self.stepping.prepare)
            facts["syncs"] = count_syncs(self.kept, step)
        if own is not None:
            self._variants(own)
            self._workers(own)
        found = Pipeline(facts)
        fix, facts["fix"] = find_cause(found).fix, None
        if own is not None and fix is not None and (step is None or found.now.wait_share >= WORTH):
            self._try(own, fix.change, fix.value)
        return facts

    def _as_it_is(self) -> None:
        """Rounds of the loop as it is, each beside the same step on batches that are there already."""
        loops: list[Loop] = []
        rounds: list[dict[str, Any]] = []
        described = self.facts["loader"]
        with closed(self._own_loader()) as timed:
            for _ in range(ROUNDS):
                loops.append(self._loop(timed, keep=None if loops else self.kept))
                if not len(loops[0]):
                    raise _no_batch(self.loader, self.own)
                rounds.append(self._round(loops[-1]))
        fetched = [pair for loop in loops for pair in loop.fetched[1 if len(loop.fetched) > 1 else 0 :]]
        self.facts |= {
            "rounds": rounds, "cold_s": loops[0].wait_s[0], "fetch": fetch_parts(fetched),
            "batch_bytes": {path: leaf_bytes(leaf) for path, leaf in leaves(self.kept[0])},
        }  # fmt: skip
        if loops[0].indices:
            described["examples_per_batch"] = float(np.mean([len(i) for i in loops[0].indices]))
        batches, examples = next((ended for loop in loops for ended in loop.ended), (None, None))
        claimed, counted = described.pop("examples"), described["batches"]
        self.facts["length"] = {"of": "examples", "claimed": claimed, "yielded": examples}
        if self.own is not None and not is_stream(self.own):
            # the sampler says how long an epoch is, and may leave examples out or repeat some
            self.facts["length"] = {"of": "batches", "claimed": counted, "yielded": batches}
        if counted is None and batches is not None:
            described["batches"] = max(1, batches)

    def _own_loader(self) -> Any:
        return self.loader if self.own is None else spec_loader(self.own, {})

    def _loop(self, loader: Any, *, keep: list[Any] | None = None) -> Loop:
        return run_loop(loader, self.stepping.step, self.stepping.wait, keep=keep, **self.budget.slice)

    def _round(self, loop: Loop) -> dict[str, Any]:
        """Return what a loop showed, beside the same step on batches that are there already."""
        step, spent = self.stepping.step, Spent(0.0, 0.0, 0.0)
        if step is not None:
            spent = run_cached(self.kept, step, self.stepping.wait, seconds=self.budget.slice["seconds"])
        cached = {"cached_s": spent.wall_s, "cached_cpu_s": spent.cpu_s, "cached_queued_s": spent.queued_s}
        return as_round(loop, ahead=self.facts["ahead"]) | cached

    def _workers(self, loader: DataLoader[Any]) -> None:
        """What worker processes change besides speed: their random draws, unless asking takes too long, and a stream's examples."""
        seconds, timeout_s, draws, epochs = self.budget.seconds, self.budget.timeout_s, None, None
        item_s = self.facts["fetch"]["items_s"] / max(1.0, self.facts["loader"]["examples_per_batch"])
        if not is_stream(loader) and not (loader.num_workers and item_s * VISITS > seconds):
            indices, count = [index for batch in self.order for index in batch], loader.num_workers
            draws = probe_workers(loader.dataset, num_workers=count, like=loader, indices=indices, timeout_s=timeout_s)
        if self.budget.max_workers > 0:
            epochs = stream_epochs(loader, seconds=max(1.0, seconds / 8), timeout_s=timeout_s)
        self.facts |= {"draws": draws, "epochs": epochs}

    def _variants(self, loader: DataLoader[Any]) -> None:
        workers = loader.num_workers
        self.repeats = not is_stream(loader) and draws_alike(loader)
        self._drain(loader, {"change": "as_is", "value": workers, "workers": workers})
        if workers:
            self._drain(loader, {"change": "in_process", "value": 0, "workers": 0})
        # more and more workers, until that gains nothing, or loading is twice as fast as the step
        compute, best, tried, enough = Pipeline(self.facts).now.compute_s, math.inf, 1, False
        while tried <= self.budget.max_workers and not enough:
            took = self._drain(loader, {"change": "workers", "value": tried, "workers": tried, "persistent": True})
            # what the loader has is on the curve
            enough = tried >= workers and (0 < 2 * took <= compute or took > 0.95 * best)
            best, tried = min(best, took), tried * 2
        if Pipeline(self.facts).storable:
            self._drain(loader, {"change": "cache", "value": "items", "workers": workers}, self.data)
        reads = self.facts["reads"]
        if reads and reads["known"] and (unread := reads["unread"]):
            self._drain(loader, {"change": "drop", "value": unread, "workers": workers, "dropped": unread})

    def _drain(self, loader: DataLoader[Any], variant: dict[str, Any], data: Any = None) -> float:
        """Drain a variant, keep its row, and return the seconds of a batch."""
        row, indices = drain(loader, variant, data, **self.budget.slice)
        if not is_stream(loader) and data is None:
            self.order = self.order or indices
            if self.repeats:
                row["same_order"] = all(list(a) == list(b) for a, b in zip(self.order, indices, strict=False))  # P1.7
        self.facts["variants"].append(row)
        return float(row["batch_s"])

    def _try(self, loader: DataLoader[Any], change: str, value: Any) -> None:
        """The change in full, turn and turn about with what it is predicted from: the machine may be slower by now."""
        variant = next((r for r in self.facts["variants"] if r["change"] == change and r["value"] == value), None)
        data = self.data if change == "cache" else None
        before: list[dict[str, Any]] = []
        after: list[dict[str, Any]] = []
        rows: list[dict[str, Any]] = []
        changed = spec_loader(loader, variant or ({"persistent": True} if change == "persistent" else {}), data)
        with closed(self._own_loader()) as one, closed(changed) as other:
            for _ in range(ROUNDS):
                before.append(self._round(self._loop(one)))
                if variant is not None:
                    rows.append(drain(loader, variant, data, **self.budget.slice)[0])
                with stale_fetches() if change == "no_sync" else contextlib.nullcontext():
                    after.append(as_round(self._loop(other), ahead=self.facts["ahead"]))
        timed = ("batch_s", "handoff_s", "cpu_s", "items_s", "collate_s") if rows else ()
        medians = {name: float(np.median([r[name] for r in rows])) for name in timed}
        batches, alone, then = self.facts["loader"]["batches"], _each_alone(before), _each_alone(after)
        self.facts["fix"] = {
            "change": change, "value": value, "predicted_s": self._again(change, value, before, [{**rows[0], **medians}] if rows else [])[0],
            "before_s": loop_period(before, batches)[0], "after_s": loop_period(after, batches)[0],
            "rounds": [
                {
                    "before_s": loop_period([alone[k]], batches)[0], "after_s": loop_period([then[k]], batches)[0],
                    "predicted_s": self._again(change, value, [alone[k]], rows[k : k + 1]),
                }
                for k in range(ROUNDS)
            ],
        }  # fmt: skip

    def _again(self, change: str, value: Any, rounds: list[dict[str, Any]], rows: list[dict[str, Any]]) -> list[float]:
        """What a change is predicted to make of a step in these rounds: as ever, and with a step as quick as a batch at hand allows."""
        as_is = [r for r in self.facts["variants"] if r["change"] == "as_is"]
        quick = [{**one, "step_s": one["cached_s"]} for one in rounds]
        found = []
        for given in (rounds, quick):
            played = Pipeline({**self.facts, "rounds": given, "variants": [*as_is, *rows]}).predictions
            found.append(next((p.period_s for p in played if (p.change, p.value) == (change, value)), math.nan))
        return found


def _each_alone(rounds: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return rounds that each have all starts but the first, to be judged one by one."""
    starts = [s for one in rounds for s in one["starts"]]
    return [{**one, "starts": [math.nan, *(starts[1:] or starts)]} for one in rounds]
