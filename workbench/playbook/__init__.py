"""The walk from a workload to a verdict, and what can be said of any study on disk."""

from __future__ import annotations

from workbench.findings.diagnosis import Diagnosis, read_diagnosis
from workbench.record.read import StudyRecord, TrialRecord
from workbench.topics.lr_sweep.diagnose import diagnose_lr_sweep
from workbench.topics.registry import STUDIES
from workbench.topics.stability.diagnose import diagnose_instability


def diagnosis_of(record: StudyRecord | TrialRecord) -> Diagnosis:
    """Return the diagnosis that is kept with a study, else that of its kind; for a single trial, sweep and stability."""
    if (record.path / "diagnosis.json").exists():
        return read_diagnosis(record.path)
    kind = record.study.get("kind") if isinstance(record, StudyRecord) else None
    if isinstance(record, TrialRecord) and record.facts.get("loop"):
        kind = "watch"  # its one trial is all there is
    if isinstance(record, StudyRecord) and kind == "diagnosis":
        from workbench.playbook.verdict import diagnose_record  # it trains, and so brings torch

        return diagnose_record(record)
    if isinstance(record, StudyRecord) and kind == "program":
        from workbench.playbook.program import judge_program

        return judge_program(record)
    own = STUDIES[kind].diagnose if kind in STUDIES else None
    if own is not None:
        return own(record)
    return diagnose_lr_sweep(record) + diagnose_instability(record)
