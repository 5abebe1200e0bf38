"""`diagnose_input_share`: `input.bound` from what every trial records anyway, the wait and the time of each step (P1.1)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from workbench.curves.trials import RecordLike
from workbench.findings.diagnosis import Diagnosis, Finding

__all__ = ["diagnose_input_share"]

_CODE, _CLAUSE = "input.bound", "P1.1"
BLOCKS = 10
"""Stretches of a trial; the median of their shares is the trial's, so that one stall of the machine is no verdict."""


def diagnose_input_share(
    record: RecordLike,
    *,
    warn_share: float = 0.1,
    least_wait_s: float = 1e-3,
    least_total_s: float = 10.0,
    least_steps: int = 20,
) -> Diagnosis:
    """Return the one code `input.bound` of any study, from the trials that had their batches for themselves.

    Trials that train together share each batch, and their steps are as long as all of them together: what one of them would
    wait for cannot be told from that. The first step is left out: whatever is opened or started, is so there.

    Args:
        record: a study with "data_wait_s" and "step_time_s" in its steps.
        warn_share: of a step that may be waited for data (TraceML; the TensorFlow profiler has 0.05).
        least_wait_s: below which no wait is an alarm: some dozen items in memory take that much on a busy processor (rule of thumb).
        least_total_s: below which all waits of a run of the workload's own length are no alarm: nobody gains by mending them (rule
            of thumb).
        least_steps: of a trial, to say anything (rule of thumb).
    """
    found = _finding(record, warn_share, least_wait_s, least_total_s, least_steps)
    return Diagnosis.of(record, (found,))


def _finding(record: RecordLike, limit: float, least_wait_s: float, least_total_s: float, least_steps: int) -> Finding:
    steps = record.steps
    if not {"trial", "data_wait_s", "step_time_s"} <= set(steps.columns):
        return _not_measured("the record has no times of steps")
    alone = _alone(record)
    shares = {t: found for t in alone if (found := _share(steps[steps["trial"] == t], least_steps)) is not None}
    if not shares:
        together = len(record.trials) > 0 and not alone
        return _not_measured(
            "all trials trained together, and share the loading of each batch; `workbench input` measures it"
            if together
            else f"no trial of at least {least_steps} steps has finite times"
        )
    share, wait_s, step_s = (float(np.median([found[k] for found in shares.values()])) for k in range(3))
    evidence = {"trials": list(shares), "wait_s": wait_s, "step_s": step_s}
    numbers: dict[str, Any] = {"value": share, "unit": "of the step", "threshold": limit, "evidence": evidence}
    said = f"{share:.0%} of a step waits for data ({wait_s * 1e3:.3g} of {step_s * 1e3:.3g} ms)"
    own = record.facts.get("own_config") or record.config
    if share < limit or wait_s < least_wait_s or wait_s * int(own.get("total_steps") or 0) < least_total_s:
        few = "" if share < limit else ": too little time to matter"
        return Finding(code=_CODE, status="ok", clause=_CLAUSE, summary=f"{said}{few}.", **numbers)
    return Finding(
        code=_CODE, status="warn", clause=_CLAUSE, summary=f"{said}.",
        advice=(
            f"Ask where it goes, and what would help: workbench input {record.workload}.",
            "Load ahead in worker processes: num_workers of the workload.",
        ),
        **numbers,
    )  # fmt: skip


def _not_measured(why: str) -> Finding:
    return Finding(code=_CODE, status="not_measured", clause=_CLAUSE, summary=f"Not measured: {why}.")


def _alone(record: RecordLike) -> list[int]:
    """Return the trials that were no lanes among others, as far as the record says how they trained."""
    lanes = getattr(record, "lanes", None)
    trials = [] if "trial" not in record.trials else [int(t) for t in record.trials["trial"]]
    if not isinstance(lanes, pd.DataFrame) or "lanes" not in lanes:
        return trials
    together = set(lanes.loc[lanes["lanes"] > 1, "trial"])
    return [t for t in trials if t not in together]


def _share(rows: pd.DataFrame, least_steps: int) -> tuple[float, float, float] | None:
    """Return (share, wait_s, step_s) of one trial, None where it cannot be told."""
    rows = rows.sort_values("step").iloc[1:]
    wait, step = (rows[name].to_numpy(dtype=np.float64, na_value=np.nan) for name in ("data_wait_s", "step_time_s"))
    known = np.isfinite(wait) & np.isfinite(step) & (step > 0)
    wait, step = wait[known], step[known]
    if len(wait) < least_steps - 1:
        return None
    blocks = [(w.sum() / s.sum(), w.mean(), s.mean()) for w, s in zip(np.array_split(wait, BLOCKS), np.array_split(step, BLOCKS), strict=True)]  # fmt: skip
    share, wait_s, step_s = np.median(np.array(blocks), axis=0)
    return float(share), float(wait_s), float(step_s)
