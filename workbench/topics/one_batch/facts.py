"""What the findings about one batch share: reading the facts of one probe, and writing names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from workbench.findings.diagnosis import Finding, Status

__all__ = ["Facts", "finding", "named", "part", "unmeasured"]

Facts = Mapping[str, Any]


def part(facts: Facts, name: str) -> Facts | None:
    """Return what one probe found; None where it could not look."""
    found = facts.get(name)
    return None if not isinstance(found, Mapping) or "reason" in found else found


def finding(code: str, status: Status, summary: str, **fields: Any) -> Finding:
    """Return a finding; its summary comes third."""
    return Finding(code=code, status=status, summary=summary, **fields)


def unmeasured(code: str, facts: Facts, name: str) -> Finding:
    """Return the finding of a probe that could not look."""
    found = facts.get(name)
    reason = found.get("reason", "") if isinstance(found, Mapping) else "nobody looked"
    return finding(code, "not_measured", f"Not measured: {reason}.")


def named(names: Sequence[str], *, shown: int = 3) -> str:
    """Return the first names of modules, each once; "" is the model itself."""
    kept = list(dict.fromkeys(name or "the model" for name in names))
    return ", ".join(kept[:shown]) + (f" and {len(kept) - shown} more" if len(kept) > shown else "")
