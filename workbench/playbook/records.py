"""`diagnosis_of`: what can be said of any study on disk, whatever it was made for."""

from __future__ import annotations

from importlib import import_module

from workbench.findings.diagnosis import Diagnosis
from workbench.findings.stored import read_diagnosis
from workbench.record.read import StudyRecord, TrialRecord
from workbench.topics.lr_sweep.diagnose import diagnose_lr_sweep
from workbench.topics.stability.diagnose import diagnose_instability

__all__ = ["diagnosis_of"]

OWN = (
    "architecture",
    "batch_norm",
    "batch_size",
    "checkpoints",
    "clipping",
    "evaluation",
    "evaluation_sample",
    "hosts",
    "input_pipeline",
    "instability",
    "optimizers",
    "parameter_server",
    "warmup",
)
"""Kinds of studies whose diagnosis has the study's name and needs nothing but its record."""


def diagnosis_of(record: StudyRecord | TrialRecord) -> Diagnosis:
    """Return the diagnosis that is kept with a study, else that of its kind; for a single trial, sweep and stability.

    A study that was interrupted is diagnosed as far as it goes.

    Raises:
        RecordError: the record is damaged.
    """
    if (record.path / "diagnosis.json").exists():
        return read_diagnosis(record.path)
    kind = record.study.get("kind") if isinstance(record, StudyRecord) else None
    if isinstance(record, StudyRecord) and kind == "diagnosis":
        from workbench.playbook.walk import diagnose_record  # it trains, and so brings torch

        return diagnose_record(record)
    if kind in OWN:
        own: Diagnosis = getattr(import_module("workbench"), f"diagnose_{kind}")(record)
        return own
    return diagnose_lr_sweep(record) + diagnose_instability(record)
