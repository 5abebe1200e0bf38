"""`workbench ps`: every task a process of its own, killed at bad moments, and the training that comes of it (T9, T10)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import workbench as wb
from tests.helpers.pages import block

pytestmark = pytest.mark.cluster
LONG_S = 420.0  # what a machine with other things to do may take for anything here; seconds, where it has none
STEPS = 3000

SCRIPT = """
import sys
import torch
import workbench as wb

{block}
    total = coordinator.strategy.variable(torch.zeros(3))

    def add(total):
        total.assign_add(torch.ones(3))
        return wb.ps.get_current_worker_index()

    workers = coordinator.fetch([coordinator.schedule(add, args=(total,)) for _ in range(20)])
    print("total", total.read().tolist(), "workers", sorted(set(workers)), "arguments", sys.argv[1:])
    if "fail" in sys.argv:
        raise ValueError("planted")
"""


class Tasks:
    """The processes of one cluster on this machine."""

    def __init__(self, folder: Path, workers: int, servers: int) -> None:
        self.folder = folder
        ports = _free_ports(1 + workers + servers)
        named = [f"127.0.0.1:{port}" for port in ports]
        self.spec = {"chief": named[:1], "worker": named[1 : 1 + workers], "ps": named[1 + workers :]}
        self.ports = ports
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, job: str, index: int, *words: str) -> None:
        name = f"{job}-{index}"
        cluster = None if job == "evaluator" else self.spec
        told = {"task": {"type": job, "index": index}} | ({} if cluster is None else {"cluster": cluster})
        environment = {k: v for k, v in os.environ.items() if k not in ("TF_CONFIG", "WORKBENCH_CLUSTER")}
        environment |= {"WORKBENCH_CLUSTER": json.dumps(told)}
        with (self.folder / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                [sys.executable, "-m", "workbench", "ps", "--wait", str(LONG_S), *words],
                env=environment,
                stdout=log,
                stderr=log,
                cwd=self.folder,
            )

    def kill(self, name: str) -> None:
        self.running[name].send_signal(signal.SIGKILL)
        self.running.pop(name).wait(30)

    def code(self, name: str) -> int:
        return self.running.pop(name).wait(LONG_S)

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def everything_said(self) -> str:
        return "\n".join(f"== {path.name}\n{path.read_text()[-1500:]}" for path in sorted(self.folder.glob("*.log")))


@pytest.fixture
def tasks(tmp_path: Path) -> Iterator[Callable[..., Tasks]]:
    made: list[Tasks] = []

    def make(workers: int, servers: int) -> Tasks:
        made.append(Tasks(tmp_path, workers, servers))
        return made[-1]

    yield make
    for each in made:
        for process in each.running.values():
            process.kill()
            process.wait(30)
    for each in made:
        _wait_until(lambda each=each: not any(_listening(port) for port in each.ports), lambda: "a port is left")


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _listening(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0


def _wait_until(condition: Callable[[], bool], what: Callable[[], str]) -> None:
    until = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < until, what()
        time.sleep(0.1)


def _newest(out: Path) -> int:
    """Updates in the newest checkpoint of the trial."""
    found = (out / "trials" / "0" / "checkpoints").glob("step-*")
    return max((int(path.name.removeprefix("step-")) for path in found), default=-1)


@pytest.mark.nightly
def test_everybody_may_be_killed_on_the_way(tasks: Callable[..., Tasks], tmp_path: Path) -> None:
    """T9.5, T10.1 to T10.4: a worker and the chief come again and training goes on; a dead server is told by its name, and so restored."""
    cluster = tasks(2, 1)
    out = tmp_path / "trial"
    chief = ("digits_mlp", "--steps", str(STEPS), "--out", str(out))
    cluster.start("worker", 0)
    cluster.start("evaluator", 0, *chief)
    cluster.start("chief", 0, *chief)
    cluster.start("ps", 0)
    cluster.start("worker", 1)

    def reaches(step: int) -> None:
        def there() -> bool:
            assert cluster.running["chief-0"].poll() is None, cluster.everything_said()
            return _newest(out) >= step

        _wait_until(there, cluster.everything_said)

    reaches(1)
    cluster.kill("worker-1")
    reaches(_newest(out) + 1)  # the other one goes on
    cluster.start("worker", 1)

    cluster.kill("chief-0")
    before = _newest(out)
    assert cluster.running["worker-0"].poll() is None, "it waits for the next chief"
    cluster.start("chief", 0, *chief)
    reaches(before + 1)

    cluster.running["chief-0"].terminate()  # as a scheduler does
    assert cluster.code("chief-0") == 130, cluster.everything_said()
    assert "everything is saved" in cluster.said("chief-0")
    stopped = _newest(out)
    assert stopped > before
    cluster.start("chief", 0, *chief)
    reaches(stopped + 1)

    cluster.kill("ps-0")
    assert cluster.code("chief-0") == 1, cluster.everything_said()
    assert "ps 0 does not answer" in cluster.said("chief-0")
    assert cluster.running["worker-0"].poll() is None
    before = _newest(out)
    assert before < STEPS
    cluster.start("ps", 0)
    cluster.start("chief", 0, *chief)
    for name in ("chief-0", "worker-0", "worker-1", "ps-0", "evaluator-0"):
        assert cluster.code(name) == 0, cluster.everything_said()
    record = wb.open(out)
    assert record.state == "complete"
    assert record.steps["step"].tolist() == list(range(STEPS))
    assert f"update {STEPS} of {STEPS}" in cluster.said("evaluator-0")
    assert "2 workers, 1 parameter servers" in cluster.said("chief-0")


def test_a_script_of_ones_own(tasks: Callable[..., Tasks], tmp_path: Path) -> None:
    """The chief is the script; one that fails leaves the others waiting for the next."""
    cluster = tasks(1, 1)
    (tmp_path / "train.py").write_text(
        SCRIPT.replace("{block}", block("parameter_servers.md", "connect_to_cluster()").rstrip())
    )
    cluster.start("ps", 0)
    cluster.start("worker", 0)
    cluster.start("chief", 0, "--script", "train.py", "--", "fail")
    assert cluster.code("chief-0") == 1
    assert "ValueError: planted" in cluster.said("chief-0")
    cluster.start("chief", 0, "--script", "train.py", "--", "--epochs", "3")
    assert [cluster.code(name) for name in ("chief-0", "worker-0", "ps-0")] == [0, 0, 0], cluster.everything_said()
    assert "total [20.0, 20.0, 20.0] workers [0] arguments ['--epochs', '3']" in cluster.said("chief-0")


def test_all_have_to_have_the_same_description(tasks: Callable[..., Tasks], tmp_path: Path) -> None:
    """The one that has another is told, and no part of the cluster; the chief waits for the right one."""
    cluster = tasks(1, 2)
    cluster.start("chief", 0, "digits_mlp")
    cluster.spec = cluster.spec | {"ps": cluster.spec["ps"][:1]}
    cluster.start("worker", 0)
    assert cluster.code("worker-0") == 2, cluster.everything_said()
    assert "worker 0 and the chief have different descriptions of the cluster" in cluster.said("worker-0")
    _wait_until(lambda: "waiting for" in cluster.said("chief-0"), cluster.everything_said)
    cluster.running["chief-0"].terminate()
    assert cluster.code("chief-0") == 130, cluster.everything_said()


def test_who_does_not_come_is_named(tasks: Callable[..., Tasks], tmp_path: Path) -> None:
    """T1.8."""
    cluster = tasks(1, 2)
    cluster.start("chief", 0, "digits_mlp", "--wait", "3")
    assert cluster.code("chief-0") == 1
    said = " ".join(cluster.said("chief-0").split())
    assert f"3 of 3 tasks did not come within 3 s: worker 0 at {cluster.spec['worker'][0]}, ps 0 at" in said


def test_a_ray_cluster_that_is_there(tasks: Callable[..., Tasks]) -> None:
    """By its address; it stays when we are done."""
    from workbench.ray.node import RayNode

    (port,) = _free_ports(1)
    program = f"""
import torch
import workbench as wb
with wb.ps.connect_to_cluster("127.0.0.1:{port}", num_workers=2, num_ps=1) as cluster:
    strategy = wb.ps.Strategy(cluster)
    coordinator = wb.ps.ClusterCoordinator(strategy)
    total = strategy.variable(torch.zeros(2))
    for _ in range(10):
        coordinator.schedule(lambda total: total.assign_add(torch.ones(2)), args=(total,))
    coordinator.join()
    print(total.read().tolist())
"""
    node = RayNode.start("127.0.0.1", port, "here")
    try:
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=LONG_S, check=False
        )
        assert done.stdout.strip() == "[10.0, 10.0]", done.stderr
        assert node.state() == "there"
        assert not node.broken
    finally:
        node.close()
    assert not _listening(port)
