"""Studies pushed to a ledger that Optuna's own tools read: PostgreSQL that several machines share, or an SQLite file.

Needs the extra `ledger`. The folders are the truth, and `rebuild` pushes them again. Whatever goes wrong is said without a
password: secrets in an address are cut out, and an exception of the database is not chained.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import math
import os
import re
import socket
import sqlite3
import time
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from workbench.errors import RecordError, UsageError
from workbench.ledger.table import study_folders, study_row
from workbench.record.folder import runs_root
from workbench.record.read import StudyRecord
from workbench.record.redact import redact

LEDGER = "ledger.db"
VARIABLE = "WORKBENCH_LEDGER"
TRIES = 4
WAIT_S = 30.0  # for another process that is writing (rule of thumb)
CONNECT_S = 10  # for a server that does not answer (rule of thumb)
SECRET = 4  # a shorter password is looked for in its place alone: as a part of a word it would black out half of a message (rule of thumb)
_UNSAID = re.compile(r"\n\[SQL|\(Background on this error at")  # where SQLAlchemy goes on with the statement, or a link


def pusher() -> Callable[[Path], None]:
    """Return what the writer of a study calls when it has closed it; a wrong WORKBENCH_LEDGER is a `UsageError` now."""
    shared_url()
    return push_closed


def push_closed(study: Path, *, wait_s: float | None = None, trials: bool = True) -> None:
    """Push a study where WORKBENCH_LEDGER says so, or into the ledger.db that lies beside it; what fails is a warning."""
    beside = (study.parent / LEDGER).exists() and _missing() is None
    if (study.parent / "study.json").exists() or not (beside or os.environ.get(VARIABLE)):
        return
    try:
        push(study, wait_s=wait_s, trials=trials)
    except (RecordError, UsageError) as error:  # it can be pushed again; what was trained must not seem lost
        logging.getLogger(__name__).warning("%s", error)


def push(study: Path, address: str | None = None, *, wait_s: float | None = None, trials: bool = True) -> None:
    """Bring a ledger's rows of one study folder up to date; trials that are there already stay."""
    began, wait = time.monotonic(), WAIT_S if wait_s is None else wait_s
    for attempt in range(1, TRIES + 1):
        try:
            return _push(study, address, wait, trials=trials)
        except RecordError as error:
            full = "locked" in str(error) and time.monotonic() - began > 0.9 * wait  # SQLite may also give up at once
            if attempt == TRIES or full or "connection" in str(error) or _missing():
                raise RecordError(
                    f"cannot write the ledger: {error}. The study in {study} is whole; make the ledger again with: "
                    f"workbench studies {study.parent} --rebuild"
                ) from None
            time.sleep(0.2 * attempt)  # two processes that make the first ledger at once get in each other's way


def rebuild(root: str | Path | None = None, *, ledger: str | None = None, wait_s: float | None = None) -> int:
    """Push all studies in a folder; return how many. The file ledger.db is made anew, in a shared ledger other studies stay."""
    root = root or runs_root()
    folders = study_folders(Path(root))
    if shared_url(ledger) is None:
        _check_installed()
        file = Path(root) / LEDGER
        if file.exists():
            _check_unlocked(file, WAIT_S if wait_s is None else wait_s)
        for suffix in ("", "-wal", "-shm"):
            Path(f"{file}{suffix}").unlink(missing_ok=True)
    for folder in folders:
        push(folder, ledger, wait_s=wait_s)
    return len(folders)


def pushed_rows(root: Path, address: str | None = None) -> list[dict[str, Any]]:
    """Return the rows of the table of studies that a ledger has; the address as for `push`."""
    with _open_storage(root, address, WAIT_S) as storage:
        found = [dict(study.user_attrs["row"]) for study in storage.get_all_studies() if "row" in study.user_attrs]
    return [row | ({"best_value": math.nan} if row["best_value"] is None else {}) for row in found]


def shared_url(address: str | None = None) -> str | None:
    """Return the address of the shared ledger, None where the ledger is the file beside the studies."""
    given = address or os.environ.get(VARIABLE) or None
    if given is None:
        return None
    _check_installed()
    import sqlalchemy

    # what is no address may hide a password from `redact`
    shown = re.sub(r"(?<=:)[^:/][^:]*(?=@)", "***", redact(given))
    said = f"{'ledger' if address else VARIABLE}={shown!r}"
    try:
        url = sqlalchemy.engine.make_url(given)
    except Exception:
        url = None
    if url is None or "://" not in given:
        raise UsageError(
            f"{said} is not an address of a database. Write postgresql://user@host/name, and keep the password in "
            "PGPASSWORD or ~/.pgpass."
        ) from None
    many = given.partition("?")[0].count("@") > 1 or ("@" in (url.username or "") and "%40" not in given)
    if many and url.host:  # what is behind the first would be taken for the name of the server, and shown
        raise UsageError(
            f"{said} has one @ too many: write one that belongs to a name or a password as %40, or keep the "
            "password in PGPASSWORD or ~/.pgpass."
        )
    backend = url.get_backend_name()
    if backend not in ("postgresql", "postgres", "sqlite"):
        raise UsageError(
            f"{said} is an address of {backend!r}, and a ledger that several machines share lives in PostgreSQL: "
            "postgresql://user@host/name. Leave it out for the file beside the studies."
        )
    if backend != "sqlite":
        _check_installed("psycopg")
        url = url.set(drivername="postgresql+psycopg")
    return url.render_as_string(hide_password=False)


def _missing(*also: str) -> str | None:
    return next((name for name in ("optuna", "sqlalchemy", *also) if importlib.util.find_spec(name) is None), None)


def _check_installed(*also: str) -> None:
    if missing := _missing(*also):
        raise RecordError(
            f"a ledger needs {missing}, which is not installed: pip install 'training-workbench[ledger]'."
        )


def _push(study: Path, address: str | None, wait_s: float, *, trials: bool) -> None:
    with _open_storage(study.parent, address, wait_s) as storage:
        import optuna

        record, shared = StudyRecord(study), shared_url(address) is not None
        direction = optuna.study.StudyDirection[{"min": "MINIMIZE", "max": "MAXIMIZE"}[record.config["select_mode"]]]
        name, created = record.name, record.study.get("created")
        for known in storage.get_all_studies():  # another machine's study may have the same name (P5.2)
            if known.study_name == record.name and known.user_attrs.get("row", {}).get("created", created) != created:
                name = f"{record.name} ({created})"
        row = study_row(study.resolve() if shared else study)
        if shared:
            row["config"] = f"{socket.gethostname()}:{row['config']}"
        if not math.isfinite(row["best_value"]):
            row["best_value"] = None
        entry = optuna.create_study(storage=storage, study_name=name, direction=direction, load_if_exists=True)
        if trials or "row" not in entry.user_attrs:
            rows = [{str(k): v for k, v in values.items()} for values in record.trials.to_dict("records")]
            ended = {each["trial"]: each for each in rows if each["state"] in ("complete", "diverged", "failed")}
            known = {t.user_attrs.get("trial"): t.user_attrs.get("state") for t in entry.get_trials(deepcopy=False)}
            if any(number not in ended or ended[number]["state"] != state for number, state in known.items()):
                # A failed trial has been trained again; Optuna keeps ended trials as they are, so the study is entered anew.
                optuna.delete_study(study_name=name, storage=storage)
                entry, known = optuna.create_study(storage=storage, study_name=name, direction=direction), {}
            entry.set_user_attr("row", row)
            entry.add_trials([_frozen(values) for number, values in ended.items() if number not in known])
        else:
            entry.set_user_attr("row", row)


def _frozen(values: dict[str, Any]) -> Any:
    """Return a trial's row of the record as a trial of Optuna's."""
    import optuna

    finite = values["best_value"] is not None and math.isfinite(values["best_value"])
    complete = finite and values["state"] == "complete"
    attributes = {k: v for k, v in values.items() if not (isinstance(v, float) and not math.isfinite(v))}
    return optuna.trial.create_trial(
        state=optuna.trial.TrialState.COMPLETE if complete else optuna.trial.TrialState.FAIL,
        value=float(values["best_value"]) if complete else None,
        params={"peak_lr": float(values["peak_lr"])},
        distributions={"peak_lr": optuna.distributions.FloatDistribution(0.0, math.inf)},
        # One attribute for all of it: each costs a query of its own, and a study of 1,000 trials has 36,000 values.
        user_attrs={
            "trial": values["trial"],
            "state": values["state"],
            "row": json.loads(json.dumps(attributes, default=str)),
        },
    )


@contextlib.contextmanager
def _open_storage(root: Path, address: str | None, wait_s: float) -> Iterator[Any]:
    """Open the ledger as an Optuna storage, Optuna's own messages kept back; who else is writing it is waited for."""
    url = shared_url(address)
    _check_installed()
    import optuna

    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(logging.WARNING)
    try:
        if url is None:
            with contextlib.closing(sqlite3.connect(root / LEDGER, timeout=wait_s)) as connection:
                connection.execute("PRAGMA journal_mode=WAL")
            engine: dict[str, Any] = {"connect_args": {"timeout": wait_s}}
        else:
            engine = {"connect_args": {}, "pool_pre_ping": True}
            if url.startswith("postgresql"):
                engine["connect_args"] = {
                    "connect_timeout": min(max(2, round(wait_s)), CONNECT_S),
                    "options": f"-c lock_timeout={round(1000 * wait_s)}",
                }
        storage = optuna.storages.RDBStorage(url or f"sqlite:///{root / LEDGER}", engine_kwargs=engine)
        try:
            yield storage
        finally:
            storage.remove_session()
            storage.engine.dispose()
    except Exception as error:
        said = _explained(error, root / LEDGER, url, wait_s)
        if said is None:
            raise
        raise RecordError(said) from None
    finally:
        optuna.logging.set_verbosity(before)


def _explained(error: Exception, file: Path, url: str | None, wait_s: float) -> str | None:
    """Return what went wrong with the database, None where it was something else."""
    import sqlalchemy

    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, (sqlite3.Error, sqlalchemy.exc.SQLAlchemyError, OSError)):
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        return None
    where = _without_password(url or str(file), url)
    line = _without_password(" ".join(_UNSAID.split(str(cause), maxsplit=1)[0].split()), url)
    if "lock timeout" in line or ("locked" in line and url is None):
        return _locked(where, "process" if url is None else "session of the database", wait_s)
    return f"cannot use the ledger {where} ({line})"


def _without_password(text: str, url: str | None) -> str:
    """Return `text` without the password of an address, however it is written there."""
    import sqlalchemy

    if url is not None:
        parsed = sqlalchemy.engine.make_url(url)
        secrets = [parsed.password, *(v for k, v in parsed.query.items() if k.endswith(("password", "passwd", "pwd")))]
        for secret in {str(s) for s in secrets if s}:
            quoted = urllib.parse.quote(secret, safe=""), urllib.parse.quote(secret), urllib.parse.quote_plus(secret)
            for form in (secret, *quoted):
                text = text.replace(f":{form}@", ":***@").replace(f"={form}", "=***")
                if len(form) >= SECRET:
                    text = text.replace(form, "***")
    return redact(text)


def _check_unlocked(file: Path, wait_s: float) -> None:
    """Wait until nobody writes an SQLite file; one that is damaged may be replaced at once."""
    with contextlib.closing(sqlite3.connect(file, timeout=wait_s, isolation_level=None)) as connection:
        try:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("ROLLBACK")
        except sqlite3.DatabaseError as error:
            if "locked" in str(error):
                raise RecordError(_locked(str(file), "process", wait_s)) from None


def _locked(where: str, who: str, wait_s: float) -> str:
    return f"the ledger {where} is locked by another {who}; waited {wait_s:g} s for it"
