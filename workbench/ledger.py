"""The ledger: one row a study, kept in Optuna's storage over SQLite beside the study folders.

The folders are the truth and the ledger an index over them; `rebuild` makes it again. Optuna's own tools (its
dashboard, `optuna.load_study`) read the same file.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from workbench.errors import RecordError
from workbench.record import StudyRecord

__all__ = ["COLUMNS", "LEDGER", "index", "list_studies", "rebuild"]

LEDGER = "ledger.db"
TRIES = 4
COLUMNS = ["study", "config", "note", "trials", "best_value", "reproduce"]
"""The six columns of the playbook's table of studies (P5.1 to P5.7)."""


def index(study: Path) -> None:
    """Bring the ledger's rows of one study folder up to date; trials that are there already stay.

    Raises:
        RecordError: the ledger is damaged; the study itself is untouched by that.
    """
    import sqlalchemy

    for attempt in range(TRIES):
        try:
            return _index(study)
        except (sqlite3.Error, sqlalchemy.exc.SQLAlchemyError, OSError) as error:
            if attempt < TRIES - 1:  # two processes that make the first ledger at once get in each other's way
                time.sleep(0.2 * (attempt + 1))
                continue
            raise RecordError(
                f"cannot write the ledger {study.parent / LEDGER} ({str(error).splitlines()[0]}). The study in {study} is "
                f"whole; make the ledger again with: workbench studies {study.parent} --rebuild"
            ) from error
    return None


def _index(study: Path) -> None:
    import optuna

    record = StudyRecord(study)
    trials = [{str(k): v for k, v in row.items()} for row in record.trials.to_dict("records")]
    ended = {row["trial"]: row for row in trials if row["state"] in ("complete", "diverged", "failed")}
    with _storage(study.parent) as storage, _quiet():
        direction = optuna.study.StudyDirection[{"min": "MINIMIZE", "max": "MAXIMIZE"}[record.config["select_mode"]]]
        row = optuna.create_study(storage=storage, study_name=study.name, direction=direction, load_if_exists=True)
        if row.user_attrs.get("path") != study.name:
            row.set_user_attr("path", study.name)
        known = {t.user_attrs.get("trial"): t.user_attrs.get("state") for t in row.get_trials(deepcopy=False)}
        if any(number not in ended or ended[number]["state"] != state for number, state in known.items()):
            # A failed trial has been trained again; Optuna keeps ended trials as they are, so the study is entered anew.
            optuna.delete_study(study_name=study.name, storage=storage)
            row, known = optuna.create_study(storage=storage, study_name=study.name, direction=direction), {}
            row.set_user_attr("path", study.name)
        row.add_trials([_frozen(values) for number, values in ended.items() if number not in known])


def list_studies(root: str | Path = "runs") -> pd.DataFrame:
    """Return the six required columns of every study under `root`, one row a study (P5)."""
    rows = [_study_row(folder) for folder in _study_folders(Path(root))]
    return pd.DataFrame(rows, columns=COLUMNS)


def rebuild(root: str | Path = "runs") -> int:
    """Write the ledger anew from the study folders; return how many it now holds."""
    folders = _study_folders(Path(root))
    for suffix in ("", "-wal", "-shm"):
        (Path(root) / f"{LEDGER}{suffix}").unlink(missing_ok=True)
    for folder in folders:
        index(folder)
    return len(folders)


def _study_row(folder: Path) -> dict[str, Any]:
    record = StudyRecord(folder)
    study, trials = record.study, record.trials
    best = trials["best_value"].min() if record.config["select_mode"] == "min" and len(trials) else math.nan
    if record.config["select_mode"] == "max" and len(trials):
        best = trials["best_value"].max()
    notes = []
    if study.get("commit"):
        notes.append(f"git checkout {study['commit'][:12]}")
    if study.get("patch"):
        notes.append(f"git apply {folder / study['patch']}")
    return {
        "study": study["name"],
        "config": str(folder / "study.json"),
        "note": study["note"],
        "trials": len(trials),
        "best_value": best,
        "reproduce": " && ".join([*notes, str(study.get("command"))]),
    }


def _study_folders(root: Path) -> list[Path]:
    if not root.is_dir():
        raise RecordError(
            f"{root} is no folder of studies. Run a diagnosis first, or give the folder: workbench studies DIR."
        )
    return sorted(path.parent for path in root.glob("*/study.json"))


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
        user_attrs=json.loads(json.dumps(attributes, default=str)),
    )


@contextlib.contextmanager
def _storage(root: Path) -> Iterator[Any]:
    import optuna

    path = root / LEDGER
    connection = sqlite3.connect(path, timeout=30)
    try:
        connection.execute("PRAGMA journal_mode=WAL")
    finally:
        connection.close()
    with _quiet():
        storage = optuna.storages.RDBStorage(
            f"sqlite:///{path}", engine_kwargs={"connect_args": {"timeout": 30}}, skip_compatibility_check=False
        )
    try:
        yield storage
    finally:
        storage.remove_session()
        storage.engine.dispose()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    import optuna

    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)
