"""`input.bound`: how much of a step waits for data, what makes it wait, and what a change of that is worth (P1.1)."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

from workbench.findings.finding import Finding
from workbench.topics.input.throughput import Pipeline, Prediction, knee


class _About(NamedTuple):
    where: str  # where the time goes, as the end of a sentence
    tries: tuple[str, ...]  # changes that answer it
    advice: tuple[tuple[str, str], ...]  # (the change that it is, text), the best first
    clause: str = "P1.1"


_STORE = ("cache", "Do what is the same in every epoch once, offline, and store the result: workbench.input.cache_dataset.")  # fmt: skip
CAUSES = {
    "sync": _About(
        ", because each step fetches a number from the device before the next batch is asked for", ("no_sync",),
        (("no_sync", "Fetch the loss every hundred steps, not every step, so that loading runs ahead of the device."),), "P1.6",
    ),
    "worker_restart": _About(
        ", because {workers} worker processes start anew in each epoch", ("persistent", "in_process"),
        (
            ("persistent", "Set persistent_workers=True: workers then stay from one epoch to the next."),
            ("in_process", "Load without workers (num_workers=0) where an epoch is shorter than they take to start."),
        ), "P1.7",
    ),
    "too_few_workers": _About(
        ": {workers} worker{are} too few for batches that take {fetch} to make{rest}", ("workers",),
        (("workers", "Raise num_workers to where throughput stops growing."),), "P1.9",
    ),
    "hand_over": _About(
        ": batches are ready, and getting them from the worker processes takes long", ("in_process",),
        (
            ("in_process", "Load without workers (num_workers=0) where making a batch takes less time than handing it over."),
            ("less", "Hand over less: drop what the step never reads, send small types (uint8 images) and convert them on the device."),
            ("", "Look at what else runs on this machine: workers that are ready wait for a processor, too."),
        ),
    ),
    "unused_features": _About(
        ": collating features that nobody reads, {part} a batch", ("drop",),
        (("drop", "Drop what the step never reads in the dataset's __getitem__, before it is collated."),), "P1.8",
    ),
    "latency": _About(
        ": latency in {reader}, {part} a batch", ("workers", "cache"),
        (
            ("workers", "Read from further processes at once (num_workers), which hides latency and takes no processor."),
            ("", "Copy the data next to the training process, or store many examples in one file."),
            ("cache", "Store the items ready-made on this machine: workbench.input.cache_dataset."),
        ), "P1.4",
    ),
    "preprocessing": _About(
        ": preprocessing in {reader}, {part} a batch", ("workers", "cache"),
        (_STORE, ("workers", "Spread it over worker processes, up to the number of processors.")), "P1.5",
    ),
    "collate": _About(
        ": collating, {part} a batch", ("workers",),
        (("", "{collate}"), ("workers", "Worker processes do the collating, too (num_workers).")),
    ),
    "mixed": _About(
        ": making a batch takes {made}, and no single part dominates: {each}", ("workers", "cache"),
        (("workers", "Make batches in worker processes (num_workers): they take over all of it."), _STORE),
    ),
    "unknown": _About("{little}", (), (("", "{unknown}"),)),
}  # fmt: skip
"""What the waiting may come from. "mixed": making a batch is most of the wait, and no part of that is; "unknown": making a batch
explains under half of the wait, or the loader cannot be taken apart."""
CHANGES = {"workers": "num_workers={}", "cache": "items stored ready-made", "drop": "unread features dropped early",
           "persistent": "persistent_workers=True", "in_process": "num_workers=0", "no_sync": "fetching no number in each step"}  # fmt: skip
_LARGE_BYTES = 1e5
"""Of a batch, from which handing it over takes longer for its size (rule of thumb: copying as much takes some tens of microseconds)."""
_GAIN = 1.05  # times as fast as before, from which a change helps (rule of thumb)
_HIDDEN_SHARE = 0.2
"""Of a step that may be left to wait with more workers, for "too few" (above it the TensorFlow profiler calls a step highly input-bound)."""
_MOST = 0.5
"""Of the recoverable time that a sync or restarts must explain, of the wait that a part of making a batch must, and of the steps that
must fetch (rule of thumb); and what a batch may take beside a step for the loader to be ready long before (twice as fast)."""
_CLOSE = 0.8  # of what the best change saves, from which one that asks for less is taken (rule of thumb)
_APART = 1.2  # times the slowest round, from which the fastest is told of, too (a fifth, a rule of thumb)


@dataclass(frozen=True, kw_only=True)
class Cause:
    """What the waiting comes from."""

    name: str  # of `CAUSES`
    parts: Mapping[str, float]  # seconds of a batch: "latency", "preprocessing", "collate", "unused_features"
    fix: Prediction | None  # the change that is predicted to answer it best; None where no change was tried that does


def find_cause(found: Pipeline) -> Cause:
    """Return the cause of waiting, whether there is much of it or not."""
    now, parts = found.now, _parts(found)
    periods: dict[str, list[float]] = {}
    for p in found.predictions:
        periods.setdefault(p.change, []).append(p.period_s)
    recoverable = max(0.0, now.period_s - now.compute_s)
    often = (found.facts.get("syncs") or {"share": 0.0})["share"] >= _MOST

    def explains(change: str) -> bool:
        return change in periods and now.period_s - periods[change][0] >= _MOST * recoverable > 0

    as_is, more = found.as_is, periods.get("workers", [math.inf])
    late = now.wait_s - now.restart_s > now.fetch_s
    if found.has_step and often and explains("no_sync"):
        name = "sync"
    elif found.has_step and explains("persistent"):
        name = "worker_restart"
    elif as_is and as_is["workers"] and (as_is["batch_s"] < _MOST * now.compute_s or late):
        name = "hand_over"
    elif found.has_step and found.workers and min(more) <= now.compute_s / (1 - _HIDDEN_SHARE):
        name = "too_few_workers"
    else:  # beside workers, whose making is hidden, it is most of the making
        made = sum(parts.values())
        wait = made if found.workers or not math.isfinite(now.wait_s) else now.wait_s
        name = max(parts, key=lambda part: parts[part]) if parts and made >= _MOST * wait else "unknown"
        if name in parts and parts[name] < _MOST * min(wait, made):
            name = "mixed"
    # without a step to hide behind, ready-made items would always be best
    changes = CAUSES[name].tries if found.has_step else CAUSES[name].tries[:1]
    saved = [(now.period_s - p.period_s, p) for change in changes for p in found.predictions if p.change == change]
    most = max((s for s, _ in saved), default=0.0)
    fix = next((p for s, p in saved if s >= _CLOSE * most), None) if most > 0 else None
    return Cause(name=name, parts=parts, fix=fix)


def _parts(found: Pipeline) -> dict[str, float]:
    fetch = found.facts.get("fetch")
    if not fetch:
        return {}
    unused = max(0.0, fetch["collate_s"] - found.tried["drop"][0]["collate_s"]) if "drop" in found.tried else 0.0
    return {
        "latency": fetch["items_blocked_s"],
        "preprocessing": max(0.0, fetch["items_s"] - fetch["items_blocked_s"] - fetch["items_queued_s"]),
        "collate": max(0.0, fetch["collate_s"] - unused - fetch.get("collate_queued_s", 0.0)),
        "unused_features": unused,
    }


def bound_finding(
    found: Pipeline, *, warn_share: float, high_share: float, least_wait_s: float, busy_limit: float
) -> Finding:
    """Return `input.bound`; the arguments are those of `diagnose_input_pipeline`, its `busy_share` being `busy_limit`."""
    now, cause, busy = found.now, find_cause(found), found.busy_share
    fix, speed = found.facts.get("fix"), found.speedups
    vain, gain = speed is not None and speed["measured"] <= _GAIN, ""
    if fix and speed is not None:
        what = CHANGES[fix["change"]].format(fix["value"])
        tried = f" Tried: {what}; it does not help," if vain else f" With {what} it is"
        gain = f"{tried} {_times(speed, 'measured')} times as fast (predicted: {_times(speed, 'predicted')})."
    evidence = {
        "cause": cause.name, "step_time": asdict(now), "parts_s": dict(cause.parts), "cold_start_s": found.facts["cold_s"],
        "fix": None if not fix else {"change": fix["change"], "value": fix["value"]} | (speed or {}),
        "predictions": [asdict(p) for p in found.predictions], "knee_workers": knee(found.tried.get("workers", [])),
        "busy_share": busy, "loader": dict(found.loader),
    }  # fmt: skip
    where, advice = _where(found, cause), _advice(found, cause, None if speed is None else not vain)
    bound = partial(Finding, code="input.bound", clause="P1.1", evidence=evidence)
    if not found.has_step:
        said = f"Not judged without a step: the loader gives a batch every {_ms(now.period_s)}{where}; it keeps up with steps that take longer.{gain}"
        return bound(status="not_measured", advice=advice, summary=said)
    share = now.wait_share
    if math.isnan(share):
        return bound(status="not_measured", summary="Not measured: no step was timed.")
    numbers: dict[str, Any] = {"value": share, "unit": "of the step", "threshold": warn_share}
    left_out = ", without what other programs took" if now.queued_s >= 0.1 * now.period_s else ""
    waits = f"{share:.0%} of a step waits for data ({_ms(now.wait_s)} of {_ms(now.own_s)}{left_out})"
    if share < warn_share or now.wait_s < least_wait_s:
        if now.hidden_s >= 0.1 * now.fetch_s and found.workers:
            waits += f"; of {_ms(now.fetch_s)} that a batch takes to make, {_ms(now.hidden_s)} are hidden behind other steps"  # fmt: skip
        return bound(status="ok", summary=f"{waits}.", **numbers)
    ready = cause.name == "hand_over" and (speed is None or speed["measured_low"] <= _GAIN)
    if ready or (fix and vain):
        if busy >= busy_limit:
            said = f"Not judged on this busy machine: {waits}{where}, and other programs have the processors for {busy:.0%} of the time that a step wants one."
            return bound(status="not_measured", summary=said)
        if ready and fix:
            return bound(status="ok", summary=f"{waits}{where}.{gain}", **numbers)
    if gain and busy >= busy_limit:
        gain += f" Other programs have the processors for {busy:.0%} of the time: without them the gain may differ."
    much = "Much" if share >= high_share else "Some"
    return bound(
        status="warn", clause=CAUSES[cause.name].clause, advice=advice,
        summary=f"{much} of the time goes to waiting: {waits}{where}.{gain}", **numbers,
    )  # fmt: skip


def _where(found: Pipeline, cause: Cause) -> str:
    loader, parts, made = found.loader, cause.parts, _ms(sum(cause.parts.values()))
    return CAUSES[cause.name].where.format(
        reader=f"{loader['dataset']}.{'__iter__' if found.stream else '__getitem__'}", part=_ms(parts.get(cause.name, 0)), made=made,
        each=", ".join(f"{part.replace('_', ' ')} {_ms(s)}" for part, s in parts.items() if s > 0),
        little=f": making a batch is only {made} of it" if parts else "", fetch=_ms(found.fetch_s),
        rest=f", most of it {max(parts, key=lambda part: parts[part])}" if parts else "",
        workers=loader.get("num_workers"), are="s are" if found.workers != 1 else " is",
    )  # fmt: skip


def _advice(found: Pipeline, cause: Cause, helped: bool | None) -> tuple[str, ...]:
    """Return what to do, what was shown to help first; what was tried and did not help, `helped` being False, is left out."""
    lines = list(CAUSES[cause.name].advice)
    if not found.storable and any(change == "cache" for change, _ in lines):
        lines = [line for line in lines if line[0] != "cache"]
        if not found.stream:
            random = "Items differ from one reading to the next and cannot be stored as they are: store what comes before what is random."
            lines.append(("", random))
    tried = None if helped is None else found.facts["fix"]["change"]
    small = sum(found.facts["batch_bytes"].values()) < _LARGE_BYTES
    lines = [line for line in lines if not (line[0] == "less" and small) and not (helped is False and line[0] == tried)]
    lines.sort(key=lambda line: line[0] != tried)  # stable: the rest stays in order
    how = found.loader.get("collate", "default")
    collate = "Let the dataset return whole batches (__getitems__): torch's own collate function stacks item by item."
    if how != "default":
        collate = f"Look into {how}: make the batch in one call, stack arrays instead of looping over examples, and leave the rest to the dataset or the device."
    unknown = "Look at the sampler, and profile next(iter(loader)) by hand: items and collating are less than half of the wait."
    if found.loader.get("dataset") is None:
        unknown = "Load through a torch DataLoader to have its parts told apart, or profile one batch by hand."
    said = [text.format(collate=collate, unknown=unknown) for _, text in lines]
    if any(change == "workers" for change, _ in lines) and found.stream and not found.shares_out:
        shared = "This stream is not shared out so far"
        if found.shares_out is None:
            shared = "Whether this stream is shared out could not be counted in the time there was"
        said.insert(0, "With more than one worker let each read its own part (torch.utils.data.get_worker_info), or each example comes "
                    f"once from every worker. {shared}, so no gain from more workers is predicted.")  # fmt: skip
    return tuple(said) or (
        "Profile one batch by hand, and look at what else runs on this machine: what was tried did not help.",
    )


def _times(speed: Mapping[str, float], name: str) -> str:
    """Return a speed-up, with those of single rounds where they are wide apart."""
    low, high = speed[f"{name}_low"], speed[f"{name}_high"]
    return f"{speed[name]:.2g}" + (f" [{low:.2g} to {high:.2g}]" if high > _APART * low else "")


def _ms(seconds: float) -> str:
    if math.isnan(seconds):
        return "an unknown time"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
