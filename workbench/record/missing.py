"""What a study's folder lacks of what its writer left in it: rows, parts, trials and events; and which of its trials have not ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from workbench.errors import RecordError
from workbench.record.events import EVENTS
from workbench.record.folder import is_locked, read_json
from workbench.record.tables import missing_parts, trial_column

TABLES = ("steps", "evals", "predictions")


def inventory(path: Path) -> dict[str, Any]:
    """Return what is in a study's folder by trial: `{"trials": {number: events}, "steps": {number: rows}, ...}`; a damaged table is a `RecordError`."""
    events = {p.parent.name: p.read_bytes().count(b"\n") for p in path.glob(f"trials/*/{EVENTS}")}
    begun = {p.parent.name: events.get(p.parent.name, 0) for p in path.glob("trials/*/config.json")}
    held: dict[str, Any] = {"trials": begun}
    for table in TABLES:
        numbers, counts = np.unique(trial_column(path / table), return_counts=True)
        held[table] = {str(int(number)): int(count) for number, count in zip(numbers, counts, strict=True)}
    return held


def missing(path: str | Path, *, resuming: bool = False) -> list[str]:
    """Return what is not there any more, a sentence each: a missing part at any time, the rest once the study was closed."""
    folder = Path(path)
    said = [
        f"{folder / table}: part {number} is missing." for table in TABLES for number in missing_parts(folder / table)
    ]
    wanted = read_json(folder / "study.json").get("holds")
    if wanted is None or (not resuming and is_locked(folder)):
        return said
    again = {number for number in wanted["trials"] if resuming and not (folder / "trials" / number).exists()}
    try:
        there = inventory(folder)
    except RecordError as error:
        return [*said, str(error)]
    for number, events in wanted["trials"].items():
        if number in again:
            continue
        trial = folder / "trials" / number
        if number not in there["trials"]:
            said.append(f"{trial}: the trial's config.json is missing.")
        elif there["trials"][number] < events:
            said.append(f"{trial / EVENTS}: {there['trials'][number]} of {events} events are there.")
    for table in TABLES:
        found = {number: (there[table].get(number, 0), rows) for number, rows in wanted[table].items()}
        short = {number: pair for number, pair in found.items() if pair[0] < pair[1] and number not in again}
        listed = ", ".join(f"{got} of {rows} rows of trial {n}" for n, (got, rows) in list(short.items())[:3])
        if short:
            more = f" and those of {len(short) - 3} more trials" if len(short) > 3 else ""
            said.append(f"{folder / table}: {listed}{more} are there.")
    return said


def not_ended(record: Any) -> str:
    """Return how many trials of a study have not come to their end, and what resumes them, where something does; "" for none."""
    trials = getattr(record, "trials", None)
    if trials is None or "state" not in trials or (left := trials[trials["state"].isin(["running", "stopped"])]).empty:
        return ""
    if now := int((left["state"] == "running").sum()):  # by a process that holds the folder
        return (
            "the run is being trained"
            if len(trials) == 1
            else f"{now} of {len(trials)} runs {'is' if now == 1 else 'are'} being trained"
        )
    many, row = len(left) > 1, left.iloc[0]
    ours = row.get("gradients") is not None  # nobody but its author goes on with a watched loop
    runs = "the run" if len(trials) == 1 else f"{len(left)} of {len(trials)} runs"
    at = f"at {row['steps_run']:,.0f} of {row['total_steps']:,.0f} updates"
    said = f"{runs} {'were' if many else 'was'} stopped {at if ours and len(trials) == 1 else 'early'}"
    how = "command" if str(record.command or "").startswith("workbench ") else "call"
    return f"{said}; the same {how} resumes {'them' if many else 'it'}" if ours else said
