"""Numbers under the figures of the report."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from workbench.findings.diagnosis import Diagnosis
from workbench.plots.frames import curve, trials_in
from workbench.plots.words import counted, first_and_end, number_text

__all__ = ["curve_numbers", "few_runs", "sweep_numbers", "trained_lrs"]

MAX_CURVES = 6
"""Runs that a picture of curves shows where nothing says which ones matter: as many as there are line styles."""


def trained_lrs(record: Any) -> list[float]:
    """Return the learning rates that were trained to their end, in order: those of which the sweep's picture has a point."""
    rows = _swept(record)
    return sorted({float(f"{lr:.6g}") for lr in rows["peak_lr"]}) if len(rows) else []


def _swept(record: Any) -> pd.DataFrame:
    trials: pd.DataFrame = record.trials
    if not {"stage", "state", "peak_lr"} <= set(trials):
        return trials.iloc[:0]
    return trials[
        trials["stage"].isin(("lr_sweep", "lr_unstable", "baseline")) & trials["state"].isin(("complete", "diverged"))
    ]


def sweep_numbers(record: Any, _: Diagnosis) -> str:
    """Return how many learning rates were trained, and from where to where."""
    rows, lrs = _swept(record), trained_lrs(record)
    diverged = int((rows["state"] == "diverged").sum())
    ended = f"; {counted(diverged, 'run')} ended non-finite" if diverged else ""
    ends = f"from {number_text(lrs[0])} to {number_text(lrs[-1])}"
    return f"{counted(len(lrs), 'learning rate')} {ends} in {counted(len(rows), 'run')}{ended}."


def few_runs(record: Any) -> list[int] | None:
    """Return the runs to draw of a study that looks for no best learning rate: at most six, spread over it; None for all."""
    numbers = trials_in(record)
    picked = np.linspace(0, len(numbers) - 1, MAX_CURVES).round().astype(int)
    return [numbers[k] for k in picked] if len(numbers) > MAX_CURVES else None


def curve_numbers(record: Any, _: Diagnosis) -> str:
    """Return how many runs ended no lower than they began."""
    numbers = trials_in(record)
    if not numbers:
        return ""
    outcomes = [first_and_end(curve(record, trial, "loss")[1]) for trial in numbers]
    up = sum(not np.isfinite(end) or end >= first for first, end in outcomes)
    return f"Of the study's {counted(len(numbers), 'run')}, {up or 'none'} ended no lower than {'they' if up > 1 else 'it'} began."
