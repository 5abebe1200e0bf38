"""The ledger: one row a study, kept in Optuna's storage over SQLite beside the study folders, or in a shared database.

The folders are the truth and the ledger an index over them; `rebuild` makes it again. Optuna's own tools (its
dashboard, `optuna.load_study`) read the same storage.
"""

from __future__ import annotations

import json
import math
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from workbench.errors import RecordError, UsageError
from workbench.record.ledger import storage as ledger_storage
from workbench.record.ledger.storage import LEDGER, VARIABLE, open_storage, quiet, shared_url
from workbench.record.ledger.table import COLUMNS, EXTRA, check_extra, list_folders, study_folders, study_row
from workbench.record.read import StudyRecord

__all__ = ["COLUMNS", "EXTRA", "LEDGER", "index", "list_studies", "rebuild"]

TRIES = 4


def list_studies(root: str | Path = "runs", *, extra: Sequence[str] = (), ledger: str | None = None) -> pd.DataFrame:
    """Return the six required columns of every study, one row a study (P5.1 to P5.7).

    Args:
        root: folder of the studies, which are read themselves: the table is right while a study runs, and after a crash.
        extra: names of further columns, of `EXTRA`: workload, kind, state, created, failed, unfinished, best_trial, best_step, select,
            config_sha256, commit.
        ledger: address of a shared ledger; then its studies are listed, those of other machines as well, as they were when they
            were last closed. "" takes the one in WORKBENCH_LEDGER.

    Raises:
        RecordError: there is no such folder, or the ledger cannot be reached.
        UsageError: there is no such column, `ledger` is no address, or it is "" and WORKBENCH_LEDGER is not set.
    """
    if ledger is None:
        return list_folders(Path(root), extra=extra)
    check_extra(extra)
    if not ledger and shared_url() is None:
        raise UsageError(
            f"the shared ledger was asked for, and {VARIABLE} is not set: give its address, as in "
            "--ledger postgresql://user@host/name, or leave it out for the folders here."
        )
    with open_storage(Path(root), ledger or None) as storage, quiet():
        attributes = [dict(study.user_attrs) for study in storage.get_all_studies()]
    found: list[dict[str, Any]] = [dict(a["row"]) for a in attributes if "row" in a]
    rows = [row | ({"best_value": math.nan} if row["best_value"] is None else {}) for row in found]
    return pd.DataFrame(rows, columns=[*COLUMNS, *extra])


def index(study: Path, *, ledger: str | None = None, wait_s: float | None = None, trials: bool = True) -> None:
    """Bring the ledger's rows of one study folder up to date; trials that are there already stay.

    Args:
        study: its folder.
        ledger: address of a shared ledger; None takes the environment's WORKBENCH_LEDGER, or the file beside the study.
        wait_s: how long to wait for another process that is writing.
        trials: False leaves the trials as the ledger has them, where it has the study: many take seconds to read.

    Raises:
        RecordError: the ledger is damaged, out of reach or locked; the study itself is untouched by that.
    """
    began = time.monotonic()
    for attempt in range(TRIES):
        try:
            return _index(study, ledger, wait_s, trials=trials)
        except RecordError as error:
            wait = ledger_storage.WAIT_S if wait_s is None else wait_s
            full = "locked" in str(error) and time.monotonic() - began > 0.9 * wait  # SQLite may also give up at once
            if attempt < TRIES - 1 and not full and "connection" not in str(error):
                time.sleep(
                    0.2 * (attempt + 1)
                )  # two processes that make the first ledger at once get in each other's way
                continue
            raise RecordError(
                f"cannot write the ledger: {error}. The study in {study} is whole; make the ledger again with: "
                f"workbench studies {study.parent} --rebuild"
            ) from None
    return None


def _index(study: Path, ledger: str | None, wait_s: float | None, *, trials: bool) -> None:
    import optuna

    record = StudyRecord(study)
    with open_storage(study.parent, ledger, wait_s=wait_s) as storage, quiet():
        direction = optuna.study.StudyDirection[{"min": "MINIMIZE", "max": "MAXIMIZE"}[record.config["select_mode"]]]
        name = _free_name(storage, record)
        row = optuna.create_study(storage=storage, study_name=name, direction=direction, load_if_exists=True)
        if not trials and "row" in row.user_attrs:
            return row.set_user_attr("row", _shared_row(study, shared=shared_url(ledger) is not None))
        rows = [{str(k): v for k, v in values.items()} for values in record.trials.to_dict("records")]
        ended = {values["trial"]: values for values in rows if values["state"] in ("complete", "diverged", "failed")}
        known = {t.user_attrs.get("trial"): t.user_attrs.get("state") for t in row.get_trials(deepcopy=False)}
        if any(number not in ended or ended[number]["state"] != state for number, state in known.items()):
            # A failed trial has been trained again; Optuna keeps ended trials as they are, so the study is entered anew.
            optuna.delete_study(study_name=name, storage=storage)
            row, known = optuna.create_study(storage=storage, study_name=name, direction=direction), {}
        row.set_user_attr("row", _shared_row(study, shared=shared_url(ledger) is not None))
        row.add_trials([_frozen(values) for number, values in ended.items() if number not in known])


def _free_name(storage: Any, record: StudyRecord) -> str:
    """Return the study's name; with the time it was begun, where another machine's study has the same in a shared ledger (P5.2)."""
    created = record.study.get("created")
    for known in storage.get_all_studies():
        other = dict(known.user_attrs).get("row", {}).get("created", created)
        if known.study_name == record.name and other != created:
            return f"{record.name} ({created})"
    return record.name


def _shared_row(study: Path, *, shared: bool) -> dict[str, Any]:
    """Return the row of the table as JSON values; in a shared ledger the config link names its machine."""
    row = study_row(study.resolve() if shared else study)
    if shared:
        row["config"] = f"{socket.gethostname()}:{row['config']}"
    if not math.isfinite(row["best_value"]):
        row["best_value"] = None
    return row


def rebuild(root: str | Path = "runs", *, ledger: str | None = None, wait_s: float | None = None) -> int:
    """Write the ledger anew from the study folders; return how many of them it now holds.

    In a shared ledger the studies of other folders stay.

    Args:
        root: folder of the studies.
        ledger: see `index`.
        wait_s: see `index`.

    Raises:
        RecordError: there is no such folder, or the ledger is out of reach or locked; then it stays as it is.
    """
    folders = study_folders(Path(root))
    if shared_url(ledger) is None:
        ledger_storage.wait_for_lock(Path(root) / LEDGER, wait_s)
        for suffix in ("", "-wal", "-shm"):
            (Path(root) / f"{LEDGER}{suffix}").unlink(missing_ok=True)
    for folder in folders:
        index(folder, ledger=ledger, wait_s=wait_s)
    return len(folders)


def _frozen(values: dict[str, Any]) -> Any:
    import optuna

    finite = values["best_value"] is not None and math.isfinite(values["best_value"])
    state = (
        optuna.trial.TrialState.COMPLETE if finite and values["state"] == "complete" else optuna.trial.TrialState.FAIL
    )
    attributes = {k: v for k, v in values.items() if not (isinstance(v, float) and not math.isfinite(v))}
    return optuna.trial.create_trial(
        state=state,
        value=float(values["best_value"]) if state is optuna.trial.TrialState.COMPLETE else None,
        params={"peak_lr": float(values["peak_lr"])},
        distributions={"peak_lr": optuna.distributions.FloatDistribution(0.0, math.inf)},
        # One attribute for all of it: each costs a query of its own, and a study of 1,000 trials has 36,000 values.
        user_attrs={
            "trial": values["trial"],
            "state": values["state"],
            "row": json.loads(json.dumps(attributes, default=str)),
        },
    )
