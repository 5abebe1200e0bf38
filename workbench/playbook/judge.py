"""`judge`: what loss, learning rate and gradient norm alone can tell of runs that were made elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from workbench.curves.judged import JudgedStudy
from workbench.curves.selection import selected_rows
from workbench.errors import UsageError
from workbench.findings.causes import causes_first
from workbench.findings.diagnosis import Diagnosis
from workbench.findings.finding import STATUSES, Finding
from workbench.logs.record import LogRecord, write_study
from workbench.record.folder import write_json
from workbench.report.write import write_report
from workbench.topics.checkpoints.diagnose import diagnose_checkpoints
from workbench.topics.clipping.diagnose import CODES as CLIPPING
from workbench.topics.clipping.diagnose import diagnose_clipping
from workbench.topics.evaluation.diagnose_generalisation import diagnose_generalisation_gap, facts_of_curves
from workbench.topics.lr_sweep.diagnose import diagnose_lr_sweep
from workbench.topics.registry import CODES
from workbench.topics.schedule.diagnose import diagnose_schedule
from workbench.topics.stability.diagnose import diagnose_instability

_ELSEWHERE = ("hosts", "ps", "input", "tracking", "comparison")
"""Questions that are not about the run of one model, which no log of one could answer."""
_REASON = "a log holds neither the model nor its data. `workbench diagnose` measures it on a workload"
_CLIPPED = ("clipping.cures", "clipping.aggressive", "clipping.masks_lr")
_NOISE_SDS = 8.0
"""Twice what our own evaluations need: nobody knows on how few examples a logged one rests, nor whether its noise lasts (rule of thumb)."""
_SELECTED = ("checkpoints.best_not_last", "checkpoints.selection")


def judge(record: LogRecord, *, out: str | Path | None = None, command: str | None = None) -> Diagnosis:
    """Say what the curves of logged runs show: stability, schedule, learning rates, gradient norms, overfitting.

    Several runs with different learning rates are judged as a sweep; schedule, clipping and overfitting run by run, of which the worst
    is told. What needs the model or its data is `not_measured`.

    Args:
        record: what `read_log` returns.
        out: a new folder for the runs as a study, with diagnosis.json and report.html; None writes nothing.
        command: what reproduces it.

    Raises:
        UsageError: there is a study in the folder already.
    """
    if isinstance(record, str | Path):
        raise UsageError(f"wb.judge takes what read_log returns, not a path: wb.judge(wb.read_log({str(record)!r})).")
    told = [*diagnose_lr_sweep(record), *diagnose_instability(record)]
    for look in (_schedule, _clipping, _overfitting):
        told += _worst_of_runs(record, look)
    known = {finding.code for finding in told}
    rest = [code for code in CODES if code not in known and code.partition(".")[0] not in _ELSEWHERE]
    nothing = [
        Finding(code=c, clause=CODES[c], status="not_measured", summary=f"Not measured: {_REASON}.") for c in rest
    ]
    cost = {"steps": int(record.trials["steps_run"].sum()), "trials": len(record.trials)}
    found = replace(Diagnosis.of(record, causes_first([*told, *nothing])), path=None, command=command, cost=cost)
    if out is None:
        return found
    study = write_study(record, out, command=command)
    found = replace(found, path=study.path, command=study.command)
    write_json(study.path / "diagnosis.json", found.to_dict())
    write_report(study, found, study.path)
    return found


def without_the_rest(diagnosis: Diagnosis) -> tuple[Diagnosis, int]:
    """Return a diagnosis without what no log can tell, for a terminal, and how many codes that are."""
    told = tuple(f for f in diagnosis.findings if _REASON not in f.summary)
    return replace(diagnosis, findings=told), len(diagnosis.findings) - len(told)


@dataclass(frozen=True, kw_only=True)
class _One:
    """One run of a record, as a record; `steps` may be others of its rows, and `facts` those of this run."""

    record: LogRecord
    number: int
    steps: pd.DataFrame
    facts: Mapping[str, Any]

    def study(self) -> JudgedStudy:
        """Return it as every diagnosis takes it, its own config as the baseline's."""
        trials = self.record.trials[self.record.trials["trial"] == self.number]
        row = trials.iloc[0]
        config = {name: row[name] for name in ("peak_lr", "total_steps", "max_grad_norm")}
        config = {name: None if pd.isna(value) else value for name, value in config.items()}
        whole = replace(self.record, steps=self.steps, facts=dict(self.facts))
        return JudgedStudy(whole, trials=trials, config=config)


def _worst_of_runs(record: LogRecord, look: Callable[[LogRecord, int], Sequence[Finding]]) -> list[Finding]:
    """Return each code's worst finding over the runs, with the run's file where there are several."""
    found: dict[str, tuple[int, Finding]] = {}
    for number in record.trials["trial"].tolist():
        for finding in look(record, int(number)):
            order = _ORDER[finding.status]
            if finding.code not in found or order < _ORDER[found[finding.code][1].status]:
                found[finding.code] = (int(number), finding)
    if len(record.trials) == 1:
        return [finding for _, finding in found.values()]
    named = {int(n): log["file"] for n, log in zip(record.trials["trial"], record.facts["log"], strict=True)}
    return [
        replace(f, summary=f"{named[number]}: {f.summary}") if f.status in ("warn", "fail") else f
        for number, f in found.values()
    ]


_ORDER = {status: place for place, status in enumerate(STATUSES)} | {"ok": 2, "not_measured": 3}
"""A run that can be judged speaks for a question before one that cannot."""


def _schedule(record: LogRecord, number: int) -> Sequence[Finding]:
    rows = record.lrs[record.lrs["trial"] == number]
    return diagnose_schedule(_One(record=record, number=number, steps=rows.assign(loss=0.0), facts={}).study()).findings


def _clipping(record: LogRecord, number: int) -> Sequence[Finding]:
    rows = record.steps[record.steps["trial"] == number]
    rows = rows.drop(columns="grad_norm") if "grad_norm" in rows and rows["grad_norm"].isna().all() else rows
    study = _One(record=record, number=number, steps=rows, facts={}).study()
    found = diagnose_clipping(study)
    if "grad_norm" not in rows:
        return [CLIPPING.not_measured(code, "the log has no gradient norm") for code in CLIPPING]
    level = logged_after_clipping(rows["grad_norm"].to_numpy(dtype=np.float64))
    if level is not None:
        reason = f"gradient norms stop at {level:.4g}, as if they were logged after clipping; log them before"
        return [f if f.code == "clipping.nonfinite" else CLIPPING.not_measured(f.code, reason) for f in found]
    if study.config.get("max_grad_norm") is not None:
        return found.findings
    reason = (
        "the log does not say at which norm gradients were clipped, if any; max_grad_norm=... (--max-grad-norm) does"
    )
    return [CLIPPING.not_measured(f.code, reason) if f.code in _CLIPPED else f for f in found]


def logged_after_clipping(
    norms: np.ndarray[Any, np.dtype[np.float64]], *, share: float = 0.1, rtol: float = 1e-4
) -> float | None:
    """Return the norm at which the largest ones pile up, as they do when logged after clipping; None where they do not.

    Args:
        share: of the norms that lie at the largest one (rule of thumb).
        rtol: distance to it that counts as none (rule of thumb: what clipping's own epsilon and float32 leave).
    """
    known = norms[np.isfinite(norms)]
    if known.size < 20 or not known.max() > 0:
        return None
    top = float(known.max())
    return top if float((known >= top * (1 - rtol)).mean()) >= share else None


def _overfitting(record: LogRecord, number: int) -> Sequence[Finding]:
    rows = record.steps[record.steps["trial"] == number]
    study = _One(record=record, number=number, steps=rows, facts={}).study()
    facts = facts_of_curves(study, number)
    gap = diagnose_generalisation_gap(_One(record=record, number=number, steps=rows, facts=facts).study()).findings
    if not len(selected_rows(study, number)):
        return [*gap, *(_no_values(code) for code in _SELECTED)]
    chosen = [finding for finding in diagnose_checkpoints(study, noise_sds=_NOISE_SDS) if finding.code in _SELECTED]
    return [*gap, *(replace(f, advice=[_take(line) for line in f.advice]) for f in chosen)]


def _no_values(code: str) -> Finding:
    return Finding(
        code=code, clause=CODES[code], status="not_measured", summary="Not measured: the log has no validation values."
    )


def _take(line: str) -> str:
    """Say of a run made elsewhere, too, which checkpoint to take: our own keep their best."""
    return (
        "Take the best checkpoint, not the last, and keep the best ones while training (P4.4, P4.5)."
        if "record.best()" in line
        else line
    )
