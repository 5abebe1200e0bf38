"""Read `diagnosis.json` back, so that a report can be written again without a second look at the curves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from workbench.errors import RecordError
from workbench.findings.diagnosis import Diagnosis
from workbench.findings.finding import Finding

_INFINITE = {"inf": float("inf"), "-inf": float("-inf")}
_NUMBERS = ("value", "threshold")


def read_diagnosis(path: str | Path) -> Diagnosis:
    """Return the diagnosis that a study's folder, or a `diagnosis.json`, holds.

    Raises:
        RecordError: the file is missing, damaged, or of another schema.
    """
    file = Path(path)
    if file.is_dir():
        file /= "diagnosis.json"
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        return Diagnosis(
            findings=tuple(_finding(finding) for finding in values["findings"]),
            workload=values["workload"],
            command=values["command"],
            cost=values["cost"],
            recommendation=values["recommendation"],
            path=file.parent,
        )
    except FileNotFoundError as error:
        raise RecordError(f"{file} is missing: the study was not diagnosed, or the folder is another one.") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RecordError(f"{file} cannot be read ({error}); diagnose the study again.") from error


def _finding(values: dict[str, Any]) -> Finding:
    numbers = {name: _INFINITE.get(values[name], values[name]) for name in _NUMBERS}
    return Finding(**{**values, **numbers, "advice": tuple(values["advice"])})
