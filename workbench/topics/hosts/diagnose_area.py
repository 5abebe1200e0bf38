"""The codes of `hosts`, their clauses and areas, and what the files of all ranks hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from workbench.findings.diagnosis import Diagnosis, Finding, Status, worst

__all__ = ["AREAS", "CLAUSE", "host_areas", "host_finding", "named", "parted", "training_passes"]

CLAUSE = {
    "init_seed": "P7.5",
    "data_seed": "P7.6",
    "set_epoch": "P7.6",
    "sharding": "P7.4",
    "writers": "P7.2",
    "checkpoint_writers": "P7.2",
    "evaluation": "P7.1",
    "buffers": "P7.3",
    "clip": "P7.1",
    "straggler": "P7.1",
    "not_wrapped": "P7.1",
}
"""Codes without their prefix, in the order in which they are emitted."""

AREAS = {
    "logging": ("writers",),
    "evaluation": ("evaluation", "buffers"),
    "RNG": ("init_seed", "data_seed", "set_epoch"),
    "checkpointing": ("checkpoint_writers", "buffers"),
    "sharding": ("sharding",),
}
"""The five places where training on many hosts goes wrong (P7.1); clipping, stragglers and wrapping concern the update itself."""


def host_finding(name: str, status: Status, summary: str, **fields: Any) -> Finding:
    """Return a finding of the area "hosts", with its clause."""
    return Finding(code=f"hosts.{name}", status=status, summary=summary, clause=CLAUSE[name], **fields)


def host_areas(diagnosis: Diagnosis) -> dict[str, Status]:
    """Return one verdict for each of logging, evaluation, RNG, checkpointing and sharding (P7.1).

    Statistics of batch norm that were not merged count for the evaluation where one saw them, else for the checkpoint.

    Args:
        diagnosis: of `diagnose_hosts`.
    """
    found: dict[str, Status] = {}
    for area, names in AREAS.items():
        statuses = []
        for name in names:
            finding = diagnosis[f"hosts.{name}"]
            if name != "buffers" or finding.evidence.get("area", "evaluation") == area:
                statuses.append(finding.status)
        found[area] = worst(statuses)
    return found


def named(ranks: Iterable[int]) -> str:
    """Return "rank 1", "ranks 0 and 2", "ranks 0, 1 and 3"."""
    words = [str(rank) for rank in sorted(ranks)]
    if len(words) == 1:
        return f"rank {words[0]}"
    return f"ranks {', '.join(words[:-1])} and {words[-1]}"


def parted(values: Mapping[int, Any]) -> list[list[int]]:
    """Return ranks with equal values together, the largest group first."""
    groups: dict[Any, list[int]] = {}
    for rank, value in values.items():
        groups.setdefault(value, []).append(rank)
    return sorted(groups.values(), key=lambda ranks: (-len(ranks), ranks))


def training_passes(rank: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the passes over loaders in which updates were made."""
    return [p for p in rank["passes"] if p["grad"] and p["steps"][1] > p["steps"][0]]


def evaluation_passes(rank: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the passes over loaders in which nothing was trained."""
    passes: Sequence[Mapping[str, Any]] = rank["passes"]
    return [p for p in passes if p["grad"] is False or (p["exhausted"] and p["steps"][1] == p["steps"][0])]
