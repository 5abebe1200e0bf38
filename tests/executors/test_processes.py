"""A driver that is killed or interrupted, and two machines of which one is lost: no finished trial is lost, no row is twice."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from tests.helpers.executors import assert_same_study, assert_whole, begins, gone, rates, train
from tests.helpers.workloads import small_workload
from workbench.record.read import StudyRecord

pytestmark = pytest.mark.slow
ROOT = str(Path(__file__).parents[2])
ENVIRONMENT = {**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": ROOT}
OWN = {**os.environ, "PYTHONPATH": ROOT}
WORKLOAD = small_workload(config={"total_steps": 400, "eval_every_steps": 20})
CONFIGS = rates(WORKLOAD.config, 0.01, 0.02, 0.03, 0.04)
MIXED = [*rates(WORKLOAD.config, 0.01, 0.02, total_steps=20), *rates(WORKLOAD.config, 0.05, 0.06, total_steps=1000)]
DRIVER = """
import sys
from pathlib import Path
from tests.helpers.executors import Durable, Meets, Slow, train
from tests.helpers.pipe_cluster import PipeCluster
from tests.executors.test_processes import CONFIGS, MIXED, WORKLOAD
from workbench.studies.executors.on_ray import RayExecutor

if __name__ == "__main__":
    out, kind = Path(sys.argv[1]), sys.argv[2]
    hooks = [Durable(), Slow(0.005)]
    if ":" in kind:
        train(RayExecutor(kind), WORKLOAD, CONFIGS, out, hooks=[*hooks, Meets(out.parent, 2)])
    else:
        pipes = {"connect": lambda address: PipeCluster()} if kind == "pipes" else {}
        train(RayExecutor(**pipes), WORKLOAD, MIXED, out, hooks=hooks)
"""


START = """
from workbench.ray.cluster import patient

with patient():
    from ray.scripts.scripts import main

    main()
"""


class Node:
    """One `ray start` with one CPU, which a busy machine may keep waiting, and every process that belongs to it."""

    def __init__(self, *options: str) -> None:
        command = [sys.executable, "-c", START, "start", "--block", "--num-cpus=1", "--num-gpus=0"]
        command += ["--object-store-memory=80000000", "--disable-usage-stats", *options]
        self.process = subprocess.Popen(command, env=ENVIRONMENT, start_new_session=True, stdout=subprocess.DEVNULL)

    def lose(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def nodes() -> Iterator[tuple[str, list[Node]]]:
    port = next(port for port in random.sample(range(21000, 32000), 100) if free(port))
    address = f"127.0.0.1:{port}"
    with tempfile.TemporaryDirectory(prefix="two-", ignore_cleanup_errors=True) as folder:
        started = [Node("--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={folder}")]
        try:
            wait_for(lambda: not free(port))
            started.append(Node(f"--address={address}"))
            wait_for(lambda: alive(address) == 2)
            yield address, started
        finally:
            for node in reversed(started):
                node.process.terminate()
            for node in started:
                node.process.wait(60)
                assert gone(node.process.pid)


def free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def alive(address: str) -> int:
    """Return how many nodes live, by an exit code: Ray prints into whatever is printed."""
    code = "import ray, sys; ray.init(address=sys.argv[1]); sys.exit(sum(n['Alive'] for n in ray.nodes()))"
    try:
        return subprocess.run(
            [sys.executable, "-c", code, address], env=ENVIRONMENT, capture_output=True, timeout=60
        ).returncode
    except subprocess.TimeoutExpired:
        return 0


def wait_for(condition: Any, timeout_s: float = 300.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.2)


SCRIPT = """
import os, sys, torch, helper
import workbench as wb
torch.manual_seed(0)
model = torch.nn.Linear(5, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
wb.log(raylet=float(os.environ.get("RAY_RAYLET_PID", 0)))
for k in range(200):
    x = torch.randn(16, 5)
    loss = (model(x)[:, 0] - x.sum(1) - helper.OFFSET).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    helper.wait()
"""
HELPER = """
import time
OFFSET = 0.5
def wait():
    time.sleep(0.02)  # so that one machine has no time for two runs
"""


@pytest.mark.cluster
def test_the_runs_of_a_script_on_two_machines_are_those_on_one(nodes: tuple[str, list[Node]], tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "train.py").write_text(SCRIPT)
    (mine / "helper.py").write_text(HELPER)
    studies = []
    for name, options in (("here", ()), ("there", ("--executor", "ray", "--address", nodes[0]))):
        words = [
            "diagnose",
            "--budget",
            "6x",
            "--out",
            str(tmp_path / name),
            *options,
            "--",
            sys.executable,
            "train.py",
        ]
        done = subprocess.run(
            [sys.executable, "-m", "workbench", *words],
            cwd=mine,
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            timeout=400,
        )
        assert "Traceback" not in done.stderr, done.stderr[-3000:]
        studies.append(StudyRecord(tmp_path / name))
    here, there = studies
    assert len(here.trials) >= 4
    columns = ["trial", "step", "loss", "lr", "grad_norm", "param_norm"]
    pd.testing.assert_frame_equal(here.steps[columns], there.steps[columns], check_exact=True)
    assert here.trials["peak_lr"].tolist() == there.trials["peak_lr"].tolist()
    raylets = [set(study.evals.loc[study.evals["metric"] == "raylet", "value"]) for study in studies]
    assert raylets[0] == {0.0}
    assert len(raylets[1] - {0.0}) == 2, "both machines had runs"


@pytest.mark.parametrize("lost", [False, True], ids=["both", "one is lost"])
def test_two_nodes_share_the_chunks(nodes: tuple[str, list[Node]], tmp_path: Path, lost: bool) -> None:
    address, started = nodes
    command = [sys.executable, "-c", DRIVER, str(tmp_path / "s"), address]
    driver = subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    with driver:
        if lost:
            wait_for(lambda: all(begins(tmp_path / "s", n) for n in range(4)))
            started[1].lose()
        _, said = driver.communicate(timeout=300)
    assert driver.returncode == 0, said
    assert_whole(tmp_path / "s")
    first = {begins(tmp_path / "s", n)[0]["ray_node"] for n in range(4)}
    assert len(first) == 2
    if lost:
        last = {begins(tmp_path / "s", n)[-1]["ray_node"] for n in range(4)}
        assert len(last) == 1
        assert last < first
    train(None, WORKLOAD, CONFIGS, tmp_path / "whole")
    assert_same_study(tmp_path / "s", tmp_path / "whole")


@pytest.mark.parametrize("kind", ["pipes", "ray"])
def test_a_killed_driver_loses_no_finished_trial(kind: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", DRIVER, str(tmp_path / "s"), kind]
    driver = subprocess.Popen(command, start_new_session=True, env=OWN)
    events = [tmp_path / "s" / "trials" / str(n) / "events.jsonl" for n in range(2)]
    try:
        wait_for(lambda: all(path.exists() and '"complete"' in path.read_text() for path in events))
        driver.send_signal(signal.SIGKILL)
        driver.wait()
        killed = StudyRecord(tmp_path / "s")
        assert killed.trials["state"].tolist()[:2] == ["complete", "complete"]
        assert "complete" not in killed.trials["state"].tolist()[2:]
        subprocess.run(command, check=True, timeout=300, env=OWN)
    finally:
        driver.kill()
    assert gone(driver.pid), "its processes end with it, Ray's own within a minute"
    assert_whole(tmp_path / "s")
    assert [len(begins(tmp_path / "s", n)) for n in range(4)] == [1, 1, 2, 2]
    train(None, WORKLOAD, MIXED, tmp_path / "whole")
    assert_same_study(tmp_path / "s", tmp_path / "whole")
