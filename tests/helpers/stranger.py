"""A client that does not belong to a Ray cluster: another user where this one may become one, at every port, with every token but the right one."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = os.fspath(Path(__file__).parents[2])
NOBODY = 65534

PROGRAM = f"""
import contextlib, encodings.idna, json, os, pickle, random, socket, sys  # all that another user may not be able to read
from workbench.errors import ClusterError
from workbench.ray.address import check_address

host, head, mark, tokens, *ports = sys.argv[1:]
with contextlib.suppress(OSError):  # who may not, or is in a name space of one user, stays who it is
    os.setegid({NOBODY})
    os.seteuid({NOBODY})

class Bomb:
    def __reduce__(self):
        return os.system, (f"touch {{mark}}",)

for port in map(int, ports):
    for given in (random.Random(port).randbytes(4096), pickle.dumps(Bomb()), b"GET / HTTP/1.1\\r\\n\\r\\n", b""):
        with socket.create_connection((host, port), timeout=5) as line:
            line.sendall(given)
who = os.geteuid()
if not os.access(os.path.realpath(sys.executable), os.X_OK, effective_ids=True):  # Ray's own client is another process
    os.seteuid(os.getuid())
for token in json.loads(tokens):
    os.environ.pop("RAY_AUTH_TOKEN", None)
    os.environ.update({{"RAY_AUTH_MODE": "disabled"}} if token is None else {{"RAY_AUTH_TOKEN": token, "RAY_AUTH_MODE": "token"}})
    try:
        check_address(f"{{host}}:{{head}}")
        print("in")
    except ClusterError as error:
        print("refused")
print(who)
"""


def command(host: str, head: int, mark: Path, tokens: Sequence[str | None], ports: Sequence[int]) -> list[str]:
    """It prints "in" or "refused" for each token, and who it was."""
    words = [host, str(head), os.fspath(mark), json.dumps(tokens), *map(str, ports)]
    return [sys.executable, "-c", PROGRAM, *words]


def environment() -> dict[str, str]:
    """Nothing of whoever starts it but the programs."""
    return {k: v for k, v in os.environ.items() if not k.startswith("RAY_")} | {
        "PYTHONPATH": ROOT,
        "HOME": "/nonexistent",
    }
