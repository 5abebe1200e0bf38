"""`input.bound` from the times that a trial records anyway."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tests.helpers.records import MemoryRecord, study
from workbench.topics.input.diagnose import diagnose_input_share


def timed(wait_s: Any, step_s: Any, *, trials: int = 1) -> MemoryRecord:
    record = study()
    wait, step = np.broadcast_arrays(np.asarray(wait_s, dtype=float), np.asarray(step_s, dtype=float))
    frames = [
        pd.DataFrame({"trial": t, "step": np.arange(len(wait)), "data_wait_s": wait, "step_time_s": step})
        for t in range(trials)
    ]
    return MemoryRecord(record.trials.iloc[:trials], pd.concat(frames), record.evals, record.config)


def said(record: Any, **thresholds: float) -> Any:
    diagnosis = diagnose_input_share(record, **{"least_total_s": 0.0, **thresholds})
    assert [f.code for f in diagnosis] == ["input.bound"]
    return diagnosis["input.bound"]


def test_a_trial_that_waits_is_called_input_bound() -> None:
    finding = said(timed(np.full(60, 0.006), 0.010))
    assert (finding.status, finding.clause) == ("warn", "P1.1")
    assert finding.value == pytest.approx(0.6)
    assert "workbench input" in finding.advice[0]


def test_a_trial_with_its_data_at_hand_is_not() -> None:
    assert said(timed(np.full(60, 0.0002), 0.010)).status == "ok"


def test_a_slow_first_batch_and_one_stall_are_no_alarm() -> None:
    wait = np.full(60, 0.0001)
    step = np.full(60, 0.010)
    wait[0], step[0] = 5.0, 5.01
    wait[30], step[30] = 2.0, 2.01
    assert said(timed(wait, step)).value == pytest.approx(0.01, rel=0.1)


def test_short_waits_of_a_tiny_model_are_no_alarm() -> None:
    finding = said(timed(np.full(60, 0.0001), 0.0003))
    assert finding.status == "ok"
    assert "too little time to matter" in finding.summary
    assert said(timed(np.full(60, 0.0001), 0.0003), least_wait_s=1e-5).status == "warn"


def test_a_run_that_waits_for_seconds_in_all_has_nothing_to_gain() -> None:
    """60 steps of 6 ms are 0.4 s; the workload's own 20,000 are two minutes."""
    record = timed(np.full(60, 0.006), 0.010)
    record.config["total_steps"] = 60
    assert said(record, least_total_s=10.0).status == "ok"
    record.config["total_steps"] = 20_000
    assert said(record, least_total_s=10.0).status == "warn"


@pytest.mark.parametrize(
    ("wait", "step"),
    [(np.full(10, 0.006), 0.010), (np.full(60, np.nan), 0.010), (np.full(60, 0.0), 0.0), (np.full(60, 0.01), np.inf)],
)
def test_too_short_nan_and_zero_times_are_not_measured(wait: Any, step: Any) -> None:
    assert said(timed(wait, step)).status == "not_measured"


def test_a_record_without_times_is_not_measured() -> None:
    assert said(study()).status == "not_measured"


@dataclass
class WithLanes(MemoryRecord):
    lanes: Any = None


def test_trials_that_share_their_loading_are_left_out() -> None:
    record = timed(np.full(60, 0.006), 0.010, trials=3)
    fields = {name: getattr(record, name) for name in ("trials", "steps", "evals", "config")}
    together = pd.DataFrame({"trial": record.trials["trial"], "lanes": [3.0, 3.0, 3.0]})
    finding = said(WithLanes(**fields, lanes=together))
    assert finding.status == "not_measured"
    assert "share the loading" in finding.summary
    one = pd.DataFrame({"trial": record.trials["trial"], "lanes": [1.0, 3.0, 3.0]})
    finding = said(WithLanes(**fields, lanes=one))
    assert (finding.status, finding.evidence["trials"]) == ("warn", [int(record.trials["trial"].iloc[0])])
