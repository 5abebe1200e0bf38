"""`diagnose`: the walk through the playbook, from the first look at the data to a config to paste (design of F1, F2)."""

from __future__ import annotations

import math
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


_AFFORDABLE = InstabilityStudy(confirm_all=False, fixes=("warmup",))


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
        instability: how to look for instability; None is `InstabilityStudy` at a price of ten baseline
            runs in all: one confirmation run where it answers, and warmup as the one fix.
        command: what reproduces this; None is this process's command line.
        progress: show one progress bar.

    Returns:
        The diagnosis; `diagnosis.json` and `report.html` are in its `path`.
    """
    if isinstance(workload, str):
        workload = load_workload(workload)
    walk = _Walk(sweep=sweep or LRSweep(refinements=0), instability=instability or _AFFORDABLE)
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
        call=f"wb.diagnose({getattr(workload, 'name', workload)!r}, {str(out)!r}, steps={steps!r})",
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
    """Adopt lr*, or a fix that made a larger lr train better, where its selected checkpoint beats the baseline's."""
    fields = baseline.to_dict()
    own = _trials_with(record, fields)
    candidates: dict[str, list[int]] = {}
    lr = diagnosis["lr.best"].value
    if lr is not None and not math.isclose(lr, baseline.peak_lr, rel_tol=1e-9):
        candidates[f"lr {lr:.4g}"] = _trials_with(record, fields | {"peak_lr": lr})
    if diagnosis["lr.at_edge"].evidence.get("harmful"):
        for fix in diagnosis["lr.at_edge"].evidence["fix_trials"]:
            if not fix["lasting"]:
                candidates[f"fix run {fix['trial']}, lr {fix['lr']:.4g}"] = [fix["trial"]]
    comparison = compare_selected(record, baseline=own, candidates=candidates)
    changes: dict[str, Any] = {}
    if comparison["adopted"]:
        stored = record.trial(comparison["recommended"]["trials"][0]).config
        changes = {n: stored[n] for n in ("peak_lr", "warmup_steps", "max_grad_norm") if stored[n] != fields[n]}
    config = baseline.replace(**changes)
    return {"config": config.to_dict(), "changed": sorted(changes), "paste": config.paste(), **comparison}


def _trials_with(record: StudyRecord, fields: Mapping[str, Any]) -> list[int]:
    """Return the trials that were trained with these config fields, under any seed."""
    seeds = ("shared_seed", "per_host_seed")
    wanted = {name: value for name, value in fields.items() if name not in seeds}
    found = []
    for trial in record:
        stored = trial.config
        if all(_equal(stored[name], value) for name, value in wanted.items()):
            found.append(trial.number)
    return found


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-9)
    return bool(one == other)
