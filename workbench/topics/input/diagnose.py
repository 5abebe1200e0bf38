"""`diagnose_input_pipeline`: does training wait for its data, why, and what would help (P1); `diagnose_input_share` asks any record."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from workbench.curves.trial_curves import RecordLike
from workbench.findings.audited import Audited
from workbench.findings.diagnosis import Diagnosis
from workbench.findings.finding import Codes, Finding
from workbench.topics.data.diagnose import worker_rng_finding
from workbench.topics.input.bound import bound_finding
from workbench.topics.input.throughput import Pipeline

Facts = Mapping[str, Any]
CODES = Codes({
    "input.bound": "P1.1", "input.unused_features": "P1.8", "input.sync_every_step": "P1.6", "input.example_count": "P1.9",
    "data.worker_rng": "P2.9",
})  # fmt: skip
BLOCKS = 10
"""Stretches of a trial; the median of their shares is the trial's, so that one stall of the machine is no verdict."""


def diagnose_input_pipeline(
    record: Audited, *, warn_share: float = 0.1, high_share: float = 0.2, least_wait_s: float = 1e-3, busy_share: float = 0.2,
    unused_share: float = 0.05, least_unused_bytes: float = 4096, sync_share: float = 0.5,
) -> Diagnosis:  # fmt: skip
    """Judge the facts that were collected about an input pipeline.

    Args:
        record: a study whose facts hold "input_pipeline", or what `audit_input` returns.
        warn_share: of a step that may be waited for data without an alarm (TraceML; the TensorFlow profiler has 0.05).
        high_share: from which that is called much (both of them).
        least_wait_s: below which no wait is an alarm: some dozen items in memory take that much on a busy processor (rule of thumb).
        busy_share: of processor time that other programs may have before a wait for batches that are ready is blamed on them
            (rule of thumb).
        unused_share: of a batch's bytes that may be carried along unread (rule of thumb).
        least_unused_bytes: of a batch, below which unread bytes are no alarm: an index or a file name costs nothing (rule of
            thumb: a page of memory).
        sync_share: of the steps that may fetch a number from the device (rule of thumb: every second one).

    Returns:
        `input.bound`, `input.unused_features`, `input.sync_every_step`, `input.example_count` and `data.worker_rng`, once each.
        The evidence of `input.bound` has the step's time split up, its "cause", and the change that was tried with its
        predicted and measured speed-up.

    Source: P1.1, P1.6, P1.8, P1.9; the shares are those of TraceML and of the TensorFlow profiler.
    """
    facts = record.facts.get("input_pipeline")
    if not facts:
        reason = "the input pipeline was not timed; `workbench input` and `wb.input.audit` do that"
        return Diagnosis.of(record, [CODES.not_measured(code, reason) for code in CODES])
    bound = bound_finding(
        Pipeline(facts), warn_share=warn_share, high_share=high_share, least_wait_s=least_wait_s, busy_limit=busy_share
    )
    unused, syncs = _unused(facts, unused_share, least_unused_bytes), _syncs(facts, sync_share)
    return Diagnosis.of(record, [bound, unused, syncs, _count(facts), _draws(facts)])


def _unused(facts: Facts, limit: float, least_bytes: float) -> Finding:
    """Judge the bytes of an example, or of a batch where its size is not known, at the stages that could be looked at: item, batch, moved to the device, read by the step."""
    code, reads = "input.unused_features", facts.get("reads")
    known = facts["loader"].get("examples_per_batch")
    examples, of = known or 1.0, "example" if known else "batch"  # whose bytes these are
    stages = {"item": float(sum(facts["item_bytes"].values()))} if facts.get("item_bytes") else {}
    stages["batch"] = sum(facts["batch_bytes"].values()) / examples
    if not reads or not reads["known"]:
        why = "there is no step to watch"
        if reads:
            why = "nothing was seen to be read: a compiled or scripted model hides it, and so do batches that are no tensors"
        return CODES.not_measured(code, why, evidence={f"bytes_per_{of}": stages})
    stages |= {"moved": reads["moved_bytes"] / examples, "read": reads["read_bytes"] / examples}
    unread = {path: reads["bytes"][path] for path in reads["unread"]}
    total, wasted = sum(reads["bytes"].values()), sum(unread.values())
    share = wasted / total if total else 0.0
    evidence = {f"bytes_per_{of}": stages, "unread": unread, "read": reads["read"]}
    say = partial(CODES.finding, code, value=share, unit="of the bytes", threshold=limit, evidence=evidence)
    listed = ", ".join(f"{_bytes(value)} {name}" for name, value in stages.items()) + f", each of an {of}".replace(
        "an batch", "a batch"
    )
    if not unread:
        return say("ok", f"The step reads all of a batch: {listed}.")
    names = ", ".join(sorted(unread, key=lambda path: -unread[path])[:4])
    said = f"The step never reads {names}: {share:.1%} of a batch's bytes ({listed})"
    if share < limit or wasted < least_bytes:
        return say("ok", f"{said}, too few to matter.")
    fix = f"Leave {names} out where items are made, in the dataset's __getitem__, or when the data are stored."
    return say("warn", f"{said}.", advice=(fix,))


def _bytes(value: float) -> str:
    units = (f"{value / size:.3g} {unit}" for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)) if value >= size)
    return next(units, f"{value:.0f} B")


def _syncs(facts: Facts, limit: float) -> Finding:
    code, found = "input.sync_every_step", facts.get("syncs")
    if not found:
        return CODES.not_measured(code, "no step of your own was given")
    share = found["share"]
    say = partial(CODES.finding, code, value=share, unit="of the steps", threshold=limit, evidence=dict(found))
    if share < limit:
        often = "No step fetches" if not share else f"{share:.0%} of the steps fetch"
        return say("ok", f"{often} a number from the device.")
    places = ", ".join(list(found["places"])[:3])
    costs = "" if facts["ahead"] else " Here, on the CPU, it costs nothing; on an accelerator loading cannot run ahead."
    said = (
        f"{share:.0%} of the steps fetch a number from the device, {found['per_step']:.3g} times each: {places}.{costs}"
    )
    advice = (
        "Add the loss to a tensor on the device, and fetch it every hundred steps: total += loss.detach().",
        "Look for .item(), float(), .cpu(), print and `if` on a tensor in the lines that are named.",
    )
    return say("warn", said, advice=advice)


def _draws(facts: Facts) -> Finding:
    if facts["loader"].get("dataset") is None:
        return CODES.finding("data.worker_rng", "ok", "No worker processes load these data.")
    if facts.get("draws") is None and not facts["loader"].get("stream"):
        return CODES.not_measured("data.worker_rng", "items take too long to ask workers for the same ones again")
    return worker_rng_finding({"workers": facts.get("draws")})


def _count(facts: Facts) -> Finding:
    """Judge whether an epoch gives the examples that the length says, in the same order for every number of workers."""
    code, loader, length, epochs = "input.example_count", facts["loader"], facts["length"], facts.get("epochs") or {}
    what, claimed, given = length.get("of", "examples"), length["claimed"], length["yielded"]
    workers = loader.get("num_workers") or 0
    rows = [r for r in facts.get("variants", ()) if "same_order" in r]
    evidence = {"length": length, "epochs": epochs, "workers_compared": [r["workers"] for r in rows]}
    say = partial(CODES.finding, code, evidence=evidence)
    wrong = partial(say, "warn", threshold=1.0)
    repeated = ""
    if epochs and not epochs["same"]:
        one, more, used = epochs["without"], epochs["with_workers"], epochs["workers"]
        value, unit = float(used), "times"
        repeated = f"{used} workers begin with the same {epochs.get('alike')} batches each"
        if None not in (one, more):
            value = float(more / max(1, one))
            repeated = f"An epoch gives {one:,} examples without workers and {more:,} with {used}"
        repeated += ": the stream does not share its examples out among them."
        if workers > 1:
            fix = "Let each worker read its own part: see torch.utils.data.get_worker_info()."
            return wrong(repeated, value=value, unit=unit, advice=(fix,))
    # each worker may drop an incomplete batch
    lost = max(1, workers) * ((loader.get("batch_size") or 1) - 1) if loader.get("drop_last") else 0
    fix = "steps, epochs and schedules are counted by it."
    if None not in (claimed, given) and what == "batches" and claimed != given:
        said = (
            f"The sampler ({loader.get('sampler')}) says that an epoch has {claimed:,} batches, and it gives {given:,}."
        )
        value, fix = given / max(1, claimed), f"Make the sampler's __len__ true: {fix}"
        return wrong(said, value=value, unit="of the length", advice=(fix,))
    both = claimed and given is not None and what != "batches"
    if both and not (math.isclose(claimed, given) or 0 < claimed - given <= lost):
        said = f"The dataset says that it has {claimed:,} examples, and an epoch gives {given:,}."
        return wrong(said, value=given / claimed, unit="of the length", advice=(f"Make __len__ true: {fix}",))
    if rows:
        counts = ", ".join(str(n) for n in sorted({r["workers"] for r in rows}))
        if all(r["same_order"] for r in rows):
            return say("ok", f"The same examples in the same order with {counts} workers.")
        said = f"With {counts} workers examples come in different orders, random state being equal."
        return say("warn", said, advice=("Set in_order=True: else the order depends on which worker is quickest.",))
    if loader.get("dataset") is None:
        return say("ok", "Batches are made in the training process: there are no workers to compare.")
    if given is None and not repeated:
        by_hand = "Before raising num_workers count an epoch's examples with and without workers: they must share the stream out by torch.utils.data.get_worker_info()."
        advice = (by_hand,) if loader.get("stream") else ()
        return say("not_measured", "Not measured: no epoch came to its end in time.", advice=advice)
    return say("ok", repeated or f"An epoch gives {given or 0:,} {what}, as often as asked.")


def diagnose_input_share(
    record: RecordLike,
    *,
    warn_share: float = 0.1,
    least_wait_s: float = 1e-3,
    least_total_s: float = 10.0,
    least_steps: int = 20,
) -> Diagnosis:
    """Return the one code `input.bound` of any study, from the trials that had their batches for themselves.

    Trials that train together share each batch, and their steps are as long as all of them together: what one of them would
    wait for cannot be told from that. The first step is left out: whatever is opened or started, is so there.

    Args:
        warn_share: of a step that may be waited for data (TraceML; the TensorFlow profiler has 0.05).
        least_wait_s: below which no wait is an alarm: some dozen items in memory take that much on a busy processor (rule of thumb).
        least_total_s: below which all waits of a run of the workload's own length are no alarm: nobody gains by mending them (rule
            of thumb).
        least_steps: of a trial, to say anything (rule of thumb).
    """
    code, steps = "input.bound", record.steps
    if not {"trial", "data_wait_s", "step_time_s"} <= set(steps.columns):
        said = "Does not apply: the batches come from no DataLoader of torch."
        return Diagnosis.of(record, [CODES.finding(code, "ok", said)])
    alone = [] if "trial" not in record.trials else [int(t) for t in record.trials["trial"]]
    lanes = getattr(record, "lanes", None)
    if isinstance(lanes, pd.DataFrame) and "lanes" in lanes:
        together = set(lanes.loc[lanes["lanes"] > 1, "trial"])
        alone = [t for t in alone if t not in together]
    shares = {t: found for t in alone if (found := _share(steps[steps["trial"] == t], least_steps)) is not None}
    if not shares:
        reason = f"no trial of at least {least_steps} steps has finite times"
        if len(record.trials) > 0 and not alone:
            reason = "all trials trained together, and share the loading of each batch; `workbench input` measures it"
        return Diagnosis.of(record, [CODES.not_measured(code, reason)])
    share, wait_s, step_s = (float(value) for value in np.median(list(shares.values()), axis=0))
    evidence = {"trials": list(shares), "wait_s": wait_s, "step_s": step_s}
    say = partial(CODES.finding, code, value=share, unit="of the step", threshold=warn_share, evidence=evidence)
    said = f"{share:.0%} of a step waits for data ({wait_s * 1e3:.3g} of {step_s * 1e3:.3g} ms)"
    own = record.facts.get("own_config") or record.config
    if share < warn_share or wait_s < least_wait_s or wait_s * int(own.get("total_steps") or 0) < least_total_s:
        few = "" if share < warn_share else ": too little time to matter"
        return Diagnosis.of(record, [say("ok", f"{said}{few}.")])
    advice = (
        f"See where the time goes, and what would help: workbench input {record.workload}.",
        "Load ahead in worker processes: num_workers of the workload.",
    )
    return Diagnosis.of(record, [say("warn", f"{said}.", advice=advice)])


def _share(rows: pd.DataFrame, least_steps: int) -> tuple[float, float, float] | None:
    """Return (share, wait_s, step_s) of one trial, None where it cannot be told."""
    rows = rows.sort_values("step").iloc[1:]
    wait, step = (rows[name].to_numpy(dtype=np.float64, na_value=np.nan) for name in ("data_wait_s", "step_time_s"))
    known = np.isfinite(wait) & np.isfinite(step) & (step > 0)
    wait, step = wait[known], step[known]
    if len(wait) < least_steps - 1:
        return None
    blocks = [(w.sum() / s.sum(), w.mean(), s.mean()) for w, s in zip(np.array_split(wait, BLOCKS), np.array_split(step, BLOCKS), strict=True)]  # fmt: skip
    share, wait_s, step_s = np.median(np.array(blocks), axis=0)
    return float(share), float(wait_s), float(step_s)
