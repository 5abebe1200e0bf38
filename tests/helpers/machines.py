"""Machines on this one: each has a network, processes, names and shared memory of its own, and can be cut off, paused and ended."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

NETWORK = "10.77.0."
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def until(there: Callable[[], object], what: Callable[[], str], timeout_s: float = 400.0) -> None:
    end = time.monotonic() + timeout_s
    while not there():
        assert time.monotonic() < end, what()
        time.sleep(0.1)


def _run(*words: str) -> str:
    path = {"PATH": _PATH}
    done = subprocess.run(words, capture_output=True, text=True, env=os.environ | path, check=False, timeout=30)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def _into(pid: int, *namespaces: str) -> list[str]:
    return ["nsenter", f"--target={pid}", "--user", "--preserve-credentials", *namespaces, "--"]


class _Held:
    """A process that holds namespaces for as long as it lives."""

    def __init__(self, words: Sequence[str], script: str) -> None:
        self.process = subprocess.Popen(
            [*words, "sh", "-ec", f"{script}\necho up\nexec sleep infinity"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | {"PATH": _PATH},
        )  # fmt: skip
        assert self.process.stdout is not None
        with self.process.stdout as said:
            if (line := said.readline()) != "up\n":
                self.process.wait(30)
                raise OSError(line.strip())

    @property
    def pid(self) -> int:
        """Of the process that is inside: the child where there is one, because no process changes its own PID namespace."""
        own = self.process.pid
        children = Path(f"/proc/{own}/task/{own}/children").read_text().split()
        return int(children[0]) if children else own

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            os.kill(self.pid, signal.SIGKILL)  # with process 1 all others of its namespace go
        self.process.kill()
        self.process.wait(30)


class Machine:
    """One of them, at `address`; other machines are known to it by the names in `hosts`."""

    def __init__(self, switch: _Held, number: int, folder: Path) -> None:
        self._switch, self._port = switch, f"port{number}"
        self.address, self.folder = f"{NETWORK}{number}", folder / str(number)
        self._card = f"02:00:00:00:00:{number:02x}"  # the same when it comes again: the others ask seldom
        self.folder.mkdir()
        self.hosts = self.folder / "hosts"
        self.know({})
        self._start()

    def _start(self) -> None:
        outside = _into(self._switch.pid, "--net", "--mount")
        mounts = f"mount -t proc proc /proc; mount -t tmpfs shm /dev/shm; mount --bind {self.hosts} /etc/hosts; ip link set lo up"
        self._held = _Held([*outside, "unshare", "--net", "--mount", "--pid", "--fork", "--kill-child"], mounts)
        _run(
            *outside,
            "ip",
            "link",
            "add",
            self._port,
            "type",
            "veth",
            "peer",
            "eth0",
            "address",
            self._card,
            "netns",
            str(self._held.pid),
        )
        _run(*outside, "ip", "link", "set", self._port, "master", "switch", "up")
        inside = self._words()
        _run(*inside, "ip", "address", "add", f"{self.address}/24", "dev", "eth0")
        _run(*inside, "ip", "link", "set", "eth0", "up")

    def _words(self) -> list[str]:
        return _into(self._held.pid, "--net", "--mount", "--pid")

    def know(self, names: dict[str, str]) -> None:
        """Let these names be known on it, from now on; its own always is."""
        always = {"localhost": "127.0.0.1", socket.gethostname(): self.address}
        self.hosts.write_text("".join(f"{at} {name}\n" for name, at in (always | names).items()))

    def start(self, name: str, command: Sequence[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
        """Start a process there, whose output goes to `log(name)`."""
        with self.log(name).open("ab") as log:
            own = {"TMPDIR": str(self.folder), "HOME": str(self.folder)}
            begin = ["sh", "-c", 'cd "$0" && exec "$@"', os.fspath(self.folder)]
            return subprocess.Popen([*self._words(), *begin, *command], stdout=log, stderr=log, env=environment | own)

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def listening(self) -> set[tuple[str, int, str]]:
        """Address, port and program of all that listens there."""
        lines = _run(*self._words(), "ss", "-Hltnp").splitlines()
        found = [re.search(r"(\S+):(\d+)\s+\S+:\S+\s+(?:users:\(\(\"([^\"]+)\")?", line) for line in lines]
        return {(match[1], int(match[2]), match[3] or "") for match in found if match}

    def processes(self, name: str) -> list[int]:
        """Processes there whose title begins so."""
        space = os.readlink(f"/proc/{self._held.pid}/ns/pid")
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.readlink(path / "ns/pid") == space and (path / "cmdline").read_bytes().startswith(name.encode()):
                    found.append(int(path.name))
        return found

    def cut(self) -> None:
        """Let nothing through any more, in either direction, and tell nobody."""
        _run(*_into(self._switch.pid, "--net"), "ip", "link", "set", self._port, "nomaster")

    def mend(self) -> None:
        _run(*_into(self._switch.pid, "--net"), "ip", "link", "set", self._port, "master", "switch")

    def end(self) -> None:
        """Let it go at once, with all that runs there."""
        self._held.end()

    def again(self) -> None:
        """Start it anew, empty."""
        self._start()


@contextlib.contextmanager
def machines(count: int) -> Iterator[list[Machine]]:
    """So many machines on one network; the test is skipped where the kernel allows none."""
    folder = Path(tempfile.mkdtemp(prefix="m"))  # a short one: names of sockets have at most 107 characters
    with contextlib.ExitStack() as undone:
        undone.callback(shutil.rmtree, folder, ignore_errors=True)
        try:
            own = ["unshare", "--user", "--map-root-user", "--net", "--mount"]
            switch = _Held(own, "ip link add switch type bridge; ip link set switch up")
            undone.callback(switch.end)
            made = []
            for number in range(1, count + 1):
                made.append(Machine(switch, number, folder))
                undone.callback(made[-1].end)
        except OSError as error:
            pytest.skip(f"no machines can be made of namespaces here: {error}")
        yield made
