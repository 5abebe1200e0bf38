"""Studies copied into a database that Optuna's own tools read, such as optuna-dashboard; needs the extra `ledger`.

The folders are the truth: nothing of the workbench reads the copy. No message holds an address or what a database says, so none
holds a password.
"""

from __future__ import annotations

import importlib.util
import logging
import math
from pathlib import Path
from typing import Any

from workbench.errors import RecordError, UsageError
from workbench.ledger.table import study_folders, study_row
from workbench.record.json_values import to_json
from workbench.record.read import StudyRecord


def push_studies(address: str, root: Path) -> int:
    """Bring the copy of every study in a folder up to date, and return how many there are.

    Args:
        address: `postgresql://user@host/name`, with the password in PGPASSWORD or ~/.pgpass, or `sqlite:///file.db`.
        root: folder of the studies.

    Raises:
        UsageError: the address is of neither kind.
        RecordError: the extra `ledger` is not installed, there is no such folder, or the database cannot be used.
    """
    backend, separator, rest = address.partition("://")
    if backend not in ("postgresql", "sqlite") or not separator:
        raise UsageError(
            "studies are pushed to postgresql://user@host/name, with the password in PGPASSWORD or ~/.pgpass, or to "
            "sqlite:///file.db: what was given begins with neither."
        )
    driver = "postgresql+psycopg" if backend == "postgresql" else backend
    needed = ("optuna", "sqlalchemy", "psycopg") if backend == "postgresql" else ("optuna", "sqlalchemy")
    if missing := next((name for name in needed if importlib.util.find_spec(name) is None), None):
        raise RecordError(f"this needs {missing}, which is not installed: pip install 'training-workbench[ledger]'.")
    folders = study_folders(root)
    import optuna

    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(logging.WARNING)
    try:
        storage = optuna.storages.RDBStorage(f"{driver}://{rest}")
        try:
            known = {study.study_name: study.user_attrs for study in storage.get_all_studies()}
            there = {name: (held.get("row", {}).get("created"), held.get("folder")) for name, held in known.items()}
            for folder in folders:
                _push(folder, storage, there, {each.name for each in folders})
        finally:
            storage.remove_session()
            storage.engine.dispose()
    except RecordError:
        raise
    except Exception as error:  # of Optuna, SQLAlchemy or the driver; each may name the address
        raise RecordError(
            f"the database could not be used ({type(error).__name__}). Is it there, not locked by somebody else, and user "
            f"and password right? The studies in {root} are whole; run the same command again."
        ) from None
    finally:
        optuna.logging.set_verbosity(before)
    return len(folders)


def _push(folder: Path, storage: Any, there: dict[str, tuple[Any, Any]], folders: set[str]) -> None:
    """Enter a study anew: Optuna keeps ended trials as they are, and one that failed may have been trained again."""
    import optuna

    record, row = StudyRecord(folder), study_row(folder)
    made = (row["created"], folder.name)

    # another machine's study may have the same name (P5.2), and a copy of this folder its time too
    def free(name: str) -> bool:
        created, where = there.get(name, made)
        return created == row["created"] and where not in folders - {folder.name}

    dated = f"{record.name} ({row['created']})"
    names = (record.name, dated, f"{dated}, {folder.name}")
    # its own, or else the first that is free
    name = min(names, key=lambda each: (there.get(each) != made, not free(each)))
    if name in there:
        optuna.delete_study(study_name=name, storage=storage)
    direction = optuna.study.StudyDirection[{"min": "MINIMIZE", "max": "MAXIMIZE"}[record.config["select_mode"]]]
    entry = optuna.create_study(storage=storage, study_name=name, direction=direction)
    entry.set_user_attr("row", to_json(row))
    entry.set_user_attr("folder", folder.name)
    there[name] = made
    rows = record.trials.to_dict("records")
    entry.add_trials([_frozen(values) for values in rows if values["state"] in ("complete", "diverged", "failed")])


def _frozen(values: dict[Any, Any]) -> Any:
    """Return a trial's row of the record as a trial of Optuna's."""
    import optuna

    value = values["best_value"]
    complete = values["state"] == "complete" and value is not None and math.isfinite(value)
    return optuna.trial.create_trial(
        state=optuna.trial.TrialState.COMPLETE if complete else optuna.trial.TrialState.FAIL,
        value=float(value) if complete else None,
        params={"peak_lr": float(values["peak_lr"])},
        distributions={"peak_lr": optuna.distributions.FloatDistribution(0.0, math.inf)},
        # One attribute for all of it: each costs a query of its own, and a study of 1,000 trials has 36,000 values.
        user_attrs={"row": to_json(values)},
    )
