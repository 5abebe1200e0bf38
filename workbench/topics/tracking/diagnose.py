"""`diagnose_tracking`: is a study kept so that somebody else can find it, trust its row, and run it again (P5)?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from workbench.errors import RecordError
from workbench.findings.diagnosis import Diagnosis
from workbench.findings.finding import Codes, Finding
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
    say = partial(CODES.finding, "tracking.config", evidence={"sha256": row["config_sha256"]})
    if row["config_sha256"] is None:
        return say("not_measured", "Not measured: no hash was stored when the study was begun.")
    changed = row["config"].partition(" (")[2].rstrip(")")
    if not changed:
        return say("ok", "The config file has the hash that was stored when the study was begun.")
    fix = "Take it from a backup, or trust trials/<n>/config.json, which says how each trial was trained."
    return say("fail", f"The config file is not what it was when the study was begun: {changed}.", advice=[fix])


def _trials(record: StudyRecord, row: Mapping[str, Any]) -> Finding:
    """Count from the rows of the record, which other code reads: the table has its own, faster way."""
    states = {str(s): int(n) for s, n in record.trials["state"].value_counts().items()} if len(record.trials) else {}
    there, listed = sum(states.values()), ", ".join(f"{n} {state}" for state, n in sorted(states.items())) or "none yet"
    say = partial(
        CODES.finding, "tracking.trials", value=float(row["trials"]), unit="trials", threshold=float(there), evidence={"states": states}
    )  # fmt: skip
    if row["trials"] == there:
        return say("ok", f"The table counts every trial that was begun, failed ones included: {listed}.")
    return say("fail", f"The table says {row['trials']} trials, the folder has {there}: {listed}.")


def _best_value(record: StudyRecord, row: Mapping[str, Any]) -> Finding:
    say = partial(CODES.finding, "tracking.best_value", unit=row["select"])
    try:
        best = record.best().best()
    except RecordError as error:
        return say("not_measured", f"Not measured: {error}")
    say = partial(say, value=float(row["best_value"]), threshold=best.value, step=best.step)
    if not math.isclose(best.value, row["best_value"], rel_tol=1e-12):
        return say("fail", f"The table says {row['best_value']:.6g}, but the best evaluation is {best.value:.6g} at step {best.step}.")  # fmt: skip
    said = f"The best value is that of the selected checkpoint of trial {row['best_trial']}, at step {best.step}"
    return say("warn", f"{said}; the checkpoint itself is not there any more.") if best.checkpoint is None else say("ok", f"{said}.")  # fmt: skip


def _reproduce(record: StudyRecord) -> Finding:
    command, patch = str(record.study.get("command") or ""), record.study.get("patch")
    say = partial(CODES.finding, "tracking.reproduce", evidence={"command": command, "patch": patch})
    if not command or command.startswith("("):
        advice = "Load the workload by name (file.py:name), or run a script; then the command is stored."
        return say("warn", "No command reproduces this study: it was run from a session, with objects that have no name.", advice=[advice])  # fmt: skip
    if record.study.get("commit") is None:
        advice = "Run in a git repository: commit and uncommitted changes are then stored with the study."
        return say("warn", "A command was stored, but not the code that it ran: there was no git repository.", advice=[advice])  # fmt: skip
    if patch is not None and not (record.path / patch).is_file():
        return say("fail", f"The uncommitted changes, {patch}, are missing.")
    if patch:
        return say("ok", "The command, the commit and the uncommitted changes are stored.")
    return say("ok", "The command and the commit are stored, nothing was uncommitted.")
