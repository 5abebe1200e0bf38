"""What is left when tests of clusters have ended: nothing, also where a test failed in the middle (T2.1)."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
import uuid
from pathlib import Path

import pytest

from tests.helpers.killed_programs import marked, wait_until
from tests.helpers.leftovers import Leftovers

ROOT = Path(__file__).parents[2]
MARK = "WORKBENCH_TEST_LEFTOVERS"

FAIL = """
import time

import torch

from tests.helpers.killed_programs import sigkill
from workbench.parameter_server.coordinator.coordinator import ClusterCoordinator
from workbench.parameter_server.strategy import ParameterServerStrategy


def test_fails_while_functions_run(own_cluster):
    strategy = ParameterServerStrategy(own_cluster(2, 1))
    coordinator = ClusterCoordinator(strategy)
    held = strategy.variable(torch.zeros(100_000))
    for _ in range(100):
        coordinator.schedule(time.sleep, args=(0.02,))
    raise RuntimeError("planted")


def test_fails_when_tasks_were_killed(own_cluster):
    cluster = own_cluster(2, 1)
    coordinator = ClusterCoordinator(ParameterServerStrategy(cluster))
    cluster.engine.kill("worker", 1)
    sigkill(cluster.engine, "ps", 0)
    raise RuntimeError("planted")
"""


def test_a_leftover_of_each_kind_is_seen() -> None:
    """Or the check at the end of these tests would see nothing."""
    before, go = Leftovers(), threading.Event()
    assert before.found(0.0) == []
    name = f"workbench-test-{uuid.uuid4().hex}"
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    thread = threading.Thread(target=go.wait, name="planted thread")
    thread.start()
    folder = Path(tempfile.mkdtemp(prefix=f"workbench-{os.getpid()}-"))
    file, server = Path("/dev/shm", name), socket.create_server(("127.0.0.1", 0))
    file.touch()
    try:
        found = "\n".join(before.found(0.0))
    finally:
        go.set()
        thread.join()
        file.unlink()
        folder.rmdir()
        port = server.getsockname()[1]
        server.close()
        process.communicate(b"\n")
    for planted in (f"process {process.pid}", "planted thread", str(folder), str(file), f"port {port}"):
        assert planted in found
    assert before.found(10.0) == []


@pytest.mark.parametrize("kind", ["threads", pytest.param("ray", marks=pytest.mark.cluster)])
def test_nothing_is_left_of_tests_that_fail_in_the_middle(tmp_path: Path, kind: str) -> None:
    """Two that fail, in a process of their own; its last fixture looks at threads and ports, this test at the rest."""
    if kind == "ray":
        pytest.importorskip("ray")
    (tmp_path / "test_planted.py").write_text(FAIL)
    files, mark = set(os.listdir("/dev/shm")), uuid.uuid4().hex
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", "-c", ROOT / "pyproject.toml", "--rootdir", ROOT, "-p", "no:cacheprovider",
         "-p", "tests.parameter_server.conftest", "-k", kind, tmp_path / "test_planted.py"],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), MARK: mark}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 1, said
    assert "2 failed, 2 deselected" in said, said
    assert "error" not in said.splitlines()[-1], said
    wait_until(lambda: not marked(MARK, mark), what="the end of its processes", poll_s=0.2)
    wait_until(lambda: set(os.listdir("/dev/shm")) <= files, what="the end of its files in /dev/shm", poll_s=0.1)
    assert not list(Path(tempfile.gettempdir()).glob(f"workbench-{process.pid}-*"))
