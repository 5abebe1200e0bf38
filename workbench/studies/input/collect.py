"""`audit_input`: where the time of a step goes, for a person's own loader and step (P1.1 to P1.9).

Short ablations say what the loading is made of; the change that they point to is then tried in full, turn and turn about with
the loader as it is, because other programs on the machine slow down both alike.
"""

from __future__ import annotations

import math
import os
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from workbench.diagnostics.input_cause import find_cause
from workbench.diagnostics.input_model import loop_period, step_time
from workbench.errors import DataError
from workbench.studies.data.order import untouched
from workbench.studies.input.leaves import leaf_bytes, leaves
from workbench.studies.input.loaders import closed, is_stream
from workbench.studies.input.loop import Device, Loop, Step, run_cached, run_loop
from workbench.studies.input.reads import observe_reads
from workbench.studies.input.syncs import StaleFetches, count_syncs
from workbench.studies.input.variants import cached_items, drain, null_transform, spec_loader
from workbench.train.rng import isolated_rng

__all__ = ["Budget", "Stepping", "collect_input"]

ROUNDS = 3
"""Of the loader as it is, of a cached batch, and of the change: medians are taken over them (rule of thumb)."""
SLICES = 20
"""Parts that the budget is cut into; about so many pieces are timed."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How long to look.

    Attributes:
        seconds: in all, about; a loader that is slow takes longer.
        timeout_s: for a batch.
        max_workers: to try.
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
    """The step and how to watch it.

    Attributes:
        kind: "none", "seconds", "function" or "workload".
        step: called with every batch; None does nothing.
        device: that it runs on.
        read: what reads a batch, where that is not the step itself; called with what `prepare` returns.
        prepare: done to a batch before it is read.
    """

    kind: str
    step: Step | None
    device: Device
    read: Step | None = None
    prepare: Step | None = None


def collect_input(loader: Any, stepping: Stepping, budget: Budget) -> dict[str, Any]:
    """Return JSON facts for `diagnose_input_pipeline`; random state and the loader's are left as they were.

    Args:
        loader: a `DataLoader`, or whatever gives batches when it is iterated over.
        stepping: what is done with them.
        budget: how long to look.

    Raises:
        DataError: the loader gives nothing, an item raised, or no batch came in time.
    """
    own = loader if isinstance(loader, DataLoader) else None
    with untouched(own) if own is not None else isolated_rng():
        return _Audit(loader, own, stepping, budget).run()


class _Audit:
    def __init__(self, loader: Any, own: DataLoader[Any] | None, stepping: Stepping, budget: Budget) -> None:
        self.loader, self.own, self.stepping, self.budget = loader, own, stepping, budget
        self.kept: list[Any] = []
        self.facts: dict[str, Any] = {}

    def run(self) -> dict[str, Any]:
        """Measure, ask for the cause, and try its answer."""
        described = describe(self.loader, self.own)
        self.facts |= {"step": self.stepping.kind, "ahead": self.stepping.device.ahead, "loader": described}
        self.facts |= {"cores": _cores(), "asked": asdict(self.budget), "variants": [], "syncs": None, "reads": None}
        self._as_it_is()
        if self.own is not None:
            self._parts(self.own)
        if self.stepping.step is not None and self.stepping.kind != "seconds":
            self._watch()
        if self.own is not None:
            self._variants(self.own)
        cause = find_cause(self.facts)
        bound = self.stepping.step is None or step_time(self.facts).wait_share >= self.budget.worth
        self.facts["fix"] = None
        if self.own is not None and cause.fix is not None and bound:
            self._try(self.own, cause.fix.change, cause.fix.value, cause.fix.period_s)
        return self.facts

    def _as_it_is(self) -> None:
        """Rounds of the loop as it is, each beside the same step on batches that are there already."""
        loops: list[Loop] = []
        rounds: list[dict[str, Any]] = []
        with closed(self._own_loader()) as timed:
            for _ in range(ROUNDS):
                loops.append(self._loop(timed, keep=self.kept if not loops else None))
                if not len(loops[0]):
                    raise DataError(_nothing(self.loader, self.own))
                del self.kept[4:]
                rounds.append(as_round(loops[-1]) | self._cached())
        self.facts |= {"rounds": rounds, "cold_s": loops[0].wait_s[0]}
        fetched = [pair for loop in loops for pair in loop.fetched[1 if len(loop.fetched) > 1 else 0 :]]
        self.facts["fetch"] = _fetch(fetched)
        ended = [count for loop in loops for count in loop.ended]
        self.facts["length"] = {"claimed": self.facts["loader"]["batches"], "yielded": ended[0] if ended else None}
        if self.facts["loader"]["batches"] is None and ended:
            self.facts["loader"]["batches"] = ended[0]
        if loops[0].indices:
            self.facts["loader"]["examples_per_batch"] = float(np.mean([len(i) for i in loops[0].indices]))

    def _own_loader(self) -> Any:
        return self.loader if self.own is None else spec_loader(self.own, {}, None)

    def _loop(self, loader: Any, *, keep: list[Any] | None = None) -> Loop:
        return run_loop(
            loader, self.stepping.step, self.stepping.device, seconds=self.budget.slice_s, least=4, most=400,
            timeout_s=self.budget.timeout_s, keep=keep,
        )  # fmt: skip

    def _cached(self) -> dict[str, float]:
        if self.stepping.step is None:
            return {"cached_s": 0.0, "cached_cpu_s": 0.0}
        spent = run_cached(
            self.kept, self.stepping.step, self.stepping.device, seconds=self.budget.slice_s, least=4, most=400
        )
        return {"cached_s": spent.wall_s, "cached_cpu_s": spent.cpu_s}

    def _watch(self) -> None:
        """What the step reads of a batch, and where it fetches numbers from the device."""
        step = self.stepping.step
        assert step is not None
        self.facts["reads"] = observe_reads(self.kept[0], self.stepping.read or step, prepare=self.stepping.prepare)
        self.facts["syncs"] = count_syncs(self.kept, step)

    def _parts(self, loader: DataLoader[Any]) -> None:
        self.data = cached_items(loader, seconds=self.budget.slice_s)
        first = self.data.items[0] if self.data.items else None
        sizes = {path: leaf_bytes(leaf) for path, leaf in leaves(first)}
        self.facts["item_bytes"] = sizes

    def _variants(self, loader: DataLoader[Any]) -> None:
        workers = loader.num_workers
        self._drain(loader, {"change": "as_is", "value": workers, "workers": workers})
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
            if 0 < 2 * row["batch_s"] <= compute or row["batch_s"] > 0.95 * best:
                return
            best, tried = row["batch_s"], tried * 2

    def _drain(self, loader: DataLoader[Any], variant: dict[str, Any], data: Any = None) -> dict[str, Any]:
        row = drain(loader, variant, data, seconds=self.budget.slice_s, timeout_s=self.budget.timeout_s)
        indices = row.pop("indices")
        if not is_stream(loader) and data is None and indices:
            row["same_order"] = self._same_order(loader, indices)
        self.facts["variants"].append(row)
        return row

    def _same_order(self, loader: DataLoader[Any], indices: list[Any]) -> bool:
        """Tell whether batches came as the sampler drew them (P1.7)."""
        with untouched(loader):
            drawn = iter(loader.batch_sampler if loader.batch_sampler is not None else loader.sampler)
            wanted = [list(b) if isinstance(b, (list, tuple)) else [b] for _, b in zip(indices, drawn, strict=False)]
        return all(list(got) == want for got, want in zip(indices, wanted, strict=False))

    def _try(self, loader: DataLoader[Any], change: str, value: Any, predicted_s: float) -> None:
        """The change in full, turn and turn about with the loader as it is."""
        variant = next((r for r in self.facts["variants"] if r["change"] == change and r["value"] == value), {})
        if change == "persistent":
            variant = {"persistent": True}
        data = self.data if change == "cache" else None
        before: list[dict[str, Any]] = []
        after: list[dict[str, Any]] = []
        with closed(self._own_loader()) as one, closed(spec_loader(loader, variant, data)) as other:
            for _ in range(ROUNDS):
                before.append(as_round(self._loop(one)))
                if change == "no_sync":
                    with StaleFetches():
                        after.append(as_round(self._loop(other)))
                else:
                    after.append(as_round(self._loop(other)))
        batches = self.facts["loader"]["batches"]
        self.facts["fix"] = {
            "change": change, "value": value, "predicted_s": predicted_s, "now_s": step_time(self.facts).period_s,
            "before_s": loop_period(before, batches)[0], "after_s": loop_period(after, batches)[0],
            "before": before, "after": after,
        }  # fmt: skip


def describe(loader: Any, own: DataLoader[Any] | None) -> dict[str, Any]:
    """Return the settings of a loader that matter for its speed."""
    if own is None:
        return {"type": type(loader).__name__, "dataset": None, "num_workers": None, "batches": None}
    return {
        "type": type(own).__name__, "dataset": type(own.dataset).__name__, "stream": is_stream(own),
        "batch_size": own.batch_size, "num_workers": own.num_workers, "prefetch_factor": own.prefetch_factor,
        "persistent_workers": own.persistent_workers, "pin_memory": own.pin_memory, "batches": _batches(own),
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


def as_round(loop: Loop) -> dict[str, Any]:
    """Return what one round of a loop showed, as JSON values."""
    waits, steps, first = np.array(loop.wait_s), np.array(loop.step_s), np.array(loop.first, dtype=bool)
    inner = loop.total_s - float((waits + steps)[first].sum())
    return {
        "steps": len(loop),
        "steady_s": inner / int((~first).sum()) if (~first).any() else math.nan,
        "wait_s": loop.steady_wait_s,
        "step_s": float(steps.mean()) if len(steps) else math.nan,
        "starts": waits[first].tolist(),
    }


def _fetch(fetched: list[Any]) -> dict[str, float] | None:
    if not fetched:
        return None
    items, collate = ([pair[k] for pair in fetched] for k in (0, 1))
    return {
        "items_s": float(np.mean([s.wall_s for s in items])),
        "items_blocked_s": float(np.mean([s.blocked_s for s in items])),
        "items_queued_s": float(np.mean([s.queued_s for s in items])),
        "collate_s": float(np.mean([s.wall_s for s in collate])),
        "cpu_s": float(np.mean([a.cpu_s + b.cpu_s for a, b in zip(items, collate, strict=True)])),
    }


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _nothing(loader: Any, own: DataLoader[Any] | None) -> str:
    if own is None:
        return f"the loader ({type(loader).__name__}) gives no batch: an iterator that is used up, or an empty source."
    claimed = f", which says it has {_length(own.dataset)} examples," if _length(own.dataset) is not None else ""
    return (
        f"the loader gives no batch: its dataset {type(own.dataset).__name__}{claimed} yields none, its sampler is empty, or "
        f"drop_last drops the only batch (batch_size={own.batch_size}, drop_last={own.drop_last})."
    )


def _length(data: Any) -> int | None:
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None
