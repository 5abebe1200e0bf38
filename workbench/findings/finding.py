"""`Finding`: one code of the catalogue, what was found of it, and how bad that is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from workbench.findings.audited import why_missing
from workbench.record.json_values import to_json

Status = Literal["ok", "warn", "fail", "not_measured"]
STATUSES: tuple[Status, ...] = ("fail", "warn", "not_measured", "ok")
"""Worst first."""
SYMBOLS: dict[str, str] = {"ok": "+", "not_measured": "?", "warn": "!", "fail": "x"}
MEASUREMENTS = {
    "lr.best", "lr.unstable", "warmup.shortest", "clipping.threshold", "stability.headroom", "batch_size.noise_scale",
}  # fmt: skip
"""Codes that are worth reading where all is well: they are numbers, not absences."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One code of the catalogue with its status, its number and the evidence for it.

    Attributes:
        code: `prefix.condition`, for example "stability.early".
        status: "ok", "warn", "fail" or "not_measured" (silence is not health).
        summary: one sentence for a person.
        value: the measured number, None where unknown.
        unit: unit of `value` and `threshold`.
        threshold: what `value` was held against.
        step: where in training it happened.
        clause: the requirement it follows from, for example "F1.5".
        evidence: numbers behind the verdict, JSON values only.
        advice: what to try next, in order.
        follows_from: the code whose alarm explains this one, so that mending that mends this (`causes_first`); None where it
            stands for itself.
    """

    code: str
    status: Status
    summary: str
    value: float | None = None
    unit: str | None = None
    threshold: float | None = None
    step: int | None = None
    clause: str | None = None
    evidence: Mapping[str, Any] = field(default_factory=dict)
    advice: Sequence[str] = ()
    follows_from: str | None = None

    @property
    def applies(self) -> bool:
        """Whether the question was asked: one that does not apply is `ok`, and says so first."""
        return not self.summary.startswith("Does not apply")

    def to_dict(self) -> dict[str, Any]:
        """Return plain values; unknown numbers are None, infinities the strings "inf" and "-inf"."""
        return {name: to_json(getattr(self, name)) for name in self.__dataclass_fields__}

    def quantity(self, value: float | None) -> str:
        """Return its value or threshold as a table shows it: "0.0707 lr", "4.08×", "7% of steps"; "" where that is unknown."""
        if value is None:
            return ""
        unit, whole = self.unit or "", float(value).is_integer() or 1000 <= abs(value) < 1e9
        shown = f"{value:,.0f}" if whole else f"{value:.4g}".replace("e-0", "e-")
        if unit.startswith("share"):
            return f"{100 * value:.3g}%{unit.removeprefix('share')}"
        if unit in ("ratio", "times") or " / " in unit:
            return f"{shown}×"
        if value == 1 and unit.endswith("s") and not unit.endswith(("ss", "sses")):
            unit = unit.removesuffix("s")
        return f"p = {shown}" if unit == "p" else f"{shown} {unit}".replace(" times ", "× ").strip()

    def __str__(self) -> str:
        """Return the line that the terminal and the report show."""
        return f"{SYMBOLS[self.status]} {self.status:<12} {self.code:<26} {self.summary}"


class Codes(dict[str, str]):
    """Code -> clause, in the order of a report."""

    def finding(self, code: str, status: Status, summary: str, **fields: Any) -> Finding:
        """Return a finding with the clause of its code; `KeyError` for a code that is not declared."""
        return Finding(code=code, clause=self[code], status=status, summary=summary, **fields)

    def not_measured(self, code: str, reason: str, **fields: Any) -> Finding:
        """Return the finding that says why nothing is known; `reason` is a clause without a full stop."""
        return self.finding(code, "not_measured", f"Not measured: {reason}.", **fields)

    def missing(self, facts: Mapping[str, Any], name: str, otherwise: str) -> list[Finding]:
        """Return every code as not measured for want of the facts `name`, with the reason that was stored for it, or `otherwise`."""
        return [self.finding(code, "not_measured", why_missing(facts, name, otherwise)) for code in self]


def named(names: Iterable[str], *, shown: int = 3) -> str:
    """Return the first names of modules or parameters, each once, and how many more there are; "" is the model itself."""
    kept = list(dict.fromkeys(name or "the model" for name in names))
    return ", ".join(kept[:shown]) + (f" and {len(kept) - shown} more" if len(kept) > shown else "")


def p_words(p: float) -> str:
    """Return p with two digits."""
    return "p < 0.001" if p < 0.001 else f"p = {p:.2g}"


def said_alike(
    findings: Iterable[Finding], *, joins: Callable[[Finding], bool] = lambda _: True
) -> list[list[Finding]]:
    """Return the findings in their order; those of one status that say the same stand together, at the place of the first."""
    said: dict[tuple[str, ...], list[Finding]] = {}
    for finding in findings:
        said.setdefault((finding.status, finding.summary, "" if joins(finding) else finding.code), []).append(finding)
    return list(said.values())


def worst(statuses: Sequence[Status]) -> Status:
    """Return the worst of `statuses`; "not_measured" when there is none."""
    return min(statuses, key=STATUSES.index, default="not_measured")
