"""`check_stability`: whether an earlier study found the training stable, asked before anything is tuned (F1.1)."""

from pathlib import Path

from workbench.errors import RecordError
from workbench.findings.diagnosis import Diagnosis
from workbench.findings.finding import Codes, Status
from workbench.record.read import open_record
from workbench.topics.stability.diagnose import KINDS, diagnose_instability

CHECK = Codes({"stability.verdict": "F1.1"})
_GET_ONE = "Run 02_instability, or workbench diagnose, on this workload first, and give its folder here."
_CURE = "Cure that first: a warmup (03), clipping (04), another optimizer (05), the architecture (06), in this order."


def check_stability(earlier: str | Path | None, *, workload: str | None = None) -> Diagnosis:
    """Say whether an earlier study found the training stable; whatever is tuned on an unstable one is tuned to its noise (F1.1).

    The verdict vouches for the config of that study alone, so its summary names the lr and the optimizer.

    Args:
        earlier: folder of a study of the workload, as `02_instability` and `workbench diagnose` leave it; None or "" is none.
        workload: name of the workload it should be of; None takes any.

    Returns:
        `stability.verdict`: ok where stability was looked for and nothing is wrong, warn where something is, and
        not_measured where there is no such study, or it did not look.
    """
    where, name, step = str(earlier or ""), workload, None
    status: Status = "not_measured"
    advice = [_GET_ONE]
    try:
        record = open_record(where) if where else None
    except RecordError as error:
        record, summary = None, f"No stability verdict: {error}"
    if not where:
        summary = "Stability was not checked yet: run 02_instability first. Continuing without."
    elif record is not None and workload not in (None, record.workload):
        summary = f"No stability verdict: {where} is a study of {record.workload!r}, not of {workload!r}."
    elif record is not None:
        found, name = diagnose_instability(record), record.workload
        about = f"at peak_lr {record.config.get('peak_lr')} with {record.config.get('optimizer')}"
        bad = [found[code] for code in KINDS if found[code].status in ("warn", "fail")]
        missing = [code for code in KINDS if found[code].status == "not_measured"]
        summary = f"No stability verdict: {where}, {about}, did not measure {', '.join(missing)}."
        if bad:
            status, advice, step = "warn", [_CURE], bad[0].step
            summary = f"{where} found this training unstable, {about}. {bad[0].code}: {bad[0].summary}"
        elif not missing:
            status, advice = "ok", []
            summary = f"{where} looked for instability {about} and found none that matters."
    verdict = CHECK.finding("stability.verdict", status, summary, step=step, advice=advice)
    return Diagnosis(findings=(verdict,), workload=name)
