"""Bytes of an example at each stage of an input pipeline, and `input.unused_features`: what nobody reads (P1.8)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.findings.diagnosis import Finding

__all__ = ["stage_bytes", "unused_finding"]

_CODE, _CLAUSE = "input.unused_features", "P1.8"


def stage_bytes(facts: Mapping[str, Any]) -> dict[str, float]:
    """Return bytes per example at the stages that could be looked at.

    Args:
        facts: of `audit_input`.

    Returns:
        Of "item" (what the dataset returns), "batch" (collated), "moved" (to the device), "read" (by forward, loss and
        metrics); per batch where nobody knows how many examples it has.
    """
    examples = facts["loader"].get("examples_per_batch") or 1.0
    found = {}
    if facts.get("item_bytes"):
        found["item"] = float(sum(facts["item_bytes"].values()))
    found["batch"] = sum(facts["batch_bytes"].values()) / examples
    reads = facts.get("reads")
    if reads and reads["known"]:
        found["moved"] = reads["moved_bytes"] / examples
        found["read"] = reads["read_bytes"] / examples
    return found


def unused_finding(facts: Mapping[str, Any], limit: float, least_bytes: float) -> Finding:
    """Return `input.unused_features`.

    Args:
        facts: of `audit_input`.
        limit: share of a batch's bytes that may be unread.
        least_bytes: of a batch, below which unread bytes are no alarm.
    """
    reads = facts.get("reads")
    stages = stage_bytes(facts)
    if not reads or not reads["known"]:
        why = (
            "nothing was seen to be read: a compiled or scripted model hides it, and so do batches that are no tensors"
            if reads
            else "there is no step to watch"
        )
        return Finding(
            code=_CODE, status="not_measured", clause=_CLAUSE, summary=f"Not measured: {why}.",
            evidence={"bytes_per_example": stages},
        )  # fmt: skip
    total = sum(reads["bytes"].values())
    unread = {path: reads["bytes"][path] for path in reads["unread"]}
    share = sum(unread.values()) / total if total else 0.0
    evidence = {"bytes_per_example": stages, "unread": unread, "read": reads["read"]}
    numbers: dict[str, Any] = {"value": share, "unit": "of the bytes", "threshold": limit, "evidence": evidence}
    if not unread:
        return Finding(
            code=_CODE,
            status="ok",
            clause=_CLAUSE,
            summary=f"The step reads all of a batch: {_stages(stages)}.",
            **numbers,
        )
    names = ", ".join(sorted(unread, key=lambda path: -unread[path])[:4])
    said = f"The step never reads {names}: {share:.1%} of a batch's bytes ({_stages(stages)})"
    if share < limit or sum(unread.values()) < least_bytes:
        return Finding(code=_CODE, status="ok", clause=_CLAUSE, summary=f"{said}, too few to matter.", **numbers)
    return Finding(
        code=_CODE, status="warn", clause=_CLAUSE, summary=f"{said}.",
        advice=(f"Leave {names} out where items are made, in the dataset's __getitem__, or when the data are stored.",),
        **numbers,
    )  # fmt: skip


def _stages(stages: Mapping[str, float]) -> str:
    return ", ".join(f"{_bytes(value)} {name}" for name, value in stages.items()) + " an example"


def _bytes(value: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.0f} B"
