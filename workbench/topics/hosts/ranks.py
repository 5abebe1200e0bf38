"""The codes of `hosts`, and what the ranks of a job wrote: its passes over data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from workbench.findings.finding import Codes

CODES = Codes({
    "hosts.init_seed": "P7.5", "hosts.data_seed": "P7.6", "hosts.set_epoch": "P7.6", "hosts.sharding": "P7.4", "hosts.writers": "P7.2",
    "hosts.checkpoint_writers": "P7.2", "hosts.evaluation": "P7.1", "hosts.buffers": "P7.3", "hosts.clip": "P7.1",
    "hosts.straggler": "P7.1", "hosts.not_wrapped": "P7.1",
})  # fmt: skip
Row = Mapping[str, Any]
Ranks = Sequence[Row]
"""The facts of every rank."""


def named(ranks: Iterable[int]) -> str:
    """Return "rank 1", "ranks 0 and 2", "ranks 0, 1 and 3"."""
    *first, last = map(str, sorted(ranks))
    return f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"


def training_passes(rank: Row) -> list[Row]:
    """Return the passes over loaders in which updates were made."""
    return [p for p in rank["passes"] if p["grad"] and p["steps"][1] > p["steps"][0]]


def evaluation_passes(rank: Row) -> list[Row]:
    """Return the passes over loaders in which nothing was trained."""
    return [p for p in rank["passes"] if p["grad"] is False or (p["exhausted"] and p["steps"][1] == p["steps"][0])]
