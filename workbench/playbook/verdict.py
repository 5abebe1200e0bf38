"""`diagnose_record`: the diagnosis of a study that is on disk, by every judge that knows it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from workbench.config import is_callable_name
from workbench.curves.judged import judged
from workbench.curves.minimised import judged_without_loss
from workbench.curves.seed_comparison import by_faults
from workbench.curves.trial_curves import RecordLike
from workbench.findings.answers import is_unproved
from workbench.findings.causes import causes_first
from workbench.findings.diagnosis import Diagnosis
from workbench.findings.first_look import FIRST_LOOK, as_first_look
from workbench.record.read import StudyRecord, open_record
from workbench.topics.architecture.diagnose import diagnose_architecture, excused_architecture
from workbench.topics.batch_norm.diagnose import diagnose_batch_norm
from workbench.topics.batch_size.diagnose import diagnose_noise_scale
from workbench.topics.checkpoints.diagnose import diagnose_checkpoints
from workbench.topics.clipping.diagnose import diagnose_clipping, tried_only
from workbench.topics.data.diagnose import diagnose_data
from workbench.topics.evaluation.diagnose import diagnose_evaluation
from workbench.topics.evaluation.diagnose_generalisation import diagnose_generalisation_gap, diagnose_underfit
from workbench.topics.evaluation.diagnose_sample import diagnose_evaluation_sample
from workbench.topics.input.diagnose import diagnose_input_share
from workbench.topics.lr_sweep.diagnose import diagnose_lr_sweep
from workbench.topics.lr_sweep.own_lr import settled_by_proof
from workbench.topics.one_batch.diagnose import diagnose_one_batch
from workbench.topics.one_batch.diagnose_layers import diagnose_parameters
from workbench.topics.one_batch.diagnose_preflight import diagnose_preflight, misnumbered
from workbench.topics.optimizers.constants import diagnose_replaced
from workbench.topics.parameter_server.diagnose import diagnose_parameter_server
from workbench.topics.periodicity.diagnose import diagnose_periodicity
from workbench.topics.recommendation.diagnose import cost_of, next_steps, recommend
from workbench.topics.schedule.diagnose import diagnose_schedule
from workbench.topics.stability.diagnose import diagnose_instability
from workbench.topics.warmup.diagnose import diagnose_warmup

_ELSEWHERE = (
    "batch_norm.rank_local", "batch_norm.first_device_ema", "batch_norm.variance_of_means", "checkpoints.resume_jump",
)  # fmt: skip
"""Codes that cannot warn here: they need several processes or a resumed run."""

_Judges = Mapping[str, Callable[[StudyRecord], Diagnosis]]
_BEFORE: _Judges = {
    "one_batch": diagnose_one_batch, "parameters": diagnose_parameters, "architecture": diagnose_architecture, "data": diagnose_data,
}  # fmt: skip
_AFTER: _Judges = {
    "replaced": diagnose_replaced, "noise_scale": diagnose_noise_scale, "batch_norm": diagnose_batch_norm, "parameter_server": diagnose_parameter_server,
    "generalisation": lambda record: diagnose_generalisation_gap(record) + diagnose_underfit(record),
    "evaluation": diagnose_evaluation,
}  # fmt: skip
"""Facts -> what judges them, where somebody looked."""


def _looked_at(record: StudyRecord, found: Diagnosis, judges: _Judges) -> Diagnosis:
    return sum((judge(record) for name, judge in judges.items() if name in record.facts), start=found)


def diagnose_record(record: StudyRecord) -> Diagnosis:
    """Return the diagnosis of a study that is on disk: findings, cost and recommendation."""
    before = _looked_at(record, diagnose_preflight(record), _BEFORE) + diagnose_input_share(record)
    study = judged(record)
    after = diagnose_lr_sweep(study) + diagnose_instability(study) + diagnose_periodicity(record)
    after += diagnose_schedule(study, restarts_planned=is_callable_name(record.config["schedule"]))
    after = _looked_at(record, after + diagnose_checkpoints(record), _AFTER)
    warmup = diagnose_warmup(study)
    after += warmup if "warmup" in record.facts else replace(warmup, findings=(warmup["warmup.over_cap"],))
    if "clipping_lr" in record.facts:
        after += diagnose_clipping(study) if record.config["max_grad_norm"] is not None else tried_only(study)
    after = replace(after, findings=as_first_look(record.facts, after.findings))
    reason = _nothing_trained(record, before)
    if reason is not None:
        after = replace(after, findings=tuple(replace(f, summary=f"Not measured: {reason}.") for f in after.findings))
    joined = excused_architecture(before + after)
    joined = replace(joined, findings=tuple(f for f in joined if f.code not in _ELSEWHERE))
    recommendation = recommend(study, joined)
    joined = settled_by_proof(record, joined, recommendation)
    joined, recommendation = held_to_the_end(record, joined, recommendation)
    if "evaluation_sample" in record.facts:
        refused = bool((recommendation.get("examples") or {}).get("refused"))
        joined += diagnose_evaluation_sample(record, adopted=recommendation["adopted"] or refused)
    joined = replace(
        joined, findings=causes_first(judged_without_loss(record, joined).findings), cost=cost_of(record),
        recommendation=recommendation, path=record.path, command=record.command,
    )  # fmt: skip
    left = [step.line for step in next_steps(record, joined) if not step.done and not step.tried]
    return replace(joined, recommendation=recommendation | {"next": left})


def held_to_the_end(
    record: RecordLike, diagnosis: Diagnosis, recommendation: Mapping[str, Any]
) -> tuple[Diagnosis, dict[str, Any]]:
    """Return both with what an adopted config loses by the end of its runs: `at_end`, where they are best and how they end; None for nothing."""
    late = None
    if recommendation["adopted"] and FIRST_LOOK not in record.facts:
        late = diagnose_checkpoints(record, trials=recommendation["recommended"]["trials"])["checkpoints.best_not_last"]
    if late is None or late.status != "warn":
        return diagnosis, {**recommendation, "at_end": None}
    runs = late.evidence["runs"]
    steps = [run["best_step"] for run in runs]
    end = {"best_steps": [min(steps), max(steps)], "steps": runs[0]["total_steps"], "last": fmean(run["last"] for run in runs)}  # fmt: skip
    findings = tuple(late if f.code == late.code else f for f in diagnosis)
    return replace(diagnosis, findings=findings), {**recommendation, "at_end": end}


def _nothing_trained(record: StudyRecord, before: Diagnosis) -> str | None:
    """Return why nothing could be trained on the data; None where something was."""
    preflight = record.facts.get("preflight") or {}
    if len(record.trials):
        return None
    if before["data.nonfinite"].status == "fail":
        return "the data holds values that are not finite, so nothing was trained"
    if misnumbered(preflight):
        return "targets are no classes of the model, so nothing was trained"
    if preflight.get("nonfinite_loss"):
        return "the loss is not finite before any update, so nothing was trained"
    return None


def why_left_out(diagnosis: Diagnosis) -> str:
    """Return why parts of a plan never began, of a study that has come to its end."""
    unproved = is_unproved(diagnosis.recommendation or {})
    return (
        "a fault comes first"
        if by_faults(diagnosis)
        else "the budget is spent"
        if unproved
        else "no config looks better"
    )


def with_report(folder: Path, diagnosis: Diagnosis, *, told: bool) -> Diagnosis:
    """Write the report of a study into its folder, say where where that is to be `told`, and return the diagnosis."""
    from workbench.report.write import write_report

    path = write_report(open_record(folder), diagnosis, folder / "report.html")
    if told:
        print(f"Report: {path}", file=sys.stderr)
    return diagnosis
