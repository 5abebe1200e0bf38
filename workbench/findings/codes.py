"""`Codes`: the codes that one diagnosis may report, each with its clause, and the findings made from them."""

from __future__ import annotations

from typing import Any

from workbench.findings.finding import Finding, Status


class Codes(dict[str, str]):
    """Code -> clause, in the order of a report."""

    def finding(self, code: str, status: Status, summary: str, **fields: Any) -> Finding:
        """Return a finding with the clause of its code; `KeyError` for a code that is not declared.

        Args:
            status: how bad it is.
            summary: one sentence for a person.
        """
        return Finding(code=code, clause=self[code], status=status, summary=summary, **fields)

    def not_measured(self, code: str, reason: str, **fields: Any) -> Finding:
        """Return the finding that says why nothing is known; `reason` is a clause without a full stop."""
        return self.finding(code, "not_measured", f"Not measured: {reason}.", **fields)
