"""A PostgreSQL server of one test: on loopback, in a folder of its own, with a password, and gone afterwards."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Server", "binaries", "server"]

PASSWORD = "correct-horse"


class Server(NamedTuple):
    """Where it listens, and its superuser."""

    port: int
    user: str
    password: str

    def url(self, password: str | None = None) -> str:
        return f"postgresql://{self.user}:{password or self.password}@127.0.0.1:{self.port}/postgres"


def binaries() -> Path | None:
    """Folder of initdb and pg_ctl, None where PostgreSQL is not installed."""
    places = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    found = shutil.which("pg_ctl")
    places += [Path(found).resolve().parent] if found else []
    return next((p for p in places if (p / "initdb").exists() and (p / "pg_ctl").exists()), None)


def _other_user() -> dict[str, Any]:
    """The server refuses to run as root: it runs as the first of these users that there is."""
    if os.geteuid() != 0:
        return {}
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            entry = pwd.getpwnam(name)
            return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
    raise RuntimeError("neither postgres nor nobody is a user here")


@contextlib.contextmanager
def server() -> Iterator[Server]:
    """Start a server and stop it."""
    where = binaries()
    assert where is not None
    who = _other_user()
    folder = Path(tempfile.mkdtemp(prefix="pg-"))
    try:
        (folder / "password").write_text(PASSWORD)
        for path in (folder, folder / "password") if who else ():
            os.chown(path, who["user"], who["group"])
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]

        def run(program: str, *words: str) -> None:
            with (folder / "said").open("ab") as said:
                done = subprocess.run(
                    [str(where / program), "-D", str(folder / "data"), *words],
                    **who, cwd=folder, stdout=said, stderr=said, stdin=subprocess.DEVNULL, timeout=120, check=False,
                    env={"PATH": os.environ["PATH"], "LC_ALL": "C", "TZ": "UTC"},
                )  # fmt: skip
            assert done.returncode == 0, (folder / "said").read_text()

        run(
            "initdb",
            "-U",
            "bench",
            "--auth=scram-sha-256",
            f"--pwfile={folder / 'password'}",
            "--no-sync",
            "-E",
            "UTF8",
        )
        options = f"-h 127.0.0.1 -p {port} -k {folder} -c fsync=off -c max_connections=20"
        run("pg_ctl", "-w", "-t", "60", "-l", str(folder / "log"), "-o", options, "start")
        try:
            yield Server(port, "bench", PASSWORD)
        finally:
            run("pg_ctl", "-w", "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
