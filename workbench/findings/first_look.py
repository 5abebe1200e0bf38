"""`as_first_look`: what a budget that pays for the beginning of a run alone leaves unanswered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from workbench.findings.finding import Finding

FIRST_LOOK = "first_look"
"""Name of the fact that a study of such runs has: `steps` of its runs, and `whole`, those of the training, None where nobody knows."""
_LATE = (
    "lr.at_edge", "lr.grid_edge", "evaluation.underfits", "evaluation.generalisation_gap", "evaluation.interval",
    "evaluation.bad_proxy", "evaluation.periodic", "checkpoints.best_not_last", "batch_norm.cold_ema", "batch_norm.stale",
)  # fmt: skip
"""Codes that ask about the end of a training, or about which learning rate is best for all of it: short runs prefer larger ones."""


def length_of_runs(facts: Mapping[str, Any]) -> str:
    """Return "at full length", or how long the runs of a first look are, "in runs of 333 of 2,000 updates"."""
    look = facts.get(FIRST_LOOK)
    of = f" of {look['whole']:,}" if look and look["whole"] else ""
    return f"in runs of {look['steps']:,}{of} updates" if look else "at full length"


def as_first_look(facts: Mapping[str, Any], findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Return the findings of a study, those that need whole runs as not measured where its runs were cut short."""
    look = facts.get(FIRST_LOOK)
    if not look:
        return tuple(findings)
    of = f" of {look['whole']:,}" if look["whole"] else ", not to its end"
    summary = f"Not measured: a first look trains {look['steps']:,} updates{of}; a larger budget trains it whole."
    return tuple(
        replace(f, status="not_measured", summary=summary, advice=()) if f.code in _LATE else f for f in findings
    )
