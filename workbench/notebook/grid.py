"""Many runs of one notebook: the grid of `--sweep name=v1,v2`, or the rows of a file, every value checked beforehand."""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from workbench.errors import UsageError
from workbench.notebook.parameters import NotebookParameter, check_parameters, parse_parameters

__all__ = ["parse_sweeps", "read_rows"]

_PAIRS = {"[": "]", "(": ")", "{": "}"}


def parse_sweeps(declared: Sequence[NotebookParameter], texts: Iterable[str]) -> list[dict[str, Any]]:
    """Return the grid of all sweeps, the last one fastest: one dictionary of values a run.

    Args:
        declared: the notebook's parameters.
        texts: `name=v1,v2,...` each. Values are told apart by commas outside brackets and quotes. Those of a parameter that takes
            a list stand in brackets, `lrs=[0.1],[0.1,0.2]`: otherwise nobody knows whether two runs or one list of two are meant.

    Raises:
        UnknownNameError: a name that the notebook does not have.
        UsageError: no value, a value of another type, the same value or name twice, or a list without brackets.
    """
    axes: dict[str, list[Any]] = {}
    for text in texts:
        name, _, rest = text.partition("=")
        values = _values(declared, name, text, split_values(rest))
        if name in axes:
            raise UsageError(f"--sweep {name} is given twice: write all values in one, {name}=v1,v2,v3.")
        axes[name] = values
    return [dict(zip(axes, row, strict=True)) for row in itertools.product(*axes.values())] if axes else []


def split_values(text: str) -> list[str]:
    """Split at the commas outside brackets and quotes; `[0.1],[0.2,0.3]` are two, `"a,b",c` as well."""
    parts, quote = [""], ""
    closing: list[str] = []
    for sign in text:
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "'\"" and (closing or not parts[-1].strip()):
            quote = sign
        elif sign in _PAIRS:
            closing.append(_PAIRS[sign])
        elif closing and sign == closing[-1]:
            closing.pop()
        elif sign == "," and not closing:
            parts.append("")
            continue
        parts[-1] += sign
    return [part.strip() for part in parts]


def _values(declared: Sequence[NotebookParameter], name: str, text: str, parts: list[str]) -> list[Any]:
    known = {parameter.name: parameter for parameter in declared}
    if name not in known or "=" not in text:
        parse_parameters(declared, [text])  # says what is wrong with it
    found: list[Any] = []
    for part in parts:
        if known[name].accepts([]) and not known[name].accepts("") and not part.startswith(("[", "(")):
            raise UsageError(
                f"--sweep {text!r}: {name} takes a list, so each value stands in brackets: --sweep '{name}=[{part}],[...]'."
            )
        value = known[name].parse(part)
        if value in found:
            raise UsageError(f"--sweep {text!r}: {value!r} stands there twice; each value is one run.")
        found.append(value)
    return found


def read_rows(declared: Sequence[NotebookParameter], path: str | Path) -> list[dict[str, Any]]:
    """Read a file of parameters, one run a row.

    Args:
        declared: the notebook's parameters.
        path: .json, a list of objects; or .csv, the names in its first line, an empty cell for the default.

    Raises:
        UnknownNameError: a name that the notebook does not have.
        UsageError: no such file, another ending, no rows, or a value of another type; the row is named.
    """
    source = Path(path)
    readers = {".json": _json_rows, ".csv": _csv_rows}
    if source.suffix.lower() not in readers:
        raise UsageError(f"{str(path)!r} must end in {' or '.join(readers)}: one run a row.")
    try:
        content = source.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UsageError(
            f"cannot read {str(path)!r}: {error.strerror}. Give the path of a .json or .csv file."
        ) from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{str(path)!r} is not UTF-8 text ({error.reason} at byte {error.start}).") from None
    try:
        rows = readers[source.suffix.lower()](declared, content)
    except UsageError as error:
        raise type(error)(f"{path}: {error}") from None
    if not rows:
        raise UsageError(f"{str(path)!r} holds no row, and so no run: write one row a run.")
    return rows


def _json_rows(declared: Sequence[NotebookParameter], content: str) -> list[dict[str, Any]]:
    try:
        rows = json.loads(content)
    except ValueError as error:
        raise UsageError(f"is not valid JSON ({error}).") from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UsageError('must be a list of objects, one run each: [{"seeds": 1}, {"seeds": 2}].')
    for number, row in enumerate(rows, start=1):
        _in_row(number, check_parameters, declared, row)
    return rows


def _csv_rows(declared: Sequence[NotebookParameter], content: str) -> list[dict[str, Any]]:
    lines = [line for line in csv.reader(content.splitlines()) if any(cell.strip() for cell in line)]
    rows = []
    for number, line in enumerate(lines[1:], start=1):
        if len(line) != len(lines[0]):
            raise UsageError(
                f"row {number}: {len(line)} cells under {len(lines[0])} names; quote a cell that holds a comma."
            )
        words = [f"{name.strip()}={cell.strip()}" for name, cell in zip(lines[0], line, strict=True) if cell.strip()]
        rows.append(_in_row(number, parse_parameters, declared, words))
    return rows


def _in_row(number: int, check: Any, declared: Sequence[NotebookParameter], given: Any) -> Any:
    try:
        return check(declared, given)
    except UsageError as error:
        raise type(error)(f"row {number}: {error}") from None
