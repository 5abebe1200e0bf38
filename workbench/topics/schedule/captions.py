"""Numbers under the figures of the report."""

from __future__ import annotations

from typing import Any

from workbench.findings.diagnosis import Diagnosis
from workbench.plots.words import counted, number_text

__all__ = ["schedule_numbers"]


def schedule_numbers(record: Any, diagnosis: Diagnosis) -> str:
    """Return the recommended schedule beside the baseline's."""
    chosen = (diagnosis.recommendation or {}).get("config")
    before = _shape(record.config)
    if not chosen or _shape(chosen) == before:
        return f"The schedule is the baseline's: {before}."
    return f"Recommended: {_shape(chosen)}. The baseline as it ran: {before}."


def _shape(config: Any) -> str:
    warmup = int(config.get("warmup_steps") or 0)
    ramp = f"after {counted(warmup, 'step')} of warmup" if warmup else "without warmup"
    kind = str(config.get("schedule") or "constant")
    return f"{kind} at a peak of {number_text(config['peak_lr'])} {ramp}, {counted(int(config['total_steps']), 'step')} in all"
