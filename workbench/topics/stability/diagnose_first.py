"""`check_stability`: is there a verdict on the stability of this training, and is it good? Everything else comes after (F1.1)."""

from __future__ import annotations

from pathlib import Path

from workbench.errors import RecordError
from workbench.findings.diagnosis import Diagnosis
from workbench.findings.finding import Finding, Status
from workbench.record.read import open_record
from workbench.topics.stability.diagnose import KINDS, diagnose_instability

_GET_ONE = "Run 02_instability, or workbench diagnose, on this workload first, and give its folder here."
_CURE = "Cure that first: a warmup (03), clipping (04), another optimizer (05), the architecture (06), in this order."


def check_stability(earlier: str | Path | None, *, workload: str | None = None) -> Diagnosis:
    """Say whether an earlier study found the training stable; whatever is tuned on an unstable one is tuned to its noise.

    Args:
        earlier: folder of a study of the workload, as `02_instability` and `workbench diagnose` leave it; None or "" is none.
        workload: name of the workload it should be of; None takes any.

    The verdict vouches for the config of that study alone, so its summary names the lr and the optimizer.

    Returns:
        `stability.verdict`: ok where stability was looked for and nothing is wrong, warn where something is, and
        not_measured where there is no such study, or it did not look.
    """
    where = str(earlier or "")
    if not where:
        said = "Nobody has looked yet whether this training is stable; 02_instability does. Go on, knowing that."
        return _one("not_measured", said, _GET_ONE, workload)
    try:
        record = open_record(where)
    except RecordError as error:
        return _one("not_measured", f"No stability verdict: {error}", _GET_ONE, workload)
    if workload is not None and record.workload != workload:
        said = f"No stability verdict: {where} is a study of {record.workload!r}, not of {workload!r}."
        return _one("not_measured", said, _GET_ONE, workload)
    found = diagnose_instability(record)
    about = f"at peak_lr {record.config.get('peak_lr')} with {record.config.get('optimizer')}"
    bad = [found[code] for code in KINDS if found[code].status in ("warn", "fail")]
    if bad:
        said = f"{where} found this training unstable, {about}. {bad[0].code}: {bad[0].summary}"
        return _one("warn", said, _CURE, record.workload, step=bad[0].step)
    missing = [code for code in KINDS if found[code].status == "not_measured"]
    if missing:
        said = f"No stability verdict: {where}, {about}, did not measure {', '.join(missing)}."
        return _one("not_measured", said, _GET_ONE, record.workload)
    return _one("ok", f"{where} looked for instability {about} and found none that matters.", None, record.workload)


def _one(
    status: Status, summary: str, advice: str | None, workload: str | None, *, step: int | None = None
) -> Diagnosis:
    finding = Finding(
        code="stability.verdict", status=status, summary=summary, step=step, clause="F1.1",
        advice=() if advice is None else (advice,),
    )  # fmt: skip
    return Diagnosis(findings=(finding,), workload=workload)
