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


def why_missing(facts: Mapping[str, Any], name: str, otherwise: str) -> str:
    """Return the sentence of a finding whose facts are missing."""
    return f"Not measured: {(facts.get(NOT_COLLECTED) or {}).get(name) or otherwise}."
