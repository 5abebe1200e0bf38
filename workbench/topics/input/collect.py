"""`audit_input`: where the time of a step goes, for a person's own loader and step (P1.1 to P1.9).

Short ablations say what the loading is made of; the change that they point to is then tried in full, turn and turn about with
the loader as it is, because other programs on the machine slow down both alike.
"""

from __future__ import annotations

import contextlib
import math
import os
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, default_collate, default_convert

from workbench.errors import DataError
from workbench.topics.data.order import untouched
from workbench.topics.input.loaders import Spent, closed, is_stream, reads_all, torch_loader
from workbench.topics.input.loop import Device, Loop, Step, as_round, fetch_parts, run_cached, run_loop
from workbench.topics.input.model import find_cause, loop_period, predictions, step_time
from workbench.topics.input.variants import (
    cached_items,
    dataset_length,
    drain,
    draws_alike,
    items_repeat,
    null_transform,
    spec_loader,
    stream_epochs,
    worker_draws,
)  # fmt: skip
from workbench.topics.input.watch import StaleFetches, count_syncs, observe_reads
from workbench.train.rng import isolated_rng
from workbench.workloads.items import IndexedDataset, leaf_bytes, leaves

ROUNDS = 3
"""Of the loader as it is, of a cached batch, and of the change: medians are taken over them (rule of thumb)."""
_SECONDS = ("batch_s", "handoff_s", "cpu_s", "items_s", "collate_s")
SLICES = 26
"""Parts that the budget is cut into; about so many pieces are timed."""


def describe(loader: Any, own: DataLoader[Any] | None) -> dict[str, Any]:
    """Return the settings of a loader that matter for its speed."""
    if own is None:
        return {"type": type(loader).__name__, "dataset": None, "num_workers": None, "batches": None, "examples": None}
    return {
        "type": type(own).__name__, "dataset": type(own.dataset).__name__, "stream": is_stream(own),
        "batch_size": own.batch_size, "sampler": type(own.sampler if own.batch_size is not None or own.batch_sampler is None else own.batch_sampler).__name__,
        "num_workers": own.num_workers, "prefetch_factor": own.prefetch_factor,
        "collate": "default" if own.collate_fn is default_collate or own.collate_fn is default_convert else getattr(own.collate_fn, "__name__", type(own.collate_fn).__name__),
        "persistent_workers": own.persistent_workers, "pin_memory": own.pin_memory, "batches": _batches(own), "examples": dataset_length(own.dataset), "drop_last": own.drop_last,
    }  # fmt: skip


def _batches(loader: DataLoader[Any]) -> int | None:
    """Return how many batches an epoch should have, without asking the loader, which would hold a stream to it."""
    try:
        if is_stream(loader):
            full, rest = divmod(len(loader.dataset), loader.batch_size or 1)  # type: ignore[arg-type]
            return full + (rest > 0 and not loader.drop_last)
        return len(loader.sampler if loader.batch_sampler is None else loader.batch_sampler)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None


def cores() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def no_batch(loader: Any, own: DataLoader[Any] | None) -> str:
    """Return what to say of a loader that gives nothing."""
    if own is None:
        return f"the loader ({type(loader).__name__}) gives no batch: an iterator that is used up, or an empty source."
    if dataset_length(own.dataset) == 0:
        return f"the loader gives no batch: its dataset {type(own.dataset).__name__} has 0 examples."
    length = dataset_length(own.dataset)
    claimed = "" if length is None else f", which says it has {length} examples,"
    return (
        f"the loader gives no batch: its dataset {type(own.dataset).__name__}{claimed} yields none, its sampler is empty, or "
        f"drop_last drops the only batch (batch_size={own.batch_size}, drop_last={own.drop_last})."
    )


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How long to look: about `seconds` in all, `timeout_s` for a batch, at most `max_workers` worker processes.

    Attributes:
        worth: the share of waiting from which a change is tried in full.
    """

    seconds: float
    timeout_s: float
    max_workers: int
    worth: float = 0.1

    @property
    def slice_s(self) -> float:
        """Seconds of one piece."""
        return self.seconds / SLICES


@dataclass(frozen=True, kw_only=True)
class Stepping:
    """The step and how to watch it."""

    kind: str  # "none", "seconds", "function" or "workload"
    step: Step | None  # called with every batch; None does nothing
    device: Device  # that it runs on
    # what reads a batch, where that is not the step itself; called with what `prepare` returns
    read: Step | None = None
    prepare: Step | None = None  # done to a batch before it is read


def collect_input(loader: Any, stepping: Stepping, budget: Budget) -> dict[str, Any]:
    """Return JSON facts for `diagnose_input_pipeline`; random state and the loader's are left as they were.

    Raises:
        DataError: the loader gives nothing, an item raised, or no batch came in time.
    """
    with untouched(loader) if isinstance(loader, DataLoader) else isolated_rng():
        return _Audit(loader, torch_loader(loader), stepping, budget).run()


class _Audit:
    def __init__(self, loader: Any, own: DataLoader[Any] | None, stepping: Stepping, budget: Budget) -> None:
        self.loader, self.own, self.stepping, self.budget = loader, own, stepping, budget
        self.kept: list[Any] = []
        self.order: list[Any] = []
        self.repeats = False
        self.facts: dict[str, Any] = {}

    def run(self) -> dict[str, Any]:
        """Measure, ask for the cause, and try its answer."""
        described = describe(self.loader, self.own)
        self.facts |= {"step": self.stepping.kind, "ahead": self.stepping.device.ahead, "loader": described}
        self.facts |= {"cores": cores(), "asked": asdict(self.budget), "variants": [], "syncs": None, "reads": None}
        self._as_it_is()
        if self.own is not None:
            self._parts(self.own)
        if self.stepping.step is not None and self.stepping.kind != "seconds":
            self._watch()
        if self.own is not None:
            self._variants(self.own)
            self._workers(self.own)
        cause = find_cause(self.facts)
        bound = self.stepping.step is None or step_time(self.facts).wait_share >= self.budget.worth
        self.facts["fix"] = None
        if self.own is not None and cause.fix is not None and bound:
            self._try(self.own, cause.fix.change, cause.fix.value)
        return self.facts

    def _as_it_is(self) -> None:
        """Rounds of the loop as it is, each beside the same step on batches that are there already."""
        loops: list[Loop] = []
        rounds: list[dict[str, Any]] = []
        with closed(self._own_loader()) as timed:
            for _ in range(ROUNDS):
                loops.append(self._loop(timed, keep=self.kept if not loops else None))
                if not len(loops[0]):
                    raise DataError(no_batch(self.loader, self.own))
                rounds.append(self._round(loops[-1]))
        self.facts |= {"rounds": rounds, "cold_s": loops[0].wait_s[0]}
        fetched = [pair for loop in loops for pair in loop.fetched[1 if len(loop.fetched) > 1 else 0 :]]
        self.facts["fetch"] = fetch_parts(fetched)
        self.facts["batch_bytes"] = {path: leaf_bytes(leaf) for path, leaf in leaves(self.kept[0])}
        described = self.facts["loader"]
        if loops[0].indices:
            described["examples_per_batch"] = float(np.mean([len(i) for i in loops[0].indices]))
        batches, examples = next((ended for loop in loops for ended in loop.ended), (None, None))
        claimed, counted = described.pop("examples"), described["batches"]
        if self.own is None or is_stream(self.own):
            self.facts["length"] = {"of": "examples", "claimed": claimed, "yielded": examples}
        else:  # the sampler says how long an epoch is, and may leave examples out or repeat some
            self.facts["length"] = {"of": "batches", "claimed": counted, "yielded": batches}
        if counted is None and batches is not None:
            described["batches"] = max(1, batches)

    def _own_loader(self) -> Any:
        return self.loader if self.own is None else spec_loader(self.own, {}, None)

    def _loop(self, loader: Any, *, keep: list[Any] | None = None) -> Loop:
        return run_loop(
            loader, self.stepping.step, self.stepping.device, seconds=self.budget.slice_s, least=4, most=400,
            timeout_s=self.budget.timeout_s, keep=keep,
        )  # fmt: skip

    def _round(self, loop: Loop) -> dict[str, Any]:
        """Return what a loop showed, beside the same step on batches that are there already."""
        step, device = self.stepping.step, self.stepping.device
        spent = Spent(0.0, 0.0, 0.0)
        if step is not None:
            spent = run_cached(self.kept, step, device, seconds=self.budget.slice_s, least=4, most=400)
        cached = {"cached_s": spent.wall_s, "cached_cpu_s": spent.cpu_s, "cached_queued_s": spent.queued_s}
        return as_round(loop, ahead=device.ahead) | cached

    def _watch(self) -> None:
        """What the step reads of a batch, and where it fetches numbers from the device."""
        step = self.stepping.step
        assert step is not None
        self.facts["reads"] = observe_reads(self.kept[0], self.stepping.read or step, prepare=self.stepping.prepare)
        self.facts["syncs"] = count_syncs(self.kept, step)

    def _parts(self, loader: DataLoader[Any]) -> None:
        if reads_all(loader) and len(loader.dataset):  # type: ignore[arg-type]
            IndexedDataset(loader.dataset, split=None)[len(loader.dataset) - 1]  # type: ignore[arg-type]  # a length that is too long ends in an error
        self.data = cached_items(loader, seconds=self.budget.slice_s)
        self.facts["items_repeat"] = items_repeat(loader.dataset, self.data, seconds=self.budget.slice_s)
        self.facts["item_bytes"] = {path: leaf_bytes(leaf) for path, leaf in leaves(self.data.items[0])}

    def _workers(self, loader: DataLoader[Any]) -> None:
        """What worker processes change besides speed."""
        seconds, timeout_s = self.budget.seconds, self.budget.timeout_s
        item_s = self.facts["fetch"]["items_s"] / max(1.0, self.facts["loader"]["examples_per_batch"])
        drawn = [index for batch in self.order for index in batch]
        self.facts["draws"] = worker_draws(loader, drawn, item_s=item_s, seconds=seconds, timeout_s=timeout_s)
        tried = self.budget.max_workers > 0
        self.facts["epochs"] = (
            stream_epochs(loader, seconds=max(1.0, seconds / 8), timeout_s=timeout_s) if tried else None
        )

    def _variants(self, loader: DataLoader[Any]) -> None:
        workers = loader.num_workers
        self.repeats = not is_stream(loader) and draws_alike(loader)
        self._drain(loader, {"change": "as_is", "value": workers, "workers": workers})
        if workers:
            self._drain(loader, {"change": "in_process", "value": 0, "workers": 0})
        plain, names = null_transform(loader.dataset)
        self.facts["loader"]["transforms"] = names
        if names:
            self._drain(loader, {"change": "null_transform", "value": names, "workers": 0}, plain)
        self._sweep(loader)
        self._drain(loader, {"change": "cache", "value": "items", "workers": workers}, self.data)
        reads = self.facts["reads"]
        if reads and reads["known"] and reads["unread"]:
            self._drain(
                loader, {"change": "drop", "value": reads["unread"], "workers": workers, "dropped": reads["unread"]}
            )

    def _sweep(self, loader: DataLoader[Any]) -> None:
        """More and more workers, until that gains nothing, or loading is twice as fast as the step."""
        compute, best = step_time(self.facts).compute_s, math.inf
        tried = 1
        while tried <= self.budget.max_workers:
            row = self._drain(loader, {"change": "workers", "value": tried, "workers": tried, "persistent": True})
            enough = 0 < 2 * row["batch_s"] <= compute or row["batch_s"] > 0.95 * best
            if enough and tried >= loader.num_workers:  # what the loader has is on the curve
                return
            best, tried = min(best, row["batch_s"]), tried * 2

    def _drain(self, loader: DataLoader[Any], variant: dict[str, Any], data: Any = None) -> dict[str, Any]:
        row = self._drained(loader, variant, data)
        indices = row.pop("indices")
        if not is_stream(loader) and data is None:
            self.order = self.order or indices
            if self.repeats:
                row["same_order"] = all(list(a) == list(b) for a, b in zip(self.order, indices, strict=False))  # P1.7
        self.facts["variants"].append(row)
        return row

    def _drained(self, loader: DataLoader[Any], variant: dict[str, Any], data: Any) -> dict[str, Any]:
        return drain(loader, variant, data, seconds=self.budget.slice_s, timeout_s=self.budget.timeout_s)

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
                    rows.append(self._drained(loader, variant, data))
                with StaleFetches() if change == "no_sync" else contextlib.nullcontext():
                    after.append(as_round(self._loop(other), ahead=self.stepping.device.ahead))
        row = [{**rows[0], **{k: float(np.median([r[k] for r in rows])) for k in _SECONDS}}] if rows else []
        batches = self.facts["loader"]["batches"]
        starts = [s for one in before for s in one["starts"]]
        alone = [{**one, "starts": [math.nan, *(starts[1:] or starts)]} for one in before]  # the first is left out
        each = [self._again(change, value, [one], rows[k : k + 1]) for k, one in enumerate(alone)]
        starts = [s for one in after for s in one["starts"]]
        then = [{**one, "starts": [math.nan, *(starts[1:] or starts)]} for one in after]
        periods, changed_s = ([loop_period([one], batches)[0] for one in found] for found in (alone, then))
        self.facts["fix"] = {
            "change": change, "value": value, "predicted_s": self._again(change, value, before, row)[0],
            "before_s": loop_period(before, batches)[0], "after_s": loop_period(after, batches)[0],
            "rounds": [{"before_s": b, "predicted_s": list(p), "after_s": a} for b, p, a in zip(periods, each, changed_s, strict=True)],
            "before": before, "after": after,
        }  # fmt: skip

    def _again(
        self, change: str, value: Any, rounds: list[dict[str, Any]], rows: list[dict[str, Any]]
    ) -> tuple[float, float]:
        """What a change is predicted to make of a step in these rounds: as ever, and with a step as quick as a batch at hand allows."""
        as_is = [r for r in self.facts["variants"] if r["change"] == "as_is"]
        facts = {**self.facts, "rounds": rounds, "variants": [*as_is, *rows]}
        quick = {**facts, "rounds": [{**one, "step_s": one["cached_s"]} for one in rounds]}
        found = [[p.period_s for p in predictions(f) if (p.change, p.value) == (change, value)] for f in (facts, quick)]
        return (found[0] or [math.nan])[0], (found[1] or [math.nan])[0]
