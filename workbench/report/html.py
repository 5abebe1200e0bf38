"""Small pieces of HTML for the report. Everything that comes from outside is escaped here, and secrets are cut out."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from workbench.findings.diagnosis import SIGNS, Finding
from workbench.plots.words import four_digits, number_text
from workbench.record.json_values import to_json

__all__ = ["STATUS", "badge", "card", "folded", "redact", "table", "text", "value_text"]

_WORDS = {"fail": "Fail", "warn": "Warning", "not_measured": "Not measured", "ok": "OK"}
STATUS = {status: (SIGNS[status][0], word) for status, word in _WORDS.items()}
"""Symbol and word of each status, worst first; colour only repeats what they say."""

MAX_EVIDENCE_CHARS = 4000
"""Longer evidence is cut; all of it stands in diagnosis.json."""
LONG_CELL = 40
"""Characters from which on a cell may wrap; a phone shows the rows of such a table one under the other."""

_SECRET = r"(?:token|password|passwd|secret|api[_-]?key|credentials?)"
_REDACTIONS = (
    (re.compile(r"(?P<keep>\b[\w+.-]+://)[^\s/@]+@"), r"\g<keep>***@"),
    (
        re.compile(rf"(?P<keep>[\w-]*{_SECRET}[\w-]*(?:\s*[=:]\s*|\s+))(?:'[^']*'|\"[^\"]*\"|[^\s'\"&]+)", re.I),
        r"\g<keep>***",
    ),
    (re.compile(r"(?:(?<=\s)|^)(?:/home/[^/\s]+|/Users/[^/\s]+|/root)(?=/)"), "~"),
)


def redact(line: str) -> str:
    """Return a command line or address with passwords, tokens and keys as `***`, and a home folder as the shell's `~`."""
    for pattern, replacement in _REDACTIONS:
        line = pattern.sub(replacement, line)
    return line


def text(value: object) -> str:
    """Return `value` as escaped text, fit for content and for quoted attributes."""
    return escape(str(value), quote=True)


def value_text(value: Any) -> str:
    """Return a value the way a table shows it: numbers with four digits, a dash for unknown."""
    if value is None or isinstance(value, (bool, int, float)):
        return number_text(value)
    return text(value if isinstance(value, str) else json.dumps(to_json(value), ensure_ascii=False))


def badge(status: str) -> str:
    """Return symbol and word of a status."""
    symbol, word = STATUS[status]
    return f'<span class="badge"><span aria-hidden="true">{symbol}</span>{word}</span>'


def folded(title: str, content: str, *, kind: str = "") -> str:
    """Return `content`, already HTML, behind a line to click on; print opens it, unless `kind` is "screen"."""
    cls = f' class="{kind}"' if kind else ""
    return f"<details{cls}><summary>{text(title)}</summary>\n{content}\n</details>"


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return an HTML table; wide ones scroll within themselves, those with sentences are stacked on a phone."""
    head = "".join(f'<th scope="col">{text(column)}</th>' for column in columns)
    sentences = len(columns) > 2 and any(
        isinstance(value, str) and len(value) > LONG_CELL for row in rows for value in row
    )
    kind = ' class="stack"' if sentences else ""
    body = "\n".join(
        "<tr>" + "".join(_cell(value, column) for value, column in zip(row, columns, strict=True)) + "</tr>"
        for row in rows
    )
    # focusable, so that the arrow keys scroll it
    return f'<div class="scroll" tabindex="0"><table{kind}><thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>'


def card(finding: Finding, *, advice: bool = True, below: str = "") -> str:
    """Return one finding: status, code, summary, numbers, what to do unless it stands elsewhere, `below`, and the evidence folded."""
    clause = f'<span class="clause soft small">clause {text(finding.clause)}</span>' if finding.clause else ""
    parts = [
        f'<article class="card {finding.status}">',
        f"<header>{badge(finding.status)}<h3><code>{text(finding.code)}</code></h3>{clause}</header>",
        f"<p>{text(redact(finding.summary))}</p>",
        _numbers(finding),
    ]
    if finding.advice and advice:
        parts.append("<ul>" + "".join(f"<li>{text(redact(line))}</li>" for line in finding.advice) + "</ul>")
    parts.append(below)
    if finding.evidence:
        parts.append(folded("Evidence", _evidence(finding.evidence), kind="screen"))
    return "\n".join([part for part in parts if part] + ["</article>"])


def _cell(value: Any, column: str) -> str:
    label = f' data-label="{text(column)}"' if column else ""
    if isinstance(value, str):
        kind = ' class="long"' if len(value) > LONG_CELL else ""
        return f"<td{kind}{label}>{text(redact(value))}</td>"
    return f'<td class="number"{label}>{value_text(value)}</td>'


def _numbers(finding: Finding) -> str:
    """The line with value, threshold and step, as far as they are known."""
    unit = f" {text(finding.unit)}" if finding.unit else ""
    known = [
        ("value", finding.value, unit),
        ("threshold", finding.threshold, unit),
        ("step", finding.step, ""),
    ]
    shown = [f'{name} <span class="number">{value_text(v)}</span>{u}' for name, v, u in known if v is not None]
    return f'<p class="soft small">{" · ".join(shown)}</p>' if shown else ""


def _evidence(evidence: Mapping[str, Any]) -> str:
    """Plain values as one table, a list of alike rows as a table of its own."""
    plain: list[tuple[str, Any]] = []
    tables: list[str] = []
    for name, value in to_json(evidence).items():
        if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
            columns = list(dict.fromkeys(key for row in value for key in row))
            tables.append(
                f'<p class="small soft">{text(name)}</p>' + table(columns, [_row(row, columns) for row in value])
            )
        else:
            plain.append((name, _shown(value)))
    first = [table(("measured", "value"), plain)] if plain else []
    return "\n".join(first + tables)


def _row(row: Mapping[str, Any], columns: Sequence[str]) -> list[Any]:
    return [_shown(row.get(column)) for column in columns]


def _shown(value: Any) -> Any:
    """A number as it is; anything with structure as text of bounded length."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    line = value if isinstance(value, str) else _compact(value)
    if len(line) <= MAX_EVIDENCE_CHARS:
        return line
    return line[:MAX_EVIDENCE_CHARS] + " … (cut; all of it stands in diagnosis.json)"


def _compact(value: Any) -> str:
    """JSON on one line, floats with four digits."""
    if isinstance(value, float):
        return four_digits(value)
    if isinstance(value, list):
        return "[" + ", ".join(_compact(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_compact(item)}" for key, item in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False)
