"""`diagnose_tracking`: is a study kept so that somebody else can find it, trust its row, and run it again (P5)?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from workbench.errors import RecordError
from workbench.findings.diagnosis import Diagnosis, Finding
from workbench.ledger.table import study_row
from workbench.record.read import StudyRecord

__all__ = ["CODES", "diagnose_tracking"]

CODES = ("tracking.config", "tracking.trials", "tracking.best_value", "tracking.reproduce")


def diagnose_tracking(record: StudyRecord) -> Diagnosis:
    """Hold a study's row of the table against what is in its folder.

    Args:
        record: a study on disk, `wb.open(...)`.

    Returns:
        The codes `tracking.config` (the file behind the link has the hash that was stored, P5.3), `.trials` (the number counts all
        that were begun, P5.5), `.best_value` (that of the best selected checkpoint, P5.6) and `.reproduce` (a command, the commit and
        the uncommitted changes, P5.7), once each.
    """
    row = study_row(record.path)
    findings = (_config(row), _trials(record, row), _best_value(record, row), _reproduce(record))
    return Diagnosis.of(record, findings)


def _config(row: Mapping[str, Any]) -> Finding:
    known: dict[str, Any] = {"code": CODES[0], "clause": "P5.3", "evidence": {"sha256": row["config_sha256"]}}
    if row["config_sha256"] is None:
        return Finding(
            status="not_measured", summary="Not measured: no hash was stored when the study was begun.", **known
        )
    changed = row["config"].partition(" (")[2].rstrip(")")
    if changed:
        return Finding(
            status="fail", summary=f"The config file is not what it was when the study was begun: {changed}.", **known,
            advice=["Take it from a backup, or trust trials/<n>/config.json, which says how each trial was trained."],
        )  # fmt: skip
    return Finding(
        status="ok", summary="The config file has the hash that was stored when the study was begun.", **known
    )


def _trials(record: StudyRecord, row: Mapping[str, Any]) -> Finding:
    """Count from the rows of the record, which other code reads: the table has its own, faster way."""
    states = (
        {str(state): int(n) for state, n in record.trials["state"].value_counts().items()} if len(record.trials) else {}
    )
    there = sum(states.values())
    said = ", ".join(f"{n} {state}" for state, n in sorted(states.items())) or "none yet"
    known: dict[str, Any] = {
        "code": CODES[1], "clause": "P5.5", "value": float(row["trials"]), "unit": "trials", "threshold": float(there),
        "evidence": {"states": states},
    }  # fmt: skip
    if row["trials"] != there:
        return Finding(
            status="fail", summary=f"The table says {row['trials']} trials, the folder has {there}: {said}.", **known
        )
    return Finding(
        status="ok", summary=f"The table counts every trial that was begun, failed ones included: {said}.", **known
    )


def _best_value(record: StudyRecord, row: Mapping[str, Any]) -> Finding:
    known: dict[str, Any] = {"code": CODES[2], "clause": "P5.6", "unit": row["select"]}
    try:
        best = record.best().best()
    except RecordError as error:
        return Finding(status="not_measured", summary=f"Not measured: {error}", **known)
    known |= {"value": float(row["best_value"]), "threshold": best.value, "step": best.step}
    if not math.isclose(best.value, row["best_value"], rel_tol=1e-12):
        return Finding(
            status="fail", **known,
            summary=f"The table says {row['best_value']:.6g}, but the best evaluation is {best.value:.6g} at step {best.step}.",
        )  # fmt: skip
    kept = "" if best.checkpoint is not None else "; the checkpoint itself is not there any more"
    return Finding(
        status="ok" if best.checkpoint is not None else "warn", **known,
        summary=f"The best value is that of the selected checkpoint of trial {row['best_trial']}, at step {best.step}{kept}.",
    )  # fmt: skip


def _reproduce(record: StudyRecord) -> Finding:
    study = record.study
    command = str(study.get("command") or "")
    patch = study.get("patch")
    known: dict[str, Any] = {"code": CODES[3], "clause": "P5.7", "evidence": {"command": command, "patch": patch}}
    if not command or command.startswith("("):
        return Finding(
            status="warn", summary="No command reproduces this study: it was run from a session, with objects that have no name.",
            advice=["Load the workload by name (file.py:name), or run a script; then the command is stored."], **known,
        )  # fmt: skip
    if study.get("commit") is None:
        return Finding(
            status="warn", summary="A command was stored, but not the code that it ran: there was no git repository.",
            advice=["Run in a git repository: commit and uncommitted changes are then stored with the study."], **known,
        )  # fmt: skip
    if patch is not None and not (record.path / patch).is_file():
        return Finding(status="fail", summary=f"The uncommitted changes, {patch}, are missing.", **known)
    changes = (
        "and the uncommitted changes are stored" if patch else "and the commit are stored, nothing was uncommitted"
    )
    start = "The command, the commit" if patch else "The command"
    return Finding(status="ok", summary=f"{start} {changes}.", **known)
