"""`judge_run`: everything that can be said of one watched run; `judge_watched` writes it down."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from workbench.curves.judged import judged
from workbench.curves.losses import nothing_learns
from workbench.curves.minimised import judged_without_loss
from workbench.curves.trial_curves import RecordLike
from workbench.findings.causes import causes_first
from workbench.findings.diagnosis import Diagnosis
from workbench.findings.finding import Finding
from workbench.record.folder import write_json
from workbench.record.read import open_record
from workbench.topics.batch_norm.diagnose import diagnose_seen_batches
from workbench.topics.clipping.diagnose import CODES as CLIPPING
from workbench.topics.clipping.diagnose import clipped_values, diagnose_clipping
from workbench.topics.input.diagnose import diagnose_input_share
from workbench.topics.loop.diagnose import diagnose_loop
from workbench.topics.loop.diagnose_fit import own_settings, underfits
from workbench.topics.one_batch.diagnose import falls_without_end
from workbench.topics.schedule.diagnose import CODES as SCHEDULE
from workbench.topics.schedule.diagnose import diagnose_schedule
from workbench.topics.stability.diagnose import CODES as STABILITY
from workbench.topics.stability.diagnose import diagnose_instability

_ONE_RUN = "Does not apply: one run does not show at which learning rate training becomes unstable; `workbench diagnose` and `wb.diagnose_function` search for it."

_LEFT = "whether another learning rate trains better takes other runs (wb.diagnose_function)"


def judge_run(record: RecordLike) -> Diagnosis:
    """Return what the loop's facts and its curves tell: faults of the loop, stability, schedule, clipping, waits for data."""
    found = (
        diagnose_loop(record)
        + Diagnosis.of(record, _curves(record))
        + diagnose_input_share(record)
        + diagnose_seen_batches(record)
        + underfits(record)
    )
    told = judged_without_loss(record, found).findings
    loop = record.facts.get("loop") or {}
    if not loop.get("updates", 1):  # one reason instead of what each check lacks
        why: dict[str, Any] = {"summary": "Not measured: no update was made."}
        if not loop["order"]["backwards"]:
            why = {
                "summary": "Not measured: no backward pass and no update was made while the loop was watched.",
                "advice": ("Put the whole training loop between the beginning and the end of watching, and look whether its loader gives batches and its loss is one of torch.",),
            }  # fmt: skip
        told = tuple(replace(f, **why) if f.status == "not_measured" else f for f in told)
    left = "; ".join(filter(None, [found.left, _LEFT if loop.get("updates", 1) else ""]))
    return replace(found, findings=causes_first(told), left=left)


def judge_watched(path: Path) -> Diagnosis:
    """Return the diagnosis of a watched run's folder, and write `diagnosis.json` into it."""
    record = open_record(path)
    diagnosis = replace(judge_run(record), path=path)
    write_json(path / "diagnosis.json", diagnosis.to_dict())
    return diagnosis


def _curves(record: RecordLike) -> Iterable[Finding]:
    steps = record.steps
    if "loss" not in steps or not steps["loss"].notna().any():
        reason = "no update has a loss: no backward pass on a single number was seen before one"
        for codes, names in (
            (STABILITY, STABILITY),
            (SCHEDULE, SCHEDULE),
            (CLIPPING, ("clipping.aggressive", "clipping.nonfinite")),
        ):
            yield from (codes.not_measured(code, reason) for code in names)
        return
    study = judged(record)
    table = study.sweep()
    yield nothing_learns(study, table)
    yield from own_settings(study, table.chance)
    yield from filter(None, [falls_without_end(study)])
    for finding in diagnose_instability(study):
        if finding.code == "stability.headroom" and finding.status == "not_measured":
            yield STABILITY.finding(finding.code, "ok", _ONE_RUN)
        else:
            yield finding
    yield from diagnose_schedule(study, restarts_planned=True)
    clipped = diagnose_clipping(study)
    if study.config.get("max_grad_norm") is None and (values := clipped_values(record)) is not None:
        yield values
    elif study.config.get("max_grad_norm") is None:
        yield CLIPPING.finding(
            "clipping.aggressive", "ok", "Does not apply: no update is made with gradients clipped by their norm."
        )
    elif "grad_norm" not in steps:
        reason = "no gradient norm was recorded, as of parameters that are spread over processes"
        yield CLIPPING.not_measured("clipping.aggressive", reason)
    else:
        yield clipped["clipping.aggressive"]
    yield clipped["clipping.nonfinite"]
