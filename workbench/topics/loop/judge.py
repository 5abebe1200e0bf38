"""`judge_run`: everything that can be said of one watched run; `judge_watched` writes it down."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from workbench.curves.judged import judged
from workbench.curves.trial_curves import RecordLike
from workbench.findings.causes import causes_first
from workbench.findings.diagnosis import Diagnosis
from workbench.record.folder import write_atomic
from workbench.record.json_values import dumps
from workbench.record.read import open_record
from workbench.topics.input.diagnose import diagnose_input_share
from workbench.topics.loop.diagnose import diagnose_loop
from workbench.topics.schedule.diagnose import diagnose_schedule
from workbench.topics.stability.diagnose import diagnose_instability


def judge_run(record: RecordLike) -> Diagnosis:
    """Return what the loop's facts and its curves tell: faults of the loop, stability, schedule, waits for data."""
    study = judged(record)
    found = (
        diagnose_loop(record)
        + diagnose_instability(study)
        + diagnose_schedule(study, restarts_planned=True)
        + diagnose_input_share(record)
    )
    return replace(found, findings=causes_first(found.findings))


def judge_watched(path: Path) -> Diagnosis:
    """Return the diagnosis of a watched run's folder, and write `diagnosis.json` and `report.html` into it."""
    record = open_record(path)
    diagnosis = replace(judge_run(record), path=path)
    write_atomic(path / "diagnosis.json", dumps(diagnosis.to_dict()).encode())
    return diagnosis
