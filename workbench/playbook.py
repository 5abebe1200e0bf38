"""`diagnose`: the walk through the playbook, from the first look at the data to a config to paste (design of F1, F2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from workbench.config import TrainConfig
from workbench.diagnostics.base import Diagnosis
from workbench.diagnostics.instability import diagnose_instability
from workbench.diagnostics.lr_sweep import diagnose_lr_sweep
from workbench.diagnostics.preflight import diagnose_preflight
from workbench.diagnostics.selection import compare_selected
from workbench.plain import dumps
from workbench.record import StudyRecord, open_record
from workbench.record_parts import write_atomic
from workbench.studies.instability import InstabilityStudy
from workbench.studies.lr_sweep import LRSweep
from workbench.studies.preflight import collect_preflight
from workbench.studies.session import Session, open_session
from workbench.train.trainer import Trainer
from workbench.workloads.base import Workload
from workbench.workloads.registry import load_workload

__all__ = ["diagnose", "diagnose_record"]


@dataclass(frozen=True, kw_only=True)
class _Walk:
    """The studies of one diagnosis, in the playbook's order."""

    sweep: LRSweep
    instability: InstabilityStudy

    def run(self, session: Session) -> None:
        if "preflight" not in session.record.facts:
            session.facts(preflight=collect_preflight(session.workload, session.config, session.device))
        session.trial(session.config, stage="baseline")
        self.sweep.extend(session)
        self.instability.extend(session)


def diagnose(
    workload: Workload | str,
    out: str | Path | None = None,
    *,
    steps: int | None = None,
    study: str | None = None,
    note: str | None = None,
    device: str = "auto",
    trainer: Trainer | None = None,
    sweep: LRSweep | None = None,
    instability: InstabilityStudy | None = None,
    command: str | None = None,
    progress: bool = False,
) -> Diagnosis:
    """Walk the playbook for a workload: verdict, evidence, and a recommended config, in one folder.

    Pre-flight, baseline, learning-rate sweep, instability (probe, confirmation and fix runs), and a comparison with the
    baseline by retrospective checkpoint selection (F3.12, P4.7). The same call on the same folder goes on where an
    interrupted one stopped, and answers from disk when all is there.

    Args:
        workload: a `Workload`, or a name for `load_workload`.
        out: the study's folder; None is a new one under `runs/`.
        steps: length of a full trial; None is the baseline's.
        study: name of the study; None is the folder's.
        note: a short description (P5.4).
        device: where to train; ignored when `trainer` is given.
        trainer: None is the local `Trainer`.
        sweep: how to sweep; None is `LRSweep(refinements=0)`: lr* to a factor of 2 on minibatches, for its price.
        instability: how to look for instability; None is `InstabilityStudy(confirm_all=False)`.
        command: what reproduces this; None is this process's command line.
        progress: show one progress bar.

    Returns:
        The diagnosis; `diagnosis.json` and `report.html` are in its `path`.
    """
    if isinstance(workload, str):
        workload = load_workload(workload)
    walk = _Walk(sweep=sweep or LRSweep(refinements=0), instability=instability or InstabilityStudy(confirm_all=False))
    with open_session(
        workload,
        stem="diagnosis",
        settings=asdict(walk),
        steps=steps,
        trainer=trainer or Trainer(device=device),
        out=out,
        name=study,
        note=note,
        command=command,
        progress=progress,
    ) as session:
        walk.run(session)
        record = session.record
        diagnosis = diagnose_record(record, baseline=session.config)
        write_atomic(record.path / "diagnosis.json", dumps(diagnosis.to_dict()).encode())
    from workbench.report import write_report

    write_report(open_record(record.path), diagnosis, record.path / "report.html")
    return diagnosis


def diagnose_record(record: StudyRecord, *, baseline: TrainConfig | None = None) -> Diagnosis:
    """Return the diagnosis of a study that is on disk: findings, cost and recommendation."""
    joined = diagnose_preflight(record) + diagnose_lr_sweep(record) + diagnose_instability(record)
    baseline = baseline or TrainConfig.from_dict(record.config)
    return replace(
        joined,
        cost=_cost(record),
        recommendation=_recommendation(record, joined, baseline),
        path=record.path,
        command=record.command,
    )


def _cost(record: StudyRecord) -> dict[str, Any]:
    trials = record.trials
    alone = trials["seconds"][trials["stage"] == "baseline"]
    seconds = float(trials["seconds"].sum())
    return {
        "steps": int(trials["steps_run"].sum()),
        "seconds": seconds,
        "trials": len(trials),
        "baseline_runs": seconds / float(alone.iloc[0]) if len(alone) and float(alone.iloc[0]) > 0 else None,
    }


def _recommendation(record: StudyRecord, diagnosis: Diagnosis, baseline: TrainConfig) -> Mapping[str, Any]:
    """Adopt lr* where its run's selected checkpoint beats the baseline's by more than the noise (F3.12)."""
    lr = diagnosis["lr.best"].value
    comparison = compare_selected(record, baseline=baseline.peak_lr, candidate=lr)
    config = baseline.replace(peak_lr=lr) if comparison["adopted"] and lr is not None else baseline
    changed = [name for name, value in config.to_dict().items() if value != baseline.to_dict()[name]]
    return {"config": config.to_dict(), "changed": changed, "paste": config.paste(), **comparison}
