"""A run that is forked where its imports are done is the run that the command makes by itself, or none is forked."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from workbench.programs.command import Command, Outcome, check_command, run_command
from workbench.programs.forks import ForkedRun

NOTHING: dict[str, Any] = {"factor": 1.0, "warmup_steps": 0, "max_grad_norm": None, "stop_after": None, "seed": 0}
SCRIPT = """
import os
os.environ["WORKBENCH_TEST"] = "set before torch is imported"
import atexit, random, sys
import numpy as np
random.seed(5), np.random.seed(5)
import torch
from torch.utils.data import DataLoader
mode = open("mode.txt").read()
torch.manual_seed(3), random.seed(3)
def main():
    atexit.register(print, "at exit")
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for batch in DataLoader(torch.randn(80, 6), batch_size=4, shuffle=True):
        optimizer.zero_grad()
        loss = (model(batch + random.random() + float(np.random.rand())) - 1).square().mean()
        loss.backward()
        optimizer.step()
        print("loss", repr(loss.item()))
    here = os.getcwd()
    print([a.replace(here, "") for a in (*sys.argv, sys.path[0], __file__)], __name__, __spec__ and __spec__.name, sys.modules["__main__"].main is main)
    print(sys.flags, sys.stdin.isatty(), os.getsid(0) == os.getpid() == os.getpgid(0), signal_handlers(), torch.get_num_threads(), sorted(os.environ))
    if mode == "exit":
        sys.exit(3)
    if mode == "raise":
        raise ValueError("of its own")
    if mode == "child" and not os.fork():
        os.setsid()
        open(sys.argv[1], "w").write(str(os.getpid()))
        while True:
            os.sched_yield()
    while mode == "endless":
        open(sys.argv[1], "w").write(str(os.getpid()))
def signal_handlers():
    import signal
    return [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGPIPE)]
if __name__ == "__main__":
    main()
"""


class Runs:
    def __init__(self, tmp_path: Path, *words: str, text: str = SCRIPT) -> None:
        self.folder, self.scratch, self.count = tmp_path / "mine", tmp_path, 0
        self.folder.mkdir()
        (self.folder / "train.py").write_text(text)
        self.pid = tmp_path / "pid.txt"
        self.command = Command(words=check_command([*words, str(self.pid)], self.folder), folder=self.folder)

    def __call__(self, *, plain: bool = False, mode: str = "", **changes: Any) -> Outcome:
        self.count += 1
        (self.folder / "mode.txt").write_text(mode)
        place, trial = self.scratch / str(self.count), NOTHING | changes
        return run_command(self.command, place, trial, threads=1) if plain else self.command.run(place, trial, threads=1)  # fmt: skip

    def child(self) -> int:
        until, said = time.monotonic() + 60, ""
        while not said and time.monotonic() < until:  # it is written again and again, and empty in between
            said = self.pid.read_text() if self.pid.exists() else ""
        return int(said)


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    found = Runs(tmp_path, "python", "train.py")
    yield found
    found.command.stop()


def is_gone(pid: int) -> bool:
    until = time.monotonic() + 10  # a process that was killed may still be on its way out
    while time.monotonic() < until:
        try:
            if Path("/proc", str(pid), "stat").read_text().split()[2] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize("words", [("python", "train.py"), ("python", "-m", "train")])
def test_a_forked_run_is_the_run_that_the_command_makes_by_itself(tmp_path: Path, words: tuple[str, ...]) -> None:
    runs = Runs(tmp_path, *words)
    first = runs()
    assert first.updates == 20
    assert runs.command.forks.server is None
    for changes in ({}, {"seed": 4, "factor": 3.0, "stop_after": 15}):
        forked = runs(**changes)
        assert runs.command.forks.server is not None
        assert runs.command.remark == ""
        plain = first if not changes else runs(plain=True, **changes)
        exact = [name for name in plain.columns if not name.endswith("_s")]
        assert {name: forked.columns[name] for name in exact} == {name: plain.columns[name] for name in exact}
        assert forked.tail.splitlines() == plain.tail.splitlines()
        assert (forked.code, forked.facts["seeded"], forked.facts["built"]) == (
            0,
            first.facts["seeded"],
            first.facts["built"],
        )
    runs.command.stop()
    assert runs.command.forks.server.poll() is not None


def test_a_forked_run_ends_as_its_program_does_with_all_that_it_started_and_a_server_that_dies_is_missed_by_nobody(
    runs: Runs,
) -> None:
    first = runs()
    assert runs(mode="exit").code == 3
    raised = runs(mode="raise")
    assert (raised.code, raised.tail.splitlines()[-2:]) == (1, ["ValueError: of its own", "at exit"])
    assert runs(mode="child").code == 0
    assert is_gone(runs.child())
    assert runs.command.remark == ""
    server = runs.command.forks.server
    assert server is not None
    os.kill(server.pid, signal.SIGKILL)
    server.wait()
    assert runs().columns["loss"] == first.columns["loss"]
    assert "has ended" in runs.command.remark


def test_an_exit_code_is_taken_for_no_process() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.send(b"1")  # of a process that ended before it said which one it is
    assert not ForkedRun(ours).pid
    for each in (ours, theirs):
        each.close()


def test_an_interrupt_ends_a_forked_run_and_what_forks(runs: Runs) -> None:
    runs()
    raised = []

    def endless() -> None:
        with contextlib.suppress(KeyboardInterrupt):
            runs(mode="endless")
            raised.append("nothing")

    thread = threading.Thread(target=endless)
    thread.start()
    pid = runs.child()
    server = runs.command.forks.server
    runs.command.stop()
    thread.join(60)
    assert (thread.is_alive(), raised, is_gone(pid)) == (False, [], True)
    assert server is not None
    assert server.poll() is not None


LATE = SCRIPT.replace("import torch\n", "os.environ['OMP_NUM_THREADS'] = '1'\nimport torch\n", 1)
ELSEWHERE = f"import subprocess, sys\nsys.exit(subprocess.call([sys.executable, '-c', {SCRIPT.replace('__file__', 'here')!r}, *sys.argv[1:]]))"


@pytest.mark.parametrize(
    ("text", "why"), [(LATE, "sets OMP_NUM_THREADS before it imports torch"), (ELSEWHERE, "process that it starts")]
)
def test_a_program_whose_imports_may_find_something_else_is_not_forked(tmp_path: Path, text: str, why: str) -> None:
    runs = Runs(tmp_path, "python", "train.py", text=text)
    assert runs().columns["loss"] == runs().columns["loss"]
    assert runs.command.forks.server is None
    assert why in runs.command.remark
