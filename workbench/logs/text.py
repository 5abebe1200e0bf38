"""Logs that are text: CSV, JSON lines, and the state that Hugging Face's Trainer leaves beside its checkpoints."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from workbench.errors import RecordError
from workbench.logs.columns import RawLog, columns_of

_SEPARATORS = ",;\t|"


def read_csv(path: Path) -> RawLog:
    """Return the columns of a table with a header line, whatever separates them."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            head = file.readline()
        separator = max(_SEPARATORS, key=head.count)
        frame = pd.read_csv(
            path, sep=separator, keep_default_na=False, na_values=[""], low_memory=False, encoding="utf-8-sig"
        )
    except UnicodeDecodeError as error:
        raise RecordError(
            f"{path} is not text ({error.reason} at byte {error.start}), so it cannot be the table of a run."
        ) from error
    except (pd.errors.EmptyDataError, pd.errors.ParserError) as error:
        raise RecordError(f"{path} cannot be read as a table: {str(error).strip()}.") from error
    if all(_is_number(name) for name in frame.columns):
        raise RecordError(
            f"{path} has no header line, its first one is {head.strip()[:60]!r}. Write the columns' names there, such as step,loss,lr."
        )
    if frame.empty:
        raise RecordError(f"{path} has a header ({', '.join(map(str, frame.columns))}) and no row below it.")
    return RawLog(path=path, columns=columns_of(frame), rows=len(frame), text=True)


def _is_number(text: object) -> bool:
    try:
        float(str(text))
    except ValueError:
        return False
    return True


def read_json(path: Path) -> RawLog:
    """Return a `trainer_state.json`, a list of rows, or one row a line."""
    try:
        text = path.read_text(encoding="utf-8")
        values = _lines(text) if path.suffix == ".jsonl" else json.loads(text)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise RecordError(f"{path} is not valid JSON ({error}).") from error
    if isinstance(values, Mapping) and isinstance(values.get("log_history"), list):
        return _trainer_state(path, values)
    if isinstance(values, list) and values and all(isinstance(row, Mapping) for row in values):
        return RawLog(path=path, columns=_columns(values), rows=len(values))
    raise RecordError(
        f"{path} is not a log: give a trainer_state.json (with log_history), a list of rows, or one row a line (.jsonl)."
    )


def _lines(text: str) -> list[Any]:
    """Return one value a line; a last line that was cut off is left out."""
    lines = [line for line in text.splitlines() if line.strip()]
    try:
        return [json.loads(line) for line in lines]
    except json.JSONDecodeError:
        return [json.loads(line) for line in lines[:-1]]


def _trainer_state(path: Path, state: Mapping[str, Any]) -> RawLog:
    """Return Hugging Face's log. A loss of NaN is logged there as 0.0 by default (logging_nan_inf_filter); a norm that is not finite tells."""
    rows = [dict(row) for row in state["log_history"]]
    if not rows:
        raise RecordError(f"{path} has an empty log_history: no step was logged. Set logging_steps, or train longer.")
    for row in rows:
        norm = row.get("grad_norm")
        if row.get("loss") == 0.0 and isinstance(norm, float) and not math.isfinite(norm):
            row["loss"] = math.nan
    total = state.get("max_steps")
    known = {"total_steps": int(total)} if isinstance(total, (int, float)) and total > 0 else {}
    return RawLog(path=path, columns=_columns(rows), rows=len(rows), known=known)


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, pd.Series]:
    """Return the cells of each name that hold numbers, or text; null is a missing one."""
    found: dict[str, tuple[list[int], list[Any]]] = {}
    for place, row in enumerate(rows):
        for name, value in row.items():
            if isinstance(value, (int, float, str)):
                cells = found.setdefault(str(name), ([], []))
                cells[0].append(place)
                cells[1].append(value)
    return {
        name: pd.Series(
            values, index=places, dtype=np.float64 if not any(isinstance(v, str) for v in values) else object
        )
        for name, (places, values) in found.items()
    }
