"""`diagnose_tracking`: is a study kept so that somebody else can find it, trust its row, and run it again (P5)?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from workbench.errors import RecordError
from workbench.findings.diagnosis import Diagnosis
from workbench.findings.finding import Codes, Finding, Status
from workbench.ledger.table import study_row
from workbench.record.read import StudyRecord

CODES = Codes({"tracking.config": "P5.3", "tracking.trials": "P5.5", "tracking.best_value": "P5.6", "tracking.reproduce": "P5.7"})  # fmt: skip


def diagnose_tracking(record: StudyRecord) -> Diagnosis:
    """Hold a study's row of the table against what is in its folder, `wb.open(...)`.

    Returns:
        The codes `tracking.config` (the file behind the link has the hash that was stored, P5.3), `.trials` (the number counts all
        that were begun, P5.5), `.best_value` (that of the best selected checkpoint, P5.6) and `.reproduce` (a command, the commit and
        the uncommitted changes, P5.7), once each.
    """
    row = study_row(record.path)
    findings = (_config(row), _trials(record, row), _best_value(record, row), _reproduce(record))
    return Diagnosis.of(record, findings)


def _config(row: Mapping[str, Any]) -> Finding:
    found = partial(CODES.finding, "tracking.config", evidence={"sha256": row["config_sha256"]})
    if row["config_sha256"] is None:
        return found("not_measured", "Not measured: no hash was stored when the study was begun.")
    changed = row["config"].partition(" (")[2].rstrip(")")
    if changed:
        return found(
            "fail", f"The config file is not what it was when the study was begun: {changed}.",
            advice=["Take it from a backup, or trust trials/<n>/config.json, which says how each trial was trained."],
        )  # fmt: skip
    return found("ok", "The config file has the hash that was stored when the study was begun.")


def _trials(record: StudyRecord, row: Mapping[str, Any]) -> Finding:
    """Count from the rows of the record, which other code reads: the table has its own, faster way."""
    counts = record.trials["state"].value_counts().items() if len(record.trials) else ()
    states = {str(state): int(n) for state, n in counts}
    there = sum(states.values())
    listed = ", ".join(f"{n} {state}" for state, n in sorted(states.items())) or "none yet"
    status: Status = "ok" if row["trials"] == there else "fail"
    summary = f"The table counts every trial that was begun, failed ones included: {listed}."
    if status == "fail":
        summary = f"The table says {row['trials']} trials, the folder has {there}: {listed}."
    return CODES.finding(
        "tracking.trials", status, summary, value=float(row["trials"]), unit="trials", threshold=float(there),
        evidence={"states": states},
    )  # fmt: skip


def _best_value(record: StudyRecord, row: Mapping[str, Any]) -> Finding:
    found = partial(CODES.finding, "tracking.best_value", unit=row["select"])
    try:
        best = record.best().best()
    except RecordError as error:
        return found("not_measured", f"Not measured: {error}")
    found = partial(found, value=float(row["best_value"]), threshold=best.value, step=best.step)
    if not math.isclose(best.value, row["best_value"], rel_tol=1e-12):
        return found("fail", f"The table says {row['best_value']:.6g}, but the best evaluation is {best.value:.6g} at step {best.step}.")  # fmt: skip
    said = f"The best value is that of the selected checkpoint of trial {row['best_trial']}, at step {best.step}"
    if best.checkpoint is None:
        return found("warn", f"{said}; the checkpoint itself is not there any more.")
    return found("ok", f"{said}.")


def _reproduce(record: StudyRecord) -> Finding:
    command, patch = str(record.study.get("command") or ""), record.study.get("patch")
    found = partial(CODES.finding, "tracking.reproduce", evidence={"command": command, "patch": patch})
    if not command or command.startswith("("):
        summary = "No command reproduces this study: it was run from a session, with objects that have no name."
        advice = "Load the workload by name (file.py:name), or run a script; then the command is stored."
        return found("warn", summary, advice=[advice])
    if record.study.get("commit") is None:
        summary = "A command was stored, but not the code that it ran: there was no git repository."
        advice = "Run in a git repository: commit and uncommitted changes are then stored with the study."
        return found("warn", summary, advice=[advice])
    if patch is not None and not (record.path / patch).is_file():
        return found("fail", f"The uncommitted changes, {patch}, are missing.")
    if patch:
        return found("ok", "The command, the commit and the uncommitted changes are stored.")
    return found("ok", "The command and the commit are stored, nothing was uncommitted.")
