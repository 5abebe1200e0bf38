"""What a figure of the report shows here: one or two sentences with this record's numbers, under the picture.

The numbers are those that the figure draws: a finding's own sentence where a finding speaks of it, else a few quantiles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from workbench.errors import UsageError
from workbench.findings.diagnosis import Diagnosis
from workbench.plots.frames import curve, default_trial, evaluations, lr_of, trials_in
from workbench.report.html import counted, number_text

__all__ = ["few_runs", "shown_here", "swept_lrs"]

Floats = NDArray[np.float64]
EVERY_STEPS = 100
"""The coarse interval that the picture of the probe draws (F1.10)."""
MAX_RUNS = 4
"""Runs that a sentence names one by one."""
MAX_CURVES = 6
"""Runs that a picture of curves shows where nothing says which ones matter: as many as there are line styles."""


def shown_here(name: str, codes: Sequence[str], record: Any, diagnosis: Diagnosis) -> str:
    """Return what this figure shows in this record, "" where there is nothing to say.

    Args:
        name: of the figure, as in `ReportFigure`.
        codes: of the findings that speak of it.
        record: a study or a trial.
        diagnosis: what was found in it.
    """
    numbers_of = _COUNTED.get(name)
    try:
        numbers = numbers_of(record, diagnosis) if numbers_of else ""
    except (KeyError, IndexError, TypeError, ValueError, UsageError):
        numbers = ""  # a record of another kind lacks these columns; the findings still speak
    said = [] if numbers and name in _ENOUGH else [_said(code, diagnosis) for code in codes]
    return " ".join(dict.fromkeys(line for line in (numbers, *said) if line))


def _said(code: str, diagnosis: Diagnosis) -> str:
    """A finding's sentence, where it has something to say."""
    if code not in diagnosis:
        return ""
    found = diagnosis[code]
    quiet = found.status == "not_measured" or (found.status == "ok" and found.summary.startswith("Not seen"))
    return "" if quiet else found.summary


def swept_lrs(record: Any) -> list[float]:
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


def _sweep(record: Any, _: Diagnosis) -> str:
    rows, lrs = _swept(record), swept_lrs(record)
    diverged = int((rows["state"] == "diverged").sum())
    ended = f"; {counted(diverged, 'run')} ended non-finite" if diverged else ""
    ends = f"from {number_text(lrs[0])} to {number_text(lrs[-1])}"
    return f"{counted(len(lrs), 'learning rate')} {ends} in {counted(len(rows), 'run')}{ended}."


def few_runs(record: Any) -> list[int] | None:
    """Return the runs to draw of a study that looks for no best learning rate: at most six, spread over it; None for all."""
    numbers = trials_in(record)
    picked = np.linspace(0, len(numbers) - 1, MAX_CURVES).round().astype(int)
    return [numbers[k] for k in picked] if len(numbers) > MAX_CURVES else None


def _curves(record: Any, _: Diagnosis) -> str:
    numbers = trials_in(record)
    if not numbers:
        return ""
    outcomes = [_path(curve(record, trial, "loss")[1]) for trial in numbers]
    up = sum(not np.isfinite(end) or end >= first for first, end in outcomes)
    return f"Of the study's {counted(len(numbers), 'run')}, {up or 'none'} ended no lower than {'they' if up > 1 else 'it'} began."


def _probe(record: Any, _: Diagnosis) -> str:
    trial = trials_in(record, "probe")[0]
    steps, values = evaluations(record, trial, split="validation", metric="loss")
    if steps.size < 3:
        steps, values = curve(record, trial, "loss")
    peak = int(np.argmax(np.where(np.isfinite(values), values, np.inf)))
    coarse = values[steps % EVERY_STEPS == 0]
    return (
        f"At lr {number_text(lr_of(record, trial))} the loss starts at {number_text(float(values[0]))} and is largest, "
        f"{number_text(float(values[peak]))}, at step {int(steps[peak]):,}; every {EVERY_STEPS} steps would have shown "
        f"at most {number_text(float(np.where(np.isfinite(coarse), coarse, np.inf).max()))}."
    )


def _confirm(record: Any, _: Diagnosis) -> str:
    lines = []
    for trial in trials_in(record, "confirm")[:MAX_RUNS]:
        values = curve(record, trial, "loss")[1]
        first, end = _path(values)
        how = f"goes from {number_text(first)} to {number_text(end)}" if np.isfinite(end) else "ends non-finite"
        lines.append(f"lr {number_text(lr_of(record, trial))} {how}")
    return f"The loss at {'; that at '.join(lines)}." if lines else ""


def _norms(record: Any, diagnosis: Diagnosis) -> str:
    trial = default_trial(record, diagnosis)
    steps, norms = _finite(*curve(record, trial, "grad_norm"))
    peak = int(np.argmax(norms))
    middle = float(np.median(norms))
    times = f", {number_text(float(norms[peak]) / middle)} times the median {number_text(middle)}" if middle else ""
    return f"Trial {trial}: the largest norm is {number_text(float(norms[peak]))}, at step {int(steps[peak]):,}{times}."


def _histogram(record: Any, diagnosis: Diagnosis) -> str:
    trial = default_trial(record, diagnosis)
    _, norms = _finite(*curve(record, trial, "grad_norm"))
    low, high = (number_text(float(value)) for value in np.percentile(norms, (50, 90)))
    chosen = diagnosis["clipping.threshold"].value if "clipping.threshold" in diagnosis else None
    proposed = f"; the proposed clipping threshold is {number_text(chosen)}" if chosen is not None else ""
    return (
        f"Over all {norms.size:,} steps of trial {trial} the median is {low} and the 90th percentile {high}{proposed}."
    )


def _proof(record: Any, diagnosis: Diagnosis) -> str:
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


def _schedule(record: Any, diagnosis: Diagnosis) -> str:
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


_COUNTED: dict[str, Callable[[Any, Diagnosis], str]] = {
    "lr-sweep": _sweep,
    "loss-curves": _curves,
    "probe": _probe,
    "confirm": _confirm,
    "grad-norm": _norms,
    "grad-norm-histogram": _histogram,
    "proof": _proof,
    "schedule": _schedule,
}
"""Figures about which no finding says all that they show."""
_ENOUGH = {"probe", "confirm", "grad-norm", "grad-norm-histogram", "proof", "schedule"}
"""Figures of one run or two, while the findings beside them speak of the whole study."""


def _path(values: Floats) -> tuple[float, float]:
    """First value, and the mean of the last tenth, as the sweep judges a run."""
    return float(values[0]), float(values[-max(1, len(values) // 10) :].mean())


def _finite(steps: Floats, values: Floats) -> tuple[Floats, Floats]:
    known = np.isfinite(values)
    return steps[known], values[known]
