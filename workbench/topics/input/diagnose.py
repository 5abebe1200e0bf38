"""`diagnose_input_pipeline`: does training wait for its data, why, and what would help (P1)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from workbench.findings.audited import Audited
from workbench.findings.diagnosis import Diagnosis, Finding
from workbench.topics.data.diagnose import worker_rng_finding
from workbench.topics.input.bound import bound_finding
from workbench.topics.input.byte_counts import unused_finding

__all__ = ["CODES", "diagnose_input_pipeline"]

CODES = ("input.bound", "input.unused_features", "input.sync_every_step", "input.example_count", "data.worker_rng")
_COUNT_BY_HAND = (
    "Before raising num_workers count an epoch's examples with and without workers: they must share the stream out by "
    "torch.utils.data.get_worker_info()."
)
_CLAUSE = dict(zip(CODES, ("P1.1", "P1.8", "P1.6", "P1.9", "P2.9"), strict=True))


def diagnose_input_pipeline(
    record: Audited,
    *,
    warn_share: float = 0.1,
    high_share: float = 0.2,
    least_wait_s: float = 1e-3,
    busy_share: float = 0.2,
    unused_share: float = 0.05,
    least_unused_bytes: float = 4096,
    sync_share: float = 0.5,
) -> Diagnosis:
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
        reason = "Not measured: nobody timed the input pipeline; `workbench input` and `audit_input` do."
        findings = tuple(Finding(code=c, status="not_measured", summary=reason, clause=_CLAUSE[c]) for c in CODES)
    else:
        findings = (
            bound_finding(
                facts, warn_share=warn_share, high_share=high_share, least_wait_s=least_wait_s, busy_limit=busy_share
            ),
            unused_finding(facts, unused_share, least_unused_bytes),
            _syncs(facts, sync_share),
            _count(facts),
            _draws(facts),
        )
    return Diagnosis.of(record, findings)


def _syncs(facts: Mapping[str, Any], limit: float) -> Finding:
    code, found = "input.sync_every_step", facts.get("syncs")
    if not found:
        return Finding(
            code=code, status="not_measured", clause=_CLAUSE[code],
            summary="Not measured: there is no step of a person's own to watch.",
        )  # fmt: skip
    share, evidence = found["share"], dict(found)
    numbers: dict[str, Any] = {"value": share, "unit": "of the steps", "threshold": limit, "evidence": evidence}
    if share < limit:
        often = "No step fetches" if not share else f"{share:.0%} of the steps fetch"
        return Finding(
            code=code, status="ok", clause=_CLAUSE[code], summary=f"{often} a number from the device.", **numbers
        )
    places = ", ".join(list(found["places"])[:3])
    costs = "" if facts["ahead"] else " Here, on the CPU, it costs nothing; on an accelerator loading cannot run ahead."
    return Finding(
        code=code, status="warn", clause=_CLAUSE[code],
        summary=f"{share:.0%} of the steps fetch a number from the device, {found['per_step']:.3g} times each: {places}.{costs}",
        advice=(
            "Add the loss to a tensor on the device, and fetch it every hundred steps: total += loss.detach().",
            "Look for .item(), float(), .cpu(), print and `if` on a tensor in the lines that are named.",
        ),
        **numbers,
    )  # fmt: skip


def _draws(facts: Mapping[str, Any]) -> Finding:
    if facts["loader"].get("dataset") is None:
        return Finding(
            code="data.worker_rng", status="ok", clause=_CLAUSE["data.worker_rng"],
            summary="No worker processes load these data.",
        )  # fmt: skip
    if facts.get("draws") is None and not facts["loader"].get("stream"):
        return Finding(
            code="data.worker_rng", status="not_measured", clause=_CLAUSE["data.worker_rng"],
            summary="Not measured: items take too long to ask workers for the same ones again.",
        )  # fmt: skip
    return worker_rng_finding({"workers": facts.get("draws")})


def _count(facts: Mapping[str, Any]) -> Finding:
    """Judge whether an epoch gives the examples that the length says, in the same order for every number of workers."""
    code, length, loader = "input.example_count", facts["length"], facts["loader"]
    rows = [r for r in facts.get("variants", ()) if "same_order" in r]
    epochs = facts.get("epochs") or {}
    evidence = {"length": length, "epochs": epochs, "workers_compared": [r["workers"] for r in rows]}
    common: dict[str, Any] = {"code": code, "clause": _CLAUSE[code], "evidence": evidence}
    claimed, given = length["claimed"], length["yielded"]
    repeated = bool(epochs) and not epochs["same"]
    said = ""
    if repeated:
        said = (
            f"{epochs['workers']} workers begin with the same {epochs['alike']} batches each: the stream does not share its examples "
            "out among them."
            if None in (epochs["without"], epochs["with_workers"])
            else f"An epoch gives {epochs['without']:,} examples without workers and {epochs['with_workers']:,} with "
            f"{epochs['workers']}: the stream does not share its examples out among them."
        )
    if repeated and (loader.get("num_workers") or 0) > 1:
        return Finding(
            status="warn", value=_copies(epochs), unit="times", threshold=1.0, summary=said,
            advice=("Let each worker read its own part: see torch.utils.data.get_worker_info().",), **common,
        )  # fmt: skip
    if length.get("of") == "batches" and None not in (claimed, given) and claimed != given:
        return Finding(
            status="warn", value=given / max(1, claimed), unit="of the length", threshold=1.0,
            summary=f"The sampler ({loader.get('sampler')}) says that an epoch has {claimed:,} batches, and it gives {given:,}.",
            advice=("Make the sampler's __len__ true: steps, epochs and schedules are counted by it.",), **common,
        )  # fmt: skip
    if length.get("of") != "batches" and claimed and given is not None and not _fits(claimed, given, loader):
        return Finding(
            status="warn", value=given / claimed, unit="of the length", threshold=1.0,
            summary=f"The dataset says that it has {claimed:,} examples, and an epoch gives {given:,}.",
            advice=("Make __len__ true: steps, epochs and schedules are counted by it.",), **common,
        )  # fmt: skip
    if rows:
        counts = ", ".join(str(n) for n in sorted({r["workers"] for r in rows}))
        if all(r["same_order"] for r in rows):
            return Finding(status="ok", summary=f"The same examples in the same order with {counts} workers.", **common)
        return Finding(
            status="warn", summary=f"With {counts} workers examples come in different orders, random state being equal.",
            advice=("Set in_order=True: without it the order depends on which worker is quickest.",), **common,
        )  # fmt: skip
    if loader.get("dataset") is None:
        return Finding(
            status="ok", summary="Batches are made in the training process: there are no workers to compare.", **common
        )
    if given is None and not said:
        return Finding(
            status="not_measured", summary="Not measured: no epoch came to its end in time.",
            advice=(_COUNT_BY_HAND,) if loader.get("stream") else (), **common,
        )  # fmt: skip
    what = length.get("of", "examples")
    return Finding(status="ok", summary=said or f"An epoch gives {given or 0:,} {what}, as often as asked.", **common)


def _copies(epochs: Mapping[str, Any]) -> float:
    if None in (epochs["without"], epochs["with_workers"]):
        return float(epochs["workers"])
    return float(epochs["with_workers"] / max(1, epochs["without"]))


def _fits(claimed: int, given: int, loader: Mapping[str, Any]) -> bool:
    """Tell whether an epoch is as long as it should be; each worker may drop an incomplete batch."""
    size, workers = loader.get("batch_size") or 1, max(1, loader.get("num_workers") or 0)
    lost = workers * (size - 1) if loader.get("drop_last") else 0
    return math.isclose(claimed, given) or (0 < claimed - given <= lost)
