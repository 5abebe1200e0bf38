"""Reading a record for a figure: one trial's curve, the trials of a stage, a finding that may not be there."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.curves.trial_curves import RecordLike as Record
from workbench.findings.diagnosis import Diagnosis
from workbench.findings.finding import Finding
from workbench.record.json_values import number
from workbench.record.metrics import passed_over
from workbench.record.read import periodic_rows

Floats = NDArray[np.float64]


def curve(record: Record, trial: int, column: str) -> tuple[Floats, Floats]:
    """Return (steps, values) of one trial, in order of the steps; empty where it was not recorded."""
    table = record.steps
    if column not in table or "trial" not in table:
        return np.empty(0), np.empty(0)
    rows = table[table["trial"] == trial].sort_values("step", kind="stable")
    rows = rows[~passed_over(rows) | rows[column].notna()]
    return rows["step"].to_numpy(dtype=np.float64), rows[column].to_numpy(dtype=np.float64, na_value=np.nan)


def part_measured(record: Record, trial: int, steps: Floats) -> str:
    """Return as "37 of 440 updates" that a trial's curve has no more steps than these; "" where it has each."""
    every = int((record.steps["trial"] == trial).sum())
    return f"{steps.size:,} of {every:,} updates" if steps.size < every else ""


def evaluations(record: Record, trial: int, *, split: str, metric: str) -> tuple[Floats, Floats]:
    """Return (steps, values) of one evaluated metric, in order of the steps; empty where there is none."""
    table = record.evals
    if "trial" not in table or table.empty:
        return np.empty(0), np.empty(0)
    table = periodic_rows(table)
    rows = table[(table["trial"] == trial) & (table["split"] == split) & (table["metric"] == metric)]
    rows = rows.drop_duplicates("step", keep="last").sort_values("step", kind="stable")
    return rows["step"].to_numpy(dtype=np.float64), rows["value"].to_numpy(dtype=np.float64, na_value=np.nan)


def trials_in(record: Record, *stages: str) -> list[int]:
    """Return the numbers of the trials of these stages, in order; of all trials when no stage is named."""
    table = record.trials
    if "trial" not in table or table.empty:
        return []
    rows = table[table["stage"].isin(stages)] if stages else table
    return [int(trial) for trial in rows["trial"]]


def trials_at(record: Record, lr: float, *stages: str) -> list[int]:
    """Return the trials of these stages whose peak_lr is `lr`, to nine digits."""
    table = record.trials
    if not {"trial", "stage", "peak_lr"} <= set(table.columns):
        return []
    lrs = table["peak_lr"].to_numpy(dtype=np.float64, na_value=np.nan)
    found = np.isclose(lrs, lr, rtol=1e-9, atol=0.0) & (table["stage"].isin(stages).to_numpy() if stages else True)
    return [int(trial) for trial in table["trial"][found]]


def lr_of(record: Record, trial: int) -> float:
    """Return the peak learning rate of a trial, NaN where it is unknown."""
    return number(field_of(record, trial, "peak_lr"))


def field_of(record: Record, trial: int, name: str) -> Any:
    """Return one field of a trial's row, None where it is unknown or NaN."""
    table = record.trials
    if name not in table or "trial" not in table:
        return None
    rows = table.loc[table["trial"] == trial, name]
    value = rows.iloc[0] if len(rows) else None
    return None if isinstance(value, float) and np.isnan(value) else value


def finding(diagnosis: Diagnosis | None, code: str) -> Finding | None:
    """Return the finding with this code, None where it is missing."""
    return diagnosis[code] if diagnosis is not None and code in diagnosis else None


def best_lr(diagnosis: Diagnosis | None) -> tuple[float, float]:
    """Return (lr*, the trained lr with the lowest loss), which differ where lr* lies between two; NaN where unknown."""
    found = finding(diagnosis, "lr.best")
    if found is None:
        return np.nan, np.nan
    lr = number(found.value)
    trained = number(found.evidence.get("measured_lr"))
    return lr, lr if np.isnan(trained) else trained


def recommended(diagnosis: Diagnosis | None) -> tuple[float, list[int], str]:
    """Return the learning rate of an adopted recommendation, its trials, the one that chose it first, and what it is called; NaN and none without one."""
    found = (diagnosis.recommendation if diagnosis is not None else None) or {}
    if not found.get("adopted"):
        return np.nan, [], ""
    trials = [found.get("chosen", {}).get("trial"), *found.get("recommended", {}).get("trials", ())]
    word = "recommended" if found.get("proof") else "worth trying"
    return number(found["config"]["peak_lr"]), [trial for trial in trials if trial is not None], word


def baseline_lr(record: Record) -> float:
    """Return the peak_lr of the config that the study started from, NaN where it is unknown."""
    return number(record.config.get("peak_lr"))


def default_trial(record: Record, diagnosis: Diagnosis | None) -> int:
    """Return the baseline's trial, else the sweep's at the baseline's lr or at lr*, else the first; -1 without any."""
    candidates = trials_in(record, "baseline")
    for lr in (baseline_lr(record), best_lr(diagnosis)[1]):
        candidates += trials_at(record, lr, "lr_sweep")
    return next(iter(candidates + trials_in(record)), -1)
