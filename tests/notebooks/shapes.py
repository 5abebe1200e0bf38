"""A plugin of pytest under which nbval compares what a notebook came to, and not its digits: `-p tests.notebooks.shapes`.

Alike are verdicts with the same statuses, tables with the same rows and columns, and texts with the same words; numbers are alike within
a factor of ten. What a finding says in words beside its status is not compared, nor is a text of which the page shows a better form.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest

FACTOR = 10.0
NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:e[-+]?\d+)?", re.IGNORECASE)
STATUS = re.compile(r"\b(?:ok|warn|fail|not_measured)\b")
FINDING = re.compile(r"<li><code>([a-z_.]+)</code>")
TABLE = re.compile(r"<table.*?</table>", re.DOTALL)


class Said(str):
    """A text that equals another one that is alike; what nbval prints of it is the text."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and alike(str(self), str(other))

    def __ne__(self, other: object) -> bool:
        return not self == other


class Verdict(dict[str, Any]):
    """A stored verdict that equals another one with the same statuses and values of the same size."""

    __hash__ = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mapping) and same_verdict(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other


def near(one: float, other: float) -> bool:
    """Whether two numbers are of the same size: one within ten times the other, or one is 0 and the other below 1."""
    if one == 0 or other == 0:
        return max(abs(one), abs(other)) < 1
    return one * other > 0 and 1 / FACTOR < one / other < FACTOR


def alike(one: str, other: str) -> bool:
    """Whether two outputs have the same tables, and beside them the same lines."""
    tables = [[_shape(table) for table in TABLE.findall(text)] for text in (one, other)]
    lines = [TABLE.sub("", text).splitlines() for text in (one, other)]
    return tables[0] == tables[1] and len(lines[0]) == len(lines[1]) and all(map(_same_line, *lines))


def same_verdict(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    first, second = ({each["code"]: each for each in said["findings"]} for said in (one, other))
    if (one["verdict"], one["workload"], set(first)) != (other["verdict"], other["workload"], set(second)):
        return False
    return all(a["status"] == second[code]["status"] and _same_value(a, second[code]) for code, a in first.items())


def _same_value(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    values = one["value"], other["value"]
    if all(isinstance(value, (int, float)) for value in values):
        return near(*values)
    return (values[0] is None) == (values[1] is None)


def _same_line(one: str, other: str) -> bool:
    if named := FINDING.findall(one):
        return named == FINDING.findall(other)
    statuses = STATUS.findall(one)
    if statuses or STATUS.search(other):
        return statuses == STATUS.findall(other)
    numbers = [[float(found.replace(",", "")) for found in NUMBER.findall(line)] for line in (one, other)]
    return NUMBER.sub("#", one).split() == NUMBER.sub("#", other).split() and all(map(near, *numbers))


def _shape(table: str) -> tuple[list[str], int, int]:
    """The words of a table's head, its rows and its cells."""
    head = re.findall(r"<th[^>]*>(.*?)</th>", table.partition("</thead>")[0], re.DOTALL)
    return head, table.count("<tr"), table.count("<td")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Have nbval compare as above; its own rules for paths and durations come before."""
    from nbval.plugin import IPyNbCell

    cleaned, compared = IPyNbCell.sanitize, IPyNbCell.compare_outputs

    def sanitize(self: Any, value: Any) -> Any:
        if isinstance(value, Mapping):
            return Verdict(value)
        return Said(cleaned(self, value)) if isinstance(value, str) else value

    def compare_outputs(self: Any, test: Any, ref: Any, skip_compare: Any = None) -> Any:
        return compared(self, test, ref, (*(skip_compare or self.parent.skip_compare), "text/plain"))

    IPyNbCell.sanitize, IPyNbCell.compare_outputs = sanitize, compare_outputs
