"""The verdict as a table for a notebook's page: HTML that needs no style sheet and follows light and dark."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from workbench.findings.causes import listed
from workbench.findings.finding import MEASUREMENTS, Finding, said_alike

__all__ = ["verdict_table"]

SIGNS = {"fail": ("✕", "fail"), "warn": ("!", "warn"), "not_measured": ("?", "not measured"), "ok": ("✓", "ok")}
"""Symbol and word of each status; colour only repeats what they say."""

MAX_ROWS = 12
"""Of a diagnosis with no more findings than this, one study's, all are rows: its answer may be one that is well (rule of thumb)."""

_COLOURS = {
    status: f"color-mix(in srgb, currentColor 40%, {hue})"  # dark on a light page, light on a dark one
    for status, hue in (("fail", "#d32f2f"), ("warn", "#e65100"), ("not_measured", "#607d8b"), ("ok", "#2e7d32"))
}
_LEFT = "text-align: left; vertical-align: top"


def verdict_table(head: str, findings: Sequence[Finding]) -> str:
    """Return a heading and a table of findings, causes first; of many, what is well and measures nothing is folded into one line.

    Args:
        head: one line above the table.
        findings: of the diagnosis.

    Returns:
        HTML in which every text is escaped.
    """
    few = len(findings) <= MAX_ROWS
    after = {f.code: then for f, then in listed(findings)}
    ranked = [f for f, _ in listed(findings)]
    told = [f for f in ranked if few or f.status != "ok" or f.code in MEASUREMENTS]
    rest = [f for f in ranked if f not in told]
    columns = ("status", "finding", "what was found", "value", "clause")
    header = "".join(f'<th scope="col" style="{_LEFT}">{name}</th>' for name in columns)
    advised: set[str] = set()
    groups = said_alike(told, joins=lambda f: not after[f.code])
    rows = "\n".join(_row(alike, advised, after[alike[0].code]) for alike in groups)
    parts = [f"<p><strong>{escape(head)}</strong></p>"]
    if told:
        parts.append(f"<table>\n<thead><tr>{header}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table>")
    if rest:
        parts.append(_folded(f"{SIGNS['ok'][0]} {len(rest)} more are ok", rest))
    return "\n".join(parts)


def _folded(title: str, findings: Sequence[Finding], *, signs: bool = False) -> str:
    lines = "\n".join(
        f"<li>{SIGNS[f.status][0] + ' ' if signs else ''}<code>{escape(f.code)}</code> {escape(f.summary)}</li>" for f in findings
    )  # fmt: skip
    return f"<details><summary>{escape(title)}</summary>\n<ul>\n{lines}\n</ul></details>"


def _row(alike: Sequence[Finding], advised: set[str], followers: Sequence[Finding]) -> str:
    """Return the row of findings that say the same of several codes, with what follows from it and the first advice that no row above gave."""
    finding = alike[0]
    symbol, word = SIGNS[finding.status]
    lines = [line for line in finding.advice[:1] if finding.status != "ok" and line not in advised]
    advised.update(lines)
    advice = "".join(f"<br>Try: {escape(line)}" for line in lines)
    follow = _folded(f"{len(followers)} more follow from it", followers, signs=True) if followers else ""
    value = "" if finding.value is None else f"{finding.value:.4g} {escape(finding.unit or '')}".strip()
    clauses = dict.fromkeys(f.clause for f in alike if f.clause)
    cells = (
        f'<span style="color: {_COLOURS[finding.status]}; white-space: nowrap"><strong>{symbol} {word}</strong></span>',
        "<br>".join(f"<code>{escape(f.code)}</code>" for f in alike),
        escape(finding.summary) + advice + follow,
        value,
        escape(", ".join(clauses)),
    )
    return "<tr>" + "".join(f'<td style="{_LEFT}">{cell}</td>' for cell in cells) + "</tr>"
