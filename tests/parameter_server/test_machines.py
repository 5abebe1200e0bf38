"""Training on two machines that have a network between them: what is open, and what becomes of it when one is cut off, paused or gone (T9, T10)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import stranger
from tests.helpers.machines import Machine, machines, until

pytestmark = [pytest.mark.cluster, pytest.mark.nightly]

ROOT = os.fspath(Path(__file__).parents[2])
SPEC = {"chief": ["a.train:2220"], "worker": ["a.train:2221", "b.train:2222"], "ps": ["a.train:2223"]}
CHIEF = """
import pathlib, threading, time
import torch
import workbench as wb

with wb.ps.connect_to_cluster(wait_s=300) as cluster:
    print(cluster, flush=True)
    strategy = wb.ps.Strategy(cluster)
    coordinator = wb.ps.ClusterCoordinator(strategy)
    total = strategy.variable(torch.zeros(1))
    ended, scheduled, room = open("ended", "a", buffering=1), 0, threading.Semaphore(8)

    def add(total):
        time.sleep(0.02)
        total.assign_add(torch.ones(1))
        return wb.ps.get_current_worker_index()

    def note(value):
        ended.write(f"{time.monotonic()} {value.fetch()}\\n")
        room.release()

    while not pathlib.Path("stop").exists():
        room.acquire()
        value = coordinator.schedule(add, args=(total,))
        value.add_done_callback(lambda value=value: note(value))
        scheduled += 1
        if pathlib.Path("join").exists():
            begun = time.monotonic()
            coordinator.join()
            print("joined in", time.monotonic() - begun, flush=True)
    coordinator.join()
    print("total", total.read().item(), "of", scheduled, flush=True)
"""


LOOP = """
import pathlib, time
import torch
import workbench as wb

def step(placed):
    with placed.step() as module:
        module(torch.ones(2)).sum().backward()
    time.sleep(0.02)

with wb.ps.connect_to_cluster(wait_s=300) as cluster:
    strategy = wb.ps.Strategy(cluster)
    coordinator = wb.ps.ClusterCoordinator(strategy)
    config = wb.TrainConfig(optimizer="adam", peak_lr=0.01, total_steps=1000, batch_size=1)
    placed = strategy.place(torch.nn.Linear(2, 1), config)
    manager = wb.ps.CheckpointManager(placed, "checkpoints")
    manager.save()
    done = 0
    while not pathlib.Path("stop").exists():
        try:
            for _ in range(10):
                coordinator.schedule(step, args=(placed,))
            coordinator.join()
            manager.save()
            done += 10
            print("done", done, placed.steps, flush=True)
        except wb.ps.UnavailableError as error:
            print("told", time.monotonic(), error.job, flush=True)
            assert manager.recover(coordinator).steps == done
    assert placed.steps == done
"""


class Tasks:
    """The tasks of one cluster on machines a and b."""

    def __init__(self, a: Machine, b: Machine, spec: dict[str, list[str]] = SPEC, script: str = CHIEF) -> None:
        self.a, self.b, self._spec = a, b, spec
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        (a.folder / "train.py").write_text(script)

    def start(self, machine: Machine, job: str, index: int, *words: str) -> None:
        told = {"cluster": self._spec, "task": {"type": job, "index": index}}
        environment = os.environ | {
            "WORKBENCH_CLUSTER": json.dumps(told),
            "RAY_AUTH_TOKEN": "0" * 64,
            "PYTHONPATH": ROOT,
        }
        name = f"{job}-{index}"
        command = [sys.executable, "-m", "workbench", "ps", "--wait", "200", *words]
        self.running[name] = machine.start(name, command, environment)

    def said(self) -> str:
        logs = [path for machine in (self.a, self.b) for path in sorted(machine.folder.glob("*.log"))]
        return "\n".join(f"== {path}\n{path.read_text()[-3000:]}" for path in logs)

    def ended(self, since: float = 0.0) -> Counter[int]:
        """Functions that ended, by worker."""
        path = self.a.folder / "ended"
        lines = path.read_text().splitlines() if path.exists() else []
        return Counter(int(line.split()[1]) for line in lines if float(line.split()[0]) >= since)

    def both_train(self) -> None:
        begun = time.monotonic()
        until(lambda: all(self.ended(begun)[worker] > 10 for worker in (0, 1)), self.said)

    def rate(self, worker: int, seconds: float = 4.0) -> float:
        """Functions that a worker ends per second, from now on."""
        begun = time.monotonic()
        time.sleep(seconds)
        return self.ended(begun)[worker] / seconds

    def all_right(self) -> None:
        failed = {name: process.poll() for name, process in self.running.items() if process.poll() is not None}
        assert not failed, self.said()

    def end(self) -> None:
        """End training."""
        (self.a.folder / "stop").touch()
        for process in self.running.values():
            assert process.wait(120) == 0, self.said()

    def kill(self) -> None:
        for process in self.running.values():
            process.kill()
            process.wait(30)

    def finish(self) -> None:
        """End training, and see that every function counted once."""
        self.end()
        last = self.a.log("chief-0").read_text().rpartition("total ")[2].split()
        assert float(last[0]) == int(last[2]) == sum(self.ended().values())


@pytest.mark.parametrize("cut", [True, False])
def test_a_server_whose_machine_is_cut_off_or_gone_is_told_within_ten_seconds(cut: bool) -> None:
    """T10.2, T14.6: and the loop goes on from its checkpoint, on the same coordinator, when the machine is there again."""
    spec = SPEC | {"worker": ["a.train:2221"], "ps": ["b.train:2223"]}
    with machines(2) as (a, b):
        made = Tasks(a, b, spec, LOOP)
        lines = lambda word: [line for line in a.log("chief-0").read_text().splitlines() if line.startswith(word)]  # noqa: E731
        try:
            for machine in (a, b):
                machine.know({"a.train": a.address, "b.train": b.address})
            made.start(b, "ps", 0)
            made.start(a, "worker", 0)
            made.start(a, "chief", 0, "--script", "train.py")
            until(lambda: len(lines("done")) > 3, made.said)
            begun = time.monotonic()
            b.cut() if cut else b.end()
            until(lambda: lines("told"), made.said)
            told_s = float(lines("told")[0].split()[1]) - begun
            print(f"told after {told_s:.1f} s")  # pytest -rP shows it
            assert lines("told")[0].endswith(" ps")
            if cut:
                b.mend()
            else:
                made.running.pop("ps-0").wait(30)
                b.again()
                made.start(b, "ps", 0)
            before = len(lines("done"))
            until(lambda: len(lines("done")) > before + 3, made.said)
            made.end()
        finally:
            made.kill()
    assert told_s < 10.0


@pytest.fixture(scope="module")
def tasks() -> Iterator[Tasks]:
    """Started in the wrong order, and known by their names only some seconds later; in the end every function counted once (T9.2)."""
    with machines(2) as (a, b):
        made = Tasks(a, b)
        try:
            made.start(b, "worker", 1)
            made.start(a, "ps", 0)
            made.start(a, "worker", 0)
            time.sleep(4.0)
            made.start(a, "chief", 0, "--script", "train.py")
            time.sleep(4.0)
            made.all_right()
            for machine in (a, b):
                machine.know({"a.train": a.address, "b.train": b.address})
            made.both_train()
            yield made
            made.finish()
            assert a.listening() == b.listening() == set()
        finally:
            made.kill()


def test_what_is_open(tasks: Tasks) -> None:
    """The addresses of the description, and what the page lists beside them."""
    for machine, named in ((tasks.a, {2220, 2221, 2223}), (tasks.b, {2222})):
        found = machine.listening()
        assert named <= {port for _, port, _ in found}
        others = {
            (address.replace(machine.address, "its address"), program)
            for address, port, program in found
            if port not in named
        }
        assert others <= {
            ("*", "raylet"), ("*", "ray::WorkerActo"), ("*", "ray::ServerActo"), ("*", "ray::IDLE"), ("*", "python"),
            ("its address", "ray::RuntimeEnv"),
        }  # fmt: skip


def test_a_stranger_runs_nothing_and_disturbs_nobody(tasks: Tasks) -> None:
    """Random bytes, pickles and silence at every port, then Ray's own client with a wrong token, with none, and with the right one."""
    mark = tasks.a.folder / "mark"
    ports = sorted({port for address, port, _ in tasks.a.listening() if address in ("*", tasks.a.address)})
    command = stranger.command("a.train", 2220, mark, ["1" * 64, None, "0" * 64], ports)
    made = tasks.b.start("stranger", command, stranger.environment())
    assert made.wait(120) == 0, tasks.said()
    assert tasks.b.log("stranger").read_text().split()[:3] == ["refused", "refused", "in"]
    assert not mark.exists()
    tasks.both_train()
    tasks.all_right()


def test_a_paused_worker_never_ends_the_run(tasks: Tasks) -> None:
    (worker,) = tasks.b.processes("ray::WorkerActor")
    os.kill(worker, signal.SIGSTOP)
    try:
        assert tasks.rate(0, 15.0) > 10
    finally:
        os.kill(worker, signal.SIGCONT)
    tasks.both_train()


def test_a_cut_link_heals(tasks: Tasks) -> None:
    before = tasks.rate(0)
    tasks.b.cut()
    try:
        assert tasks.rate(0, 40.0) > 0.7 * before
    finally:
        tasks.b.mend()
    tasks.both_train()
    tasks.all_right()


def test_a_machine_that_goes_does_not_slow_the_others(tasks: Tasks) -> None:
    """Neither their functions nor who waits for the end of all."""
    before = tasks.rate(0)
    tasks.b.end()
    tasks.running.pop("worker-1").wait(30)
    assert tasks.rate(0, 20.0) > 0.7 * before
    join = tasks.a.folder / "join"
    join.touch()
    time.sleep(3.0)
    join.unlink()
    said = tasks.a.log("chief-0").read_text().splitlines()
    joins = [float(line.split()[-1]) for line in said if line.startswith("joined in")]
    assert len(joins) > 10
    assert max(joins[1:]) < 1.0
    tasks.b.again()
    tasks.start(tasks.b, "worker", 1)
    tasks.both_train()
