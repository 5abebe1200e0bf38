"""A cluster that is found or started: on the loopback interface, quietly, and gone afterwards."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import stranger
from tests.helpers.executors import gone
from tests.helpers.leftovers import Leftovers
from workbench.errors import ClusterError, WorkbenchError
from workbench.ray.cluster import RayCluster, patient
from workbench.ray.folders import cluster_folder, temporary_folder
from workbench.ray.node import RayNode
from workbench.studies.session import executor_of

ROOT = str(Path(__file__).parents[2])


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "ray" else find(name, *more))
    with pytest.raises(WorkbenchError, match=r"Ray, which is not installed: pip install 'training-workbench\[ray\]'"):
        executor_of("ray")


def test_asking_for_it_imports_nothing_yet() -> None:
    pytest.importorskip("ray")
    code = "import sys; from workbench.studies.session import executor_of as e; e('ray'); e('local')"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; print('ray' in sys.modules)"], capture_output=True, text=True
    )
    assert done.stdout.strip() == "False"


_HOLDS = """
import sys, time
from workbench.ray.folders import temporary_folder
with temporary_folder() as name:
    print(name, flush=True)
    sys.stdin.read()
"""


def test_folders_of_killed_processes_are_deleted_and_those_of_others_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever their names: a live process of another container has a pid that is nobody's here."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    held: list[subprocess.Popen[str]] = []
    folders: list[Path] = []
    for _ in range(2):
        held.append(
            subprocess.Popen(
                [sys.executable, "-c", _HOLDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                env=os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": ROOT},
            )
        )  # fmt: skip
        assert held[-1].stdout is not None
        folders.append(Path(held[-1].stdout.readline().strip()))
    nobody = 2**31
    lives = folders[0].rename(tmp_path / f"workbench-{nobody}-elsewhere")
    held[1].kill()
    held[1].communicate()
    for name in (f"workbench-{nobody}-results", "workbench-2026-results", "workbench-notes"):
        (tmp_path / name / "thesis").mkdir(parents=True)
    (tmp_path / f"workbench-{nobody}-link").symlink_to(folders[1])
    before = {p.name for p in tmp_path.iterdir()}
    with temporary_folder() as first, temporary_folder() as second:
        now = {p.name for p in tmp_path.iterdir()}
        assert Path(first).stat().st_mode & 0o777 == 0o700, "nobody else looks into it"
    assert now == before - {folders[1].name} | {Path(first).name, Path(second).name}
    assert lives.name in now
    assert {p.name for p in tmp_path.iterdir()} == before - {folders[1].name}
    held[0].communicate()


def test_what_was_started_for_a_cluster_ends_with_its_folder() -> None:
    """And nothing else that this process has started."""
    wait = "import sys; sys.stdin.read()"
    with cluster_folder() as folder:
        started, other = (
            subprocess.Popen([sys.executable, "-c", wait, argument], stdin=subprocess.PIPE) for argument in (folder, "")
        )
    assert started.wait(10) == -9
    assert other.poll() is None
    for each in (started, other):
        each.communicate()


@pytest.mark.cluster
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Ray forgets what it has started
@pytest.mark.parametrize("alone", [True, False])
def test_a_cluster_that_is_not_up_in_time_leaves_nothing(monkeypatch: pytest.MonkeyPatch, alone: bool) -> None:
    services = pytest.importorskip("ray._private.services")

    def never(*_: Any, **__: Any) -> None:
        raise RuntimeError("the raylet did not register")

    monkeypatch.setattr(services, "get_node", never)
    monkeypatch.setattr("workbench.ray.cluster.START_S", 0.0)
    before = Leftovers()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(ClusterError, match="no Ray cluster can be started"):
        _ = RayCluster.connect() if alone else RayNode.start("127.0.0.1", port, "workbench-test")
    assert before.found() == []


def test_a_raylet_that_has_ended_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Ray's does on a busy machine; one that had ended before says nothing."""
    services = pytest.importorskip("ray._private.services")

    def never(*_: Any, **__: Any) -> None:
        raise RuntimeError("the raylet did not register")

    monkeypatch.setattr(services, "get_node", never)
    shutil.copy("/bin/true", tmp_path / "raylet")
    earlier = subprocess.Popen([tmp_path / "raylet"])
    os.waitid(os.P_PID, earlier.pid, os.WEXITED | os.WNOWAIT)
    with patient():
        other = subprocess.Popen([tmp_path / "raylet"])
        with pytest.raises(ClusterError, match="raylet has ended.*busy machine"):
            services.get_node()
    earlier.wait()
    other.wait()


STARTED = """
import json, os, subprocess, sys
sys.path.insert(0, sys.argv[1])
from workbench.ray.cluster import RayCluster, WorkerLost
import ray

class Worker:
    def where(self): return os.getpid()
    def fail(self): raise ValueError("of my own")
    def die(self): os._exit(1)

cluster = RayCluster.connect()
address = ray.get_runtime_context().gcs_address
(cpus,) = cluster.machines("CPU")
worker = cluster.place(Worker)
found = {"total": cluster.total("CPU"), "gpus": cluster.total("GPU"), "address": address}
found["free"] = cpus
found["other"] = cluster.result(cluster.call(worker, "where")) != os.getpid()
for method in ("fail", "die"):
    call = cluster.call(worker, method)
    assert cluster.ready([call], 60) == [call]
    try:
        cluster.result(call)
    except WorkerLost as lost:
        found[method] = str(lost)
again = RayCluster.connect()
again.close()
found["still"] = ray.is_initialized()
with open("/proc/net/tcp") as file4, open("/proc/net/tcp6") as file6:
    found["sockets"] = [line.split() for file in (file4, file6) for line in list(file)[1:]]
found["inodes"] = []
for pid in os.listdir("/proc"):
    try:
        if pid.isdigit() and os.getsid(int(pid)) == os.getsid(0):
            found["inodes"] += [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
    except OSError:
        pass
cluster.close()
found["left"] = ray.is_initialized()
print(json.dumps(found))
"""


@pytest.mark.slow
def test_a_cluster_of_its_own(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    command = [sys.executable, "-W", "error", "-c", STARTED, ROOT]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**_environment(), "TMPDIR": "/tmp", "HOME": str(tmp_path)},
    )  # fmt: skip
    said, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    found = json.loads(said.splitlines()[-1])
    assert found["total"] == found["free"] == len(os.sched_getaffinity(0))
    assert found["gpus"] == 0
    assert found["other"]
    assert "of my own" in found["fail"]
    assert found["die"]
    assert found["still"], "what this process had joined before is not left"
    assert not found["left"]
    assert found["address"].startswith("127.0.0.1:")
    assert listening_elsewhere(found) == []
    assert gone(process.pid, within_s=30)
    assert not list(Path("/tmp").glob(f"workbench-{process.pid}-*"))
    assert (tmp_path / ".ray" / "auth_token").stat().st_mode & 0o777 == 0o600


_BEGINS = """
from pathlib import Path
import ray
from workbench.errors import ClusterError
from workbench.ray.cluster import RayCluster

def init(**_):
    token = Path.home() / ".ray" / "auth_token"
    print(oct(token.stat().st_mode & 0o777), token.read_text(), flush=True)
    raise RuntimeError("seen enough")

ray.init = init
try:
    RayCluster.connect()
except ClusterError as error:
    assert "seen enough" in str(error), error
"""


@pytest.mark.parametrize("there", [None, "0123456789" * 4])
def test_its_token_is_its_owners_alone_before_ray_starts(tmp_path: Path, there: str | None) -> None:
    """Ray by itself makes one that everybody on the machine reads, and whoever has it runs code in the cluster."""
    pytest.importorskip("ray")
    token = tmp_path / ".ray" / "auth_token"
    if there is not None:
        token.parent.mkdir()
        token.write_text(there)
        token.chmod(0o644)
    done = subprocess.run(
        [sys.executable, "-c", _BEGINS], capture_output=True, text=True, timeout=240, check=True,
        env={**_environment(), "HOME": str(tmp_path), "PYTHONPATH": ROOT},
    )  # fmt: skip
    mode, text = done.stdout.split()
    assert mode == "0o600"
    assert text == (there or text)
    assert len(text) >= 32


_HELD = """
import json, os, sys
import ray
from workbench.ray.cluster import RayCluster

class Worker:
    def twice(self, number): return 2 * number

cluster = RayCluster.connect()
worker = cluster.place(Worker)
assert cluster.result(cluster.call(worker, "twice", 1)) == 2
with open("/proc/net/tcp") as file4, open("/proc/net/tcp6") as file6:
    sockets = {row[9]: int(row[1].split(":")[1], 16) for file in (file4, file6) for row in map(str.split, list(file)[1:]) if row[3] == "0A"}
ports = set()
for pid in os.listdir("/proc"):
    try:
        if pid.isdigit() and os.getsid(int(pid)) == os.getsid(0):
            held = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
            ports |= {sockets[link[8:-1]] for link in held if link[8:-1] in sockets}
    except OSError:
        pass
head = int(ray.get_runtime_context().gcs_address.rpartition(":")[2])
print(json.dumps({"head": head, "ports": sorted(ports)}), flush=True)
sys.stdin.read()
print(cluster.result(cluster.call(worker, "twice", 2)), flush=True)
cluster.close()
"""


@pytest.mark.slow
def test_a_stranger_on_this_machine_runs_nothing_and_disturbs_nobody(tmp_path: Path) -> None:
    """Another user, where this one may become one: no token, a wrong one, that of a cluster before; bytes and pickles at every port."""
    pytest.importorskip("ray")
    environment = {**_environment(), "TMPDIR": "/tmp", "HOME": str(tmp_path), "PYTHONPATH": ROOT}
    makes = "from workbench.ray.address import require_token; require_token(alone=True)"
    subprocess.run([sys.executable, "-c", makes], check=True, timeout=120, env=environment)
    token = tmp_path / ".ray" / "auth_token"
    stale = token.read_text()
    token.unlink()
    with subprocess.Popen(
        [sys.executable, "-c", _HELD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        env=environment,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        found = json.loads(process.stdout.readline())
        assert found["head"] in found["ports"]
        mark = tmp_path / "mark"
        tokens = ["1" * 64, None, stale, token.read_text()]
        command = stranger.command("127.0.0.1", found["head"], mark, tokens, found["ports"])
        told = subprocess.run(command, env=stranger.environment(), capture_output=True, text=True, timeout=240)
        assert told.returncode == 0, told.stderr
        *answers, who = told.stdout.split()
        assert answers == ["refused", "refused", "refused", "in"]
        assert int(who) == (os.getuid() or stranger.NOBODY), "another user sent the bytes"
        assert not mark.exists()
        assert process.communicate("", timeout=60)[0].split() == ["4"]
        assert process.returncode == 0


def _environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}


def listening_elsewhere(found: dict[str, Any]) -> list[str]:
    """Local addresses, other than loopback, on which a process of the cluster listens."""
    ours = {name[8:-1] for name in found["inodes"] if name.startswith("socket:[")}
    loopback = ("0100007F:", "0000000000000000FFFF00000100007F:", "00000000000000000000000001000000:")
    listening = [row for row in found["sockets"] if row[3] == "0A" and row[9] in ours]
    assert listening, "or this test sees nothing"
    return [row[1] for row in listening if not row[1].startswith(loopback)]
