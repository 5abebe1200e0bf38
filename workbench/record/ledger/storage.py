"""Where the ledger lives: an SQLite file beside the studies, or a database that several machines share.

Whatever goes wrong is said without a password: an address is shown scrubbed, and an exception of the database is not chained.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import sqlite3
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from workbench.errors import RecordError, UsageError
from workbench.record.json_values import scrub

__all__ = ["LEDGER", "VARIABLE", "lock_holders", "open_storage", "quiet", "shared_url", "wait_for_lock"]

LEDGER = "ledger.db"
VARIABLE = "WORKBENCH_LEDGER"
WAIT_S = 30.0
"""How long to wait for another process that is writing (rule of thumb)."""
SECRET = 4
"""A shorter password is looked for in its place alone: as a part of a word it would black out half of a message (rule of thumb)."""
_UNSAID = re.compile(r"\n\[SQL|\(Background on this error at")
"""Where a message of SQLAlchemy goes on with the statement, or with a link to an explanation of the class of error."""
CONNECT_S = 10
"""How long to wait for a server that does not answer (rule of thumb)."""


def shared_url(ledger: str | None = None) -> str | None:
    """Return the address of the shared ledger, None where the ledger is the file beside the studies.

    Args:
        ledger: an address such as `postgresql://user@host/name`; None takes the environment's WORKBENCH_LEDGER.

    Raises:
        UsageError: it is no address of a database.
    """
    import sqlalchemy

    given = ledger or os.environ.get(VARIABLE) or None
    if given is None:
        return None
    source = "ledger" if ledger else VARIABLE
    try:
        url = sqlalchemy.engine.make_url(given)
    except Exception:
        url = None
    if url is None or "://" not in given:
        raise UsageError(
            f"{source}={scrub(given)!r} is no address of a database. Write postgresql://user@host/name, and keep the password in "
            "PGPASSWORD or ~/.pgpass."
        ) from None
    many = given.partition("?")[0].count("@") > 1 or ("@" in (url.username or "") and "%40" not in given)
    if many and url.host:  # what is behind the first would be taken for the name of the server, and shown
        raise UsageError(
            f"{source}={scrub(given)!r} has an @ too many: write one that belongs to a name or a password as %40, or keep the "
            "password in PGPASSWORD or ~/.pgpass."
        )
    backend = url.get_backend_name()
    if backend not in ("postgresql", "postgres", "sqlite"):
        raise UsageError(
            f"{source}={scrub(given)!r} is an address of {backend!r}, and a ledger that several machines share lives in PostgreSQL: "
            "postgresql://user@host/name. Leave it out for the file beside the studies."
        )
    if backend in ("postgresql", "postgres"):
        url = url.set(drivername="postgresql+psycopg")
    return url.render_as_string(hide_password=False)


@contextlib.contextmanager
def open_storage(root: Path, ledger: str | None = None, *, wait_s: float | None = None) -> Iterator[Any]:
    """Open the ledger as an Optuna storage; who else is writing it is waited for.

    Args:
        root: folder of the studies; its ledger.db is used where no address is given.
        ledger: an address, see `shared_url`.
        wait_s: how long to wait; None is `WAIT_S`.

    Raises:
        RecordError: it cannot be reached, is locked for longer than that, or damaged; no message holds a password.
    """
    wait = WAIT_S if wait_s is None else wait_s
    url = shared_url(ledger)
    where = str(root / LEDGER) if url is None else _without(url, url)
    try:
        with quiet():
            storage = _file(root / LEDGER, wait) if url is None else _database(url, wait)
        try:
            yield storage
        finally:
            storage.remove_session()
            storage.engine.dispose()
    except Exception as error:
        said = _explained(error, root / LEDGER if url is None else None, where, wait, url)
        if said is None:
            raise
        raise RecordError(said) from None


def wait_for_lock(path: Path, wait_s: float | None = None) -> None:
    """Return once no other process writes the file, and at once where it is none, or no database.

    Args:
        path: of the ledger.
        wait_s: how long to wait; None is `WAIT_S`.

    Raises:
        RecordError: it is locked for longer than that; the message names the process.
    """
    wait = WAIT_S if wait_s is None else wait_s
    if not path.exists():
        return
    connection = sqlite3.connect(path, timeout=wait, isolation_level=None)
    try:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("ROLLBACK")
    except sqlite3.OperationalError as error:
        if "locked" in str(error):
            raise RecordError(
                f"the ledger {path} is locked by {lock_holders(path)}; waited {wait:g} s for it"
            ) from None
    except sqlite3.DatabaseError:  # damaged: what is made anew need not be whole
        pass
    finally:
        connection.close()


def _file(path: Path, wait_s: float) -> Any:
    import optuna

    connection = sqlite3.connect(path, timeout=wait_s)
    try:
        connection.execute("PRAGMA journal_mode=WAL")
    finally:
        connection.close()
    return optuna.storages.RDBStorage(f"sqlite:///{path}", engine_kwargs={"connect_args": {"timeout": wait_s}})


def _database(url: str, wait_s: float) -> Any:
    import optuna

    arguments: dict[str, Any] = {}
    if url.startswith("postgresql"):
        try:
            import psycopg  # noqa: F401
        except ImportError:
            raise RecordError("a PostgreSQL ledger needs its driver: pip install 'workbench[postgres]'.") from None
        arguments = {
            "connect_timeout": min(max(2, round(wait_s)), CONNECT_S),
            "options": f"-c lock_timeout={round(1000 * wait_s)}",
        }
    return optuna.storages.RDBStorage(url, engine_kwargs={"connect_args": arguments, "pool_pre_ping": True})


def _without(text: str, url: str | None) -> str:
    """Return `text` without the password of an address, however it is written there."""
    import sqlalchemy

    if url is not None:
        parsed = sqlalchemy.engine.make_url(url)
        secrets = [parsed.password, *(v for k, v in parsed.query.items() if k.endswith(("password", "passwd", "pwd")))]
        for secret in {str(s) for s in secrets if s}:
            for form in (
                secret,
                urllib.parse.quote(secret, safe=""),
                urllib.parse.quote(secret),
                urllib.parse.quote_plus(secret),
            ):
                text = text.replace(f":{form}@", ":***@").replace(f"={form}", "=***")
                if len(form) >= SECRET:
                    text = text.replace(form, "***")
    return scrub(text)


def _explained(error: Exception, path: Path | None, where: str, wait_s: float, url: str | None) -> str | None:
    """Return what went wrong with the database, None where it was something else."""
    import sqlalchemy

    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, (sqlite3.Error, sqlalchemy.exc.SQLAlchemyError, OSError)):
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        return None
    line = _without(" ".join(_UNSAID.split(str(cause), maxsplit=1)[0].split()), url)
    if "locked" in line and path is not None:
        return f"the ledger {where} is locked by {lock_holders(path)}; waited {wait_s:g} s for it"
    if "lock timeout" in line:
        return f"the ledger {where} is locked by another session of the database; waited {wait_s:g} s for it"
    return f"cannot use the ledger {where} ({line})"


def lock_holders(path: Path) -> str:
    """Return which processes hold a lock on an SQLite file, in words; Linux tells, other systems do not.

    Args:
        path: of the database; its -wal and -shm count as well.
    """
    inodes = set()
    for suffix in ("", "-wal", "-shm"):
        with contextlib.suppress(OSError):
            inodes.add(os.stat(f"{path}{suffix}").st_ino)
    pids = set()
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/locks").read_text().splitlines():
            words = [word for word in line.split() if word != "->"]
            if (
                int(words[5].rpartition(":")[2]) in inodes
                and "WRITE" in words
                and int(words[4]) not in (-1, os.getpid())
            ):
                pids.add(int(words[4]))
    if not pids:
        return "a process that cannot be seen from here (another machine that shares the folder, perhaps)"
    return f"{' and '.join(f'process {pid} ({_command(pid)})' for pid in sorted(pids))} on {socket.gethostname()}"


def _command(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return "unknown"
    said = " ".join(b" ".join(words).decode(errors="replace").split())
    return scrub(said)[:120] or "unknown"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep Optuna's own messages back."""
    import optuna

    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)
