"""The codes of batch norm, their clauses, and a finding with one of them."""

from __future__ import annotations

from typing import Any

from workbench.findings.diagnosis import Finding, Status

__all__ = ["CLAUSE", "CODES", "finding"]

CLAUSE = {
    "rank_local": "P6.3",
    "first_device_ema": "P6.8",
    "variance_of_means": "P6.7",
    "ghost_size": "P6.6",
    "small_batch": "P6.2",
    "cold_ema": "P6.7",
    "stale": "P6.7",
}
CODES = tuple(f"batch_norm.{name}" for name in CLAUSE)


def finding(name: str, status: Status, summary: str, **numbers: Any) -> Finding:
    """Return the finding `batch_norm.<name>` with its clause."""
    return Finding(code=f"batch_norm.{name}", status=status, summary=summary, clause=CLAUSE[name], **numbers)
