"""Numbers under the figures of the report."""

from __future__ import annotations

from typing import Any

import numpy as np

from workbench.findings.diagnosis import Diagnosis
from workbench.plots.words import counted, number_text

__all__ = ["proof_numbers"]


def proof_numbers(record: Any, diagnosis: Diagnosis) -> str:
    """Return under how many seeds the candidate is better."""
    found = diagnosis.recommendation or {}
    proof = found["proof"]
    candidate = np.asarray(proof["candidate"], dtype=np.float64)
    sign = -1 if found.get("select_mode", record.config.get("select_mode")) == "max" else 1
    lines = []
    for arm in proof["arms"]:
        values = np.asarray(arm["values"], dtype=np.float64)
        better = int((sign * candidate < sign * values).sum())
        lines.append(
            f"better than the {arm['name']} under {better} of {counted(len(values), 'seed')} "
            f"(mean {number_text(float(candidate.mean()))} against {number_text(float(values.mean()))})"
        )
    return f"The candidate is {' and '.join(lines)}."
