"""`input.bound`: how much of a step waits for data, what makes it wait, and what a change of that is worth (P1.1)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

from workbench.findings.finding import Finding
from workbench.topics.input.model import (
    Cause,
    busy_share,
    find_cause,
    fix_speedups,
    knee,
    predictions,
    shares_out,
    step_time,
    storable,
)

_WORKERS, _CACHE = "workers", "cache"
_STORE = (
    _CACHE,
    "Do what is the same in every epoch once, offline, and store the result: workbench.input.cache_dataset.",
)
_SPREAD = (_WORKERS, "Spread it over worker processes, up to the number of processors.")
_KEEP = (_CACHE, "Store the items ready-made on this machine: workbench.input.cache_dataset.")
_COPY = ("", "Copy the data next to the training process, or store many examples in one file.")
_HIDE = (
    _WORKERS,
    "Read from further processes at once (num_workers), which hides latency and takes no processor.",
)
_NEXT: Mapping[str, tuple[tuple[str, str], ...]] = {
    "latency": (_HIDE, _COPY, _KEEP),
    "preprocessing": (_STORE, _SPREAD),
    "collate": (("", "{collate}"), (_WORKERS, "Worker processes do the collating, too (num_workers).")),
    "mixed": ((_WORKERS, "Make batches in worker processes (num_workers): they take over all of it."), _STORE),
    "sync": (("no_sync", "Fetch the loss every hundred steps, not every step, so that loading runs ahead of the device."),),
    "worker_restart": (
        ("persistent", "Set persistent_workers=True: workers then stay from one epoch to the next."),
        ("in_process", "Load without workers (num_workers=0) where an epoch is shorter than they take to start."),
    ),
    "too_few_workers": ((_WORKERS, "Raise num_workers to where throughput stops growing."),),
    "hand_over": (
        ("in_process", "Load without workers (num_workers=0) where making a batch takes less time than handing it over."),
        ("less", "Hand over less: drop what the step never reads, send small types (uint8 images) and convert them on the device."),
        ("", "Look at what else runs on this machine: workers that are ready wait for a processor, too."),
    ),
    "unused_features": (("drop", "Drop what the step never reads in the dataset's __getitem__, before it is collated."),),
    "unknown": (("", "{unknown}"),),
}  # fmt: skip
_LARGE_BYTES = 1e5
"""Of a batch, from which handing it over takes longer for its size (rule of thumb: copying as much takes some tens of microseconds)."""
_DEFAULT_COLLATE = (
    "Let the dataset return whole batches (__getitems__): torch's own collate function stacks item by item."
)
_OWN_COLLATE = (
    "Look into {}: make the batch in one call, stack arrays instead of looping over examples, and leave the rest to the "
    "dataset or the device."
)
_UNTAKEN = "Load through a torch DataLoader to have its parts told apart, or profile one batch by hand."
_ELSEWHERE = (
    "Look at the sampler, and profile next(iter(loader)) by hand: items and collating are less than half of the wait."
)
_SHARE = (
    "With more than one worker let each read its own part (torch.utils.data.get_worker_info), or each example comes once from "
    "every worker. {}"
)
_NOT_SHARED = "This stream is not shared out so far, so no gain is said of more workers."
_NOT_COUNTED = (
    "Whether this stream is shared out could not be counted in the time there was, so no gain is said of more workers."
)
_RANDOM = "Items differ from one reading to the next and cannot be stored as they are: store what comes before what is random."
_DO_OTHERWISE = "Profile one batch by hand, and look at what else runs on this machine: what was tried did not help."


_CLAUSES = {
    "latency": "P1.4", "preprocessing": "P1.5", "sync": "P1.6", "worker_restart": "P1.7", "unused_features": "P1.8", "too_few_workers": "P1.9",
}  # fmt: skip
_GAIN = 1.05
"""Times as fast as before, from which a change helps (rule of thumb)."""
_CHANGES = {"workers": "num_workers={}", "cache": "items stored ready-made", "drop": "unread features dropped early",
            "persistent": "persistent_workers=True", "in_process": "num_workers=0", "no_sync": "fetching no number in each step"}  # fmt: skip


def _next_steps(facts: Mapping[str, Any], cause: Cause, *, helped: bool | None) -> tuple[str, ...]:
    """Return what to do, what was shown to help first; what was tried and did not help, `helped` being False, is left out."""
    lines = list(_NEXT[cause.name])
    if not storable(facts) and any(change == _CACHE for change, _ in lines):
        lines = [line for line in lines if line[0] != _CACHE]
        if not facts["loader"].get("stream"):
            lines.append(("", _RANDOM))
    if sum(facts["batch_bytes"].values()) < _LARGE_BYTES:
        lines = [line for line in lines if line[0] != "less"]
    tried = None if helped is None else facts["fix"]["change"]
    if helped is False:
        lines = [line for line in lines if line[0] != tried]
    lines.sort(key=lambda line: line[0] != tried)  # stable: the rest stays in order
    collate = facts["loader"].get("collate", "default")
    how = _DEFAULT_COLLATE if collate == "default" else _OWN_COLLATE.format(collate)
    unknown = _UNTAKEN if facts["loader"].get("dataset") is None else _ELSEWHERE
    said = [text.format(collate=how, unknown=unknown) for _, text in lines]
    if any(change == _WORKERS for change, _ in lines) and facts["loader"].get("stream") and not shares_out(facts):
        said.insert(0, _SHARE.format(_NOT_COUNTED if shares_out(facts) is None else _NOT_SHARED))
    return tuple(said) or (_DO_OTHERWISE,)


def bound_finding(
    facts: Mapping[str, Any], *, warn_share: float, high_share: float, least_wait_s: float, busy_limit: float
) -> Finding:
    """Return `input.bound`; the arguments are those of `diagnose_input_pipeline`, its `busy_share` being `busy_limit`."""
    now, cause = step_time(facts), find_cause(facts)
    fix = facts.get("fix")
    evidence = {
        "cause": cause.name,
        "step_time": asdict(now),
        "parts_s": dict(cause.parts),
        "cold_start_s": facts["cold_s"],
        "fix": None if not fix else {"change": fix["change"], "value": fix["value"]} | (fix_speedups(facts) or {}),
        "predictions": [asdict(p) for p in predictions(facts)],
        "knee_workers": knee([r for r in facts.get("variants", ()) if r["change"] == "workers"]),
        "busy_share": busy_share(facts),
        "loader": dict(facts["loader"]),
    }
    where = _where(facts, cause)
    gain = _gain(facts)
    advice = _next_steps(facts, cause, helped=_gains(facts) if fix_speedups(facts) else None)
    bound = partial(Finding, code="input.bound", clause="P1.1", evidence=evidence)
    if facts["step"] == "none":
        return bound(
            status="not_measured", advice=advice,
            summary=f"Not judged without a step: the loader gives a batch every {_ms(now.period_s)}{where}; it keeps up with "
            f"steps that take longer.{gain}",
        )  # fmt: skip
    share = now.wait_share
    if math.isnan(share):
        return bound(status="not_measured", summary="Not measured: no step was timed.")
    numbers: dict[str, Any] = {"value": share, "unit": "of the step", "threshold": warn_share}
    left_out = ", what other programs took left out" if now.queued_s >= 0.1 * now.period_s else ""
    waits = f"{share:.0%} of a step waits for data ({_ms(now.wait_s)} of {_ms(now.own_s)}{left_out})"
    if share < warn_share or now.wait_s < least_wait_s:
        hidden = ""
        if now.hidden_s >= 0.1 * now.fetch_s and facts["loader"].get("num_workers"):
            hidden = (
                f"; of {_ms(now.fetch_s)} that a batch takes to make, {_ms(now.hidden_s)} are hidden behind other steps"
            )
        return bound(status="ok", summary=f"{waits}{hidden}.", **numbers)
    busy = busy_share(facts)
    ready = cause.name == "hand_over" and not _gains(facts, in_each_round=True)
    if ready or (facts.get("fix") and not _gains(facts)):
        if busy >= busy_limit:
            return bound(
                status="not_measured",
                summary=f"Not judged on this busy machine: {waits}{where}, and other programs have the processors for {busy:.0%} of "
                "the time that a step wants one.",
            )  # fmt: skip
        if ready and facts.get("fix"):
            return bound(status="ok", summary=f"{waits}{where}.{gain}", **numbers)
    much = "Much" if share >= high_share else "Some"
    if gain and busy >= busy_limit:
        gain += f" Other programs have the processors for {busy:.0%} of the time: without them it may be another gain."
    return bound(
        status="warn", clause=_CLAUSES.get(cause.name, "P1.1"),
        summary=f"{much} of the time goes to waiting: {waits}{where}.{gain}", advice=advice, **numbers,
    )  # fmt: skip


def _where(facts: Mapping[str, Any], cause: Cause) -> str:
    """Return where the time goes, as the end of a sentence."""
    loader, parts = facts["loader"], cause.parts
    reader = f"{loader['dataset']}.__getitem__" if not loader.get("stream") else f"{loader['dataset']}.__iter__"
    rest = f", most of it {max(parts, key=lambda part: parts[part])}" if parts else ""
    workers = loader.get("num_workers")
    return {
        "latency": f": latency in {reader}, {_ms(parts.get('latency', 0))} a batch",
        "preprocessing": f": preprocessing in {reader}, {_ms(parts.get('preprocessing', 0))} a batch",
        "collate": f": collating, {_ms(parts.get('collate', 0))} a batch",
        "unused_features": f": collating features that nobody reads, {_ms(parts.get('unused_features', 0))} a batch",
        "mixed": f": making a batch takes {_ms(sum(parts.values()))}, and no part of it is most: "
        + ", ".join(f"{part.replace('_', ' ')} {_ms(s)}" for part, s in parts.items() if s > 0),
        "unknown": f": making a batch is only {_ms(sum(parts.values()))} of it" if parts else "",
        "sync": ", because each step fetches a number from the device before the next batch is asked for",
        "worker_restart": f", because {workers} worker processes start anew in each epoch",
        "hand_over": ": batches are ready, and getting them from the worker processes takes long",
        "too_few_workers": f": {workers} worker{'s are' if workers != 1 else ' is'} too few for batches that take "
        f"{_ms(step_time(facts).fetch_s)} to make{rest}",
    }.get(cause.name, "")


def _gains(facts: Mapping[str, Any], *, in_each_round: bool = False) -> bool:
    speed = fix_speedups(facts)
    return speed is not None and not speed["measured_low" if in_each_round else "measured"] <= _GAIN


def _gain(facts: Mapping[str, Any]) -> str:
    fix, speed = facts.get("fix"), fix_speedups(facts)
    if not fix or speed is None:
        return ""
    what = _CHANGES[fix["change"]].format(fix["value"])
    measured, predicted = _times(speed, "measured"), _times(speed, "predicted")
    if not _gains(facts):
        return f" Tried: {what}; it does not help, {measured} times as fast (predicted: {predicted})."
    return f" With {what} it is {measured} times as fast (predicted: {predicted})."


def _times(speed: Mapping[str, float], name: str, *, apart: float = 1.2) -> str:
    """Return a speed-up, with those of single rounds where they are wide apart (a fifth, a rule of thumb)."""
    low, high = speed[f"{name}_low"], speed[f"{name}_high"]
    return f"{speed[name]:.2g}" + (f" [{low:.2g} to {high:.2g}]" if high > apart * low else "")


def _ms(seconds: float) -> str:
    if math.isnan(seconds):
        return "an unknown time"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
