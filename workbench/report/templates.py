"""HTML from templates that escape every text, with secrets cut out of what comes from a command line or a record."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from workbench.findings.diagnosis import SIGNS
from workbench.findings.finding import STATUSES, Finding
from workbench.findings.topic import NARROW
from workbench.plots.svg import DARK_COLORS
from workbench.plots.words import counted, four_digits, number_text
from workbench.record.json_values import to_json
from workbench.record.redact import redact

_WORDS = {"fail": "Fail", "warn": "Warning", "not_measured": "Not measured", "ok": "OK"}
STATUS: dict[str, tuple[str, str]] = {status: (SIGNS[status][0], _WORDS[status]) for status in STATUSES}
"""Symbol and word of each status, worst first; colour only repeats what they say."""

MAX_EVIDENCE_CHARS = 4000
"""Longer evidence is cut; all of it stands in diagnosis.json."""
LONG_CELL = 40
"""Characters from which on a cell may wrap; a phone shows the rows of such a table one under the other."""

_PLAYBOOK = "https://github.com/google-research/tuning_playbook#"
SOURCES = defaultdict(str, {
    "F": f"{_PLAYBOOK}how-can-optimization-failures-be-debugged-and-mitigated", "P": f"{_PLAYBOOK}additional-guidance-for-the-training-pipeline",
    "T": "https://www.tensorflow.org/tutorials/distribute/parameter_server_training",
})  # fmt: skip
"""Where a clause can be read, by its letter; nothing is loaded from there before somebody clicks."""

_HOME = re.compile(r"(?:(?<=\s)|^)(?:/home/[^/\s]+|/Users/[^/\s]+|/root)(?=/)")
_NAMED = re.compile(
    r"([\w-]*(?:token|password|passwd|secret|api[_-]?key|credentials?)[\w-]*\s+)(?:'[^']*'|\"[^\"]*\"|[^\s'\"&]+)", re.I
)

_OPTION = re.compile(r"(?<![\w-])--?[a-zA-Z][\w-]*|--(?=\s)")


def render(template: str, folder: Path | None = None, **values: Any) -> str:
    """Return a template of `folder`, or of the report, filled in; every value is escaped."""
    return _environment(folder).get_template(template).render(**values)


def page_css(name: str, folder: Path | None = None) -> str:
    """Return a style sheet of `folder`, or of the report, with the colours that its figures have on a dark page."""
    text = ((folder or Path(__file__).parent) / name).read_text(encoding="utf-8")
    return text.replace("--plots: dark;", f"{DARK_COLORS};")


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return an HTML table; wide ones scroll within themselves."""
    module: Any = _environment(None).get_template("parts.html.j2").module
    return str(module.table(columns, rows))


def shown_line(line: object) -> str:
    """Return a line as a page shows it: secrets, and whatever word follows the name of one, as `***`; a home folder as the shell's `~`."""
    return _HOME.sub("~", _NAMED.sub(r"\g<1>***", redact(line)))


def _shown_html(line: object) -> Markup:
    """Return `shown_line` as HTML in which no line ends within an option: browsers break after each hyphen."""
    return Markup(_OPTION.sub(r'<span class="option">\g<0></span>', str(escape(shown_line(line)))))  # noqa: S704 - it is escaped


def value_text(value: Any) -> str:
    """Return a value the way a table shows it: numbers with four digits, a dash for unknown."""
    if value is None or isinstance(value, (bool, int, float)):
        return number_text(value)
    return value if isinstance(value, str) else json.dumps(to_json(value), ensure_ascii=False)


@cache
def _environment(folder: Path | None) -> Environment:
    here = Path(__file__).parent
    found = Environment(
        loader=FileSystemLoader([folder or here, here]),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )
    found.globals |= {"STATUS": STATUS, "NARROW": NARROW, "SOURCES": SOURCES, "counted": counted}
    found.filters |= {
        "redact": _shown_html,
        "shown": value_text,
        "numbers": _numbers,
        "evidence_tables": _evidence_tables,
    }
    found.filters["has_sentences"] = lambda rows: any(_is_sentence(value) for row in rows for value in row)
    found.tests["sentence"] = _is_sentence
    return found


def _is_sentence(value: Any) -> bool:
    return isinstance(value, str) and len(value) > LONG_CELL


def _numbers(finding: Finding) -> list[str]:
    """Value, threshold and step in words, as far as they are known."""
    named = {"value": finding.quantity(finding.value), "threshold": finding.quantity(finding.threshold)}
    named["step"] = "" if finding.step is None else f"{finding.step:,}"
    return [f"{name} {shown}" for name, shown in named.items() if shown]


def _evidence_tables(
    evidence: Mapping[str, Any],
) -> tuple[list[tuple[str, Any]], list[tuple[str, list[str], list[list[Any]]]]]:
    """Rows of plain values, and each list of alike rows as a table of its own."""
    plain: list[tuple[str, Any]] = []
    tables: list[tuple[str, list[str], list[list[Any]]]] = []
    for name, value in to_json(evidence).items():
        if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
            columns = list(dict.fromkeys(key for row in value for key in row))
            tables.append((name, columns, [[_cut(row.get(column)) for column in columns] for row in value]))
        else:
            plain.append((name, _cut(value)))
    return plain, tables


def _cut(value: Any) -> Any:
    """A number as it is; anything with structure as text of bounded length."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    line = value if isinstance(value, str) else _compact(value)
    if len(line) <= MAX_EVIDENCE_CHARS:
        return line
    return line[:MAX_EVIDENCE_CHARS] + " … (cut; diagnosis.json has all of it)"


def _compact(value: Any) -> str:
    """JSON on one line, floats with four digits."""
    if isinstance(value, float):
        return four_digits(value)
    if isinstance(value, list):
        return "[" + ", ".join(map(_compact, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_compact(item)}" for key, item in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False)
