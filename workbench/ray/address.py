"""What lets a process into a Ray cluster: an address that answers, found out in seconds, and a token.

Joining a cluster that does not answer hangs for minutes.
"""

import contextlib
import ipaddress
import os
import secrets
import select
import socket
import subprocess
import sys
from pathlib import Path
from typing import IO

from workbench.errors import ClusterError, UsageError

CONNECT_S = 3.0  # rule of thumb: a port that is open answers in milliseconds
ANSWER_S = 6.0  # rule of thumb: so does a cluster
IMPORT_S = 60.0  # rule of thumb: what a busy machine needs to import Ray

# Private, because `ray status` asks a cluster that listens on loopback alone at the machine's own address, where it is not.
_ASK = """
import sys
from ray._private.services import canonicalize_bootstrap_address
from ray._raylet import GcsClient
address = canonicalize_bootstrap_address("auto") if sys.argv[1] == "auto" else sys.argv[1]
print("asking", flush=True)
GcsClient(address=address)
print("answered", flush=True)
"""


def check_address(address: str, *, answer_s: float = ANSWER_S) -> None:
    """Return if a Ray cluster answers at `address`."""
    if address == "auto":
        if not _answers(address, answer_s):
            raise _unanswered(
                address, "none runs on this machine that this process can reach, nor at RAY_ADDRESS where it is set"
            )
        return
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UsageError(
            f"address={address!r} is not understood. Allowed: 'host:port' as `ray start --head` prints it (port 6379 by "
            "default), 'auto' for the cluster on this machine, or nothing for a new one; ray:// is not supported."
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
    except OSError as error:
        raise _unanswered(address, str(error.strerror or error)) from error
    if not _answers(address, answer_s):
        raise _unanswered(address, "the port is open, but it is not that of a Ray cluster that accepts this client")


def is_loopback(host: str) -> bool:
    """Whether a host is this machine for itself alone."""
    host = host.strip("[]")
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host.lower() == "localhost"


def only_on_loopback(address: str, own: str) -> bool:
    """Return whether a cluster at a loopback address of this machine is not there at the machine's `own` address."""
    host, _, port = address.rpartition(":")
    if not is_loopback(host) or host.strip("[]") == own:
        return False
    try:
        socket.create_connection((own, int(port)), timeout=CONNECT_S).close()
    except OSError:
        return True
    return False


def _unanswered(address: str, why: str) -> ClusterError:
    return ClusterError(
        f"no Ray cluster answers at address={address!r}: {why.lower()}. Start one with `ray start --head --port=6379` and "
        "give host:6379; leave the address out to have one started on this machine. A cluster that asks for a token "
        "needs RAY_AUTH_MODE=token here too."
    )


def _answers(address: str, answer_s: float) -> bool:
    """Whether a cluster answers in time. Ray's client has no time limit: only a process of its own can be given up."""
    command = [sys.executable, "-c", _ASK, address]
    with subprocess.Popen(command, bufsize=0, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as asking:
        try:
            assert asking.stdout is not None
            return _says(asking.stdout, b"asking\n", IMPORT_S) and _says(asking.stdout, b"answered\n", answer_s)
        finally:
            asking.kill()


def _says(lines: IO[bytes], line: bytes, within_s: float) -> bool:
    """Whether the next line is this one and comes in time; the stream must not read ahead."""
    ready, _, _ = select.select([lines], [], [], within_s)
    return bool(ready) and lines.readline() == line


def require_token(*, alone: bool) -> None:
    """Let Ray ask every process for a token, and see to it that this one has it.

    Whoever reaches a cluster without one runs any code there. Ray reads the token from RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or
    ~/.ray/auth_token; who set RAY_AUTH_MODE has decided for themselves and is left alone.

    Args:
        alone: all of the cluster is on this machine: a token that is missing is made, in ~/.ray/auth_token, and one that is there becomes its
            owner's alone.
    """
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    if "ray" in sys.modules:
        from ray._raylet import Config  # type: ignore[attr-defined]

        Config.initialize("")  # the mode was read when Ray was imported, and nothing public reads it again
    if os.environ["RAY_AUTH_MODE"].lower() != "token" or os.environ.get("RAY_AUTH_TOKEN", "").strip():
        return
    token = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    try:
        there = token.is_file() and bool(token.read_text().strip())
        if alone and not there and "RAY_AUTH_TOKEN_PATH" not in os.environ:
            _make_token(token)
            there = True
        if alone and there and token.stat().st_mode & 0o077 and "RAY_AUTH_TOKEN_PATH" not in os.environ:
            token.chmod(0o600)  # Ray by itself leaves it to everybody
    except OSError as error:
        raise ClusterError(
            f"the cluster's token cannot be kept in ~/.ray ({error}): set HOME to a folder that can be written, or RAY_AUTH_TOKEN_PATH "
            "to a file that holds one."
        ) from error
    if not there:
        raise ClusterError(
            "this machine has no token of the cluster, and without one anybody who reaches its port could run code here. Make one with "
            "`ray get-auth-token --generate`, copy it to every machine, and set RAY_AUTH_TOKEN_PATH to the file there. "
            "RAY_AUTH_MODE=disabled does without, in a network that you trust."
        )


def _make_token(path: Path) -> None:
    """Write a token whole, its owner's alone, or leave the one that another process wrote at the same moment."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    made = path.with_name(f".{path.name}.{os.getpid()}")
    with os.fdopen(os.open(made, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    try:
        if path.is_file() and not path.read_text().strip():
            made.replace(path)  # an empty one is none
        else:
            os.link(made, path)
    except FileExistsError:
        pass
    finally:
        made.unlink(missing_ok=True)
