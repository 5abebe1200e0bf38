"""`Audited` and `Audit`: facts without a study, as an audit of somebody's own model, loader or job collects them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

NOT_COLLECTED = "not_collected"
"""Name of the facts that say why others are missing: {name: reason}."""


class Audited(Protocol):
    """What a diagnosis of facts reads: a study, or what an audit returns."""

    @property
    def facts(self) -> dict[str, Any]: ...  # noqa: D102
    @property
    def workload(self) -> str: ...  # noqa: D102
    @property
    def command(self) -> str | None: ...  # noqa: D102
    @property
    def path(self) -> Path | None: ...  # noqa: D102


@dataclass(frozen=True, kw_only=True)
class Audit:
    """What an audit found, for the diagnosis of its stem.

    Attributes:
        facts: {stem: ...}, JSON values.
        workload: what was looked at.
        command: what reproduces it; None where it is not known.
        path: folder of the facts; None where nothing is written.
    """

    facts: dict[str, Any]
    workload: str
    command: str | None = None
    path: Path | None = None


def not_ended(record: Any) -> str:
    """Return how many trials of a study have not come to their end, and what resumes them, where something does; "" for none."""
    trials = getattr(record, "trials", None)
    if trials is None or "state" not in trials or (left := trials[trials["state"].isin(["running", "stopped"])]).empty:
        return ""
    if now := int((left["state"] == "running").sum()):  # by a process that holds the folder
        return (
            "the run is being trained"
            if len(trials) == 1
            else f"{now} of {len(trials)} runs {'is' if now == 1 else 'are'} being trained"
        )
    many, row = len(left) > 1, left.iloc[0]
    ours = row.get("gradients") is not None  # nobody but its author goes on with a watched loop
    runs = "the run" if len(trials) == 1 else f"{len(left)} of {len(trials)} runs"
    at = f"at {row['steps_run']:,.0f} of {row['total_steps']:,.0f} updates"
    said = f"{runs} {'were' if many else 'was'} stopped {at if ours and len(trials) == 1 else 'early'}"
    how = "command" if str(record.command or "").startswith("workbench ") else "call"
    return f"{said}; the same {how} resumes {'them' if many else 'it'}" if ours else said


def why_missing(facts: Mapping[str, Any], name: str, otherwise: str) -> str:
    """Return the sentence of a finding whose facts are missing."""
    return f"Not measured: {(facts.get(NOT_COLLECTED) or {}).get(name) or otherwise}."
