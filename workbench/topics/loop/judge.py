"""`judge_run`: everything that can be said of one watched run; `judge_watched` writes it down."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from workbench.curves.judged import JudgedStudy, judged
from workbench.curves.losses import nothing_learns
from workbench.curves.minimised import judged_without_loss
from workbench.curves.pace import PACE, unslowed
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
from workbench.topics.lr_sweep.own_lr import OWN_LR_CODES
from workbench.topics.one_batch.diagnose import falls_without_end
from workbench.topics.schedule.diagnose import CODES as SCHEDULE
from workbench.topics.schedule.diagnose import diagnose_schedule
from workbench.topics.stability.diagnose import CODES as STABILITY
from workbench.topics.stability.diagnose import diagnose_instability

_ONE_RUN = "Does not apply: one run does not show at which learning rate training becomes unstable; `workbench diagnose` and `wb.diagnose_function` search for it."


def judge_run(record: RecordLike) -> Diagnosis:
    """Return what the loop's facts and its curves tell: faults of the loop, stability, schedule, clipping, waits for data."""
    found = (
        diagnose_loop(record)
        + Diagnosis.of(record, _curves(record))
        + diagnose_input_share(record)
        + diagnose_seen_batches(record)
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
    return replace(found, findings=causes_first(told))


def _too_low(study: JudgedStudy, chance: float | None) -> Finding:
    """Judge whether the loss slows down before the run ends; a run that was cut short tells nothing."""
    say = partial(OWN_LR_CODES.finding, "lr.too_low")
    loop = study.facts.get("loop") or {}
    curve = next((c for c in study.curves if c.finished), None)
    found = unslowed(curve, chance) if curve is not None and loop.get("ended", True) else None
    if curve is None or found is None:
        return say("ok", "The loss slows down before the run ends, or more than half of it is learned.")
    lr = study.config.get("peak_lr")
    at = (
        f"The learning rate of {lr:.4g} is too low, or"
        if isinstance(lr, float) and math.isfinite(lr)
        else "The learning rate is too low, or"
    )
    return say(
        "warn", f"{at} {len(curve.loss):,} updates are too few: the training loss falls as fast at the end as at the start, from {found['start']:.4g} in the first quarter to {found['end']:.4g} in the last, "
        f"{max(found['learned'], 0.0):.0%} of the way from a constant output's loss to 0.", value=found["pace"], unit="of the first pace", threshold=PACE, evidence=found,
        advice=["Try learning rates 3, 10 and 30 times as large; wb.diagnose_function and workbench diagnose -- python train.py do so."],
    )  # fmt: skip


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
    yield _too_low(study, table.chance)
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
