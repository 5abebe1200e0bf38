"""Plain JSON values out of whatever a result holds: valid JSON, unknown numbers null, infinities as words."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np


def to_json(value: Any) -> Any:
    """Turn NumPy values, paths and containers into JSON values; NaN becomes None, infinities "inf"/"-inf"."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return _json_number(value)
    if isinstance(value, Mapping):
        return {str(k): to_json(v) for k, v in value.items()}
    if isinstance(value, np.ndarray):
        return [to_json(v) for v in value.tolist()]
    if isinstance(value, (list, tuple)):
        return [to_json(v) for v in value]
    if isinstance(value, Path):
        return str(value)
    return value


def dumps(value: Any) -> str:
    """Return `value` as valid, indented JSON."""
    return json.dumps(to_json(value), indent=1, allow_nan=False)


def number(value: Any) -> float:
    """Read a number of a record or of a JSON file: None is NaN, "inf" and "-inf" are infinities."""
    if value is None or isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def _json_number(value: float) -> float | str | None:
    if math.isnan(value):
        return None
    return value if math.isfinite(value) else ("inf" if value > 0 else "-inf")
