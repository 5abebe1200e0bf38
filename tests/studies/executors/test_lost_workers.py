"""A worker that is killed, a driver that is killed, data that is other there: no finished trial is lost, no row is twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.executors import Dies, Durable, Slow, assert_same_study, assert_whole, begins, gone, rates, train
from tests.helpers.pipe_cluster import PipeCluster
from tests.helpers.workloads import small_workload, squared
from workbench.errors import ClusterError, RecordError, WorkloadError
from workbench.record.read import StudyRecord, read_events
from workbench.record.write import StudyWriter
from workbench.studies.executors import sweep
from workbench.studies.executors.base import Executor
from workbench.studies.executors.local import LocalExecutor
from workbench.studies.executors.on_ray import RayExecutor

ROOT = str(Path(__file__).parents[3])


def on_pipes(room: int = 2) -> tuple[Executor, PipeCluster]:
    cluster = PipeCluster(room)
    return RayExecutor(connect=lambda address: cluster), cluster  # type: ignore[arg-type,return-value]


@pytest.fixture(params=["pipes", pytest.param("ray", marks=pytest.mark.slow)])
def executor(request: pytest.FixtureRequest) -> Executor:
    if request.param == "pipes":
        return on_pipes()[0]
    request.getfixturevalue("ray_here")
    return RayExecutor()


def test_the_chunk_of_a_killed_worker_is_trained_again_from_its_checkpoints(executor: Executor, tmp_path: Path) -> None:
    workload = small_workload(config={"eval_every_steps": 5})
    short = rates(workload.config, 0.01, 0.02, 0.03, total_steps=10)
    configs = [*short, *rates(workload.config, 0.05, 0.06, 0.07)]
    dies = Dies(tmp_path, at=28, arrived=("s/trials/*/checkpoints/step-0000002?", 3))
    train(executor, workload, configs, tmp_path / "s", hooks=[Durable(), dies])
    assert_whole(tmp_path / "s")
    assert [len(begins(tmp_path / "s", n)) for n in range(3)] == [1, 1, 1], "finished trials are not trained again"
    again = [begins(tmp_path / "s", n) for n in range(3, 6)]
    resumed = [events[1] for events in again if len(events) == 2]
    assert resumed
    assert all(event["event"] == "resumed" and event["step"] >= 20 for event in resumed)
    assert all(events[0]["pid"] != events[1]["pid"] for events in again if len(events) == 2)
    lost = [
        e for n in range(3, 6) for e in read_events(tmp_path / "s" / "trials" / str(n)) if e["event"] == "worker_lost"
    ]
    assert [e["pid"] for e in lost] == [events[0]["pid"] for events in again if len(events) == 2]
    assert all(e["why"] for e in lost)
    train(LocalExecutor(), workload, configs, tmp_path / "whole")
    assert_same_study(tmp_path / "s", tmp_path / "whole")


def test_without_a_checkpoint_it_begins_anew(tmp_path: Path) -> None:
    workload = small_workload(config={"checkpoint_every_steps": 40, "eval_every_steps": 5})
    executor, cluster = on_pipes(1)
    train(executor, workload, rates(workload.config, 0.05), tmp_path / "s", hooks=[Dies(tmp_path, at=28)])
    assert_whole(tmp_path / "s")
    assert [e["event"] for e in begins(tmp_path / "s", 0)] == ["started", "started"]
    assert cluster.placed == 2


def test_a_trial_that_kills_every_worker_is_given_up_and_the_others_are_kept(tmp_path: Path) -> None:
    workload = small_workload()
    good, bad = rates(workload.config, 0.01, total_steps=20)[0], rates(workload.config, 0.02, batch_size=16)[0]
    executor, cluster = on_pipes()
    with pytest.raises(ClusterError, match=r"trials 1 lost their worker 4 times.*out of memory.*executor='local'"):
        train(executor, workload, [good, bad], tmp_path / "s", hooks=[Dies(tmp_path, at=30, times=99)])
    assert len(list(tmp_path.glob("died-*"))) == sweep.RERUNS + 1
    assert StudyRecord(tmp_path / "s").trial(0).state == "complete"
    assert not any(worker.process.is_alive() for worker in cluster.workers)


def test_workers_that_cannot_start_are_an_error(tmp_path: Path) -> None:
    class Broken(PipeCluster):
        def place(self, kind: type, *arguments: Any, **options: Any) -> Any:
            worker = super().place(kind, *arguments)
            worker.process.kill()
            return worker

    executor = RayExecutor(connect=lambda address: Broken())  # type: ignore[arg-type,return-value]
    workload = small_workload()
    with pytest.raises(ClusterError, match=r"no worker can be started.*import workbench"):
        train(executor, workload, rates(workload.config, 0.1), tmp_path / "s")


def test_a_cluster_without_cpus_or_gpus_is_an_error(tmp_path: Path) -> None:
    workload = small_workload()
    with pytest.raises(ClusterError, match=r"no CPU.*ray start"):
        train(on_pipes(0)[0], workload, rates(workload.config, 0.1), tmp_path / "s")
    assert not (tmp_path / "s" / "trials").exists()


def test_an_error_in_one_chunk_stops_the_others_and_keeps_them(tmp_path: Path) -> None:
    def loss(outputs: Any, batch: Any) -> Any:
        if len(outputs) == 16 and outputs.requires_grad:
            raise ValueError("only for batches of 16")
        return squared(outputs, batch)

    workload = small_workload(loss=loss)
    slow, broken = rates(workload.config, 0.01, total_steps=2000)[0], rates(workload.config, 0.02, batch_size=16)[0]
    start = time.monotonic()
    with pytest.raises(WorkloadError, match="only for batches of 16") as raised:
        train(on_pipes()[0], workload, [slow, broken], tmp_path / "s", hooks=[Durable(), Slow(0.01)])
    assert time.monotonic() - start < 60
    assert "Traceback" in "".join(raised.value.__notes__)
    assert f"process {begins(tmp_path / 's', 1)[0]['pid']}" in "".join(raised.value.__notes__)
    assert StudyRecord(tmp_path / "s").trial(0).state in ("stopped", "running")


def test_a_full_disk_here_ends_the_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    workload = small_workload()
    executor, cluster = on_pipes()
    study = StudyWriter.open(tmp_path / "s", kind="sweep", workload="small", config=workload.config.to_dict())
    from workbench.train.trainer import Trainer

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(RecordError, match="No space left on device"):
        executor.run(workload, rates(workload.config, 0.1, 0.2), study, stage="x", trainer=Trainer(device="cpu"))
    monkeypatch.undo()
    study.close()
    executor.close()
    assert not any(worker.process.is_alive() for worker in cluster.workers)
    train(on_pipes()[0], workload, rates(workload.config, 0.1, 0.2), tmp_path / "s")
    assert_whole(tmp_path / "s")


DRIVER = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from tests.helpers.executors import Durable, Slow, train
from tests.helpers.pipe_cluster import PipeCluster
from tests.studies.executors.test_lost_workers import CONFIGS, WORKLOAD
from workbench.studies.executors.on_ray import RayExecutor

if __name__ == "__main__":
    pipes = {"connect": lambda address: PipeCluster()} if sys.argv[3] == "pipes" else {}
    train(RayExecutor(**pipes), WORKLOAD, CONFIGS, Path(sys.argv[2]), hooks=[Durable(), Slow(0.005)])
"""


WORKLOAD = small_workload(config={"eval_every_steps": 20})
CONFIGS = [
    *rates(WORKLOAD.config, 0.01, 0.02, total_steps=20),
    *rates(WORKLOAD.config, 0.05, 0.06, total_steps=1000),
]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pipes", "ray"])
def test_a_killed_driver_loses_no_finished_trial(kind: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", DRIVER, ROOT, str(tmp_path / "s"), kind]
    driver = subprocess.Popen(command, start_new_session=True)
    events = [tmp_path / "s" / "trials" / str(n) / "events.jsonl" for n in range(2)]
    try:
        end = time.monotonic() + 300
        while not all(path.exists() and '"complete"' in path.read_text() for path in events):
            assert driver.poll() is None
            assert time.monotonic() < end
            time.sleep(0.05)
        driver.send_signal(signal.SIGKILL)
        driver.wait()
        killed = StudyRecord(tmp_path / "s")
        assert killed.trials["state"].tolist()[:2] == ["complete", "complete"]
        assert "complete" not in killed.trials["state"].tolist()[2:]
        subprocess.run(command, check=True, timeout=300)
    finally:
        driver.kill()
    assert gone(driver.pid), "its processes end with it, Ray's own within a minute"
    assert_whole(tmp_path / "s")
    assert [len(begins(tmp_path / "s", n)) for n in range(4)] == [1, 1, 2, 2]
    train(LocalExecutor(), WORKLOAD, CONFIGS, tmp_path / "whole")
    assert_same_study(tmp_path / "s", tmp_path / "whole")


@pytest.mark.slow
def test_ctrl_c_in_a_terminal_reaches_every_process_and_keeps_what_is_there(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    command = [sys.executable, "-c", DRIVER, ROOT, str(tmp_path / "s"), "ray"]
    driver = subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE, text=True)
    with driver:
        end = time.monotonic() + 300
        while not (tmp_path / "s" / "trials" / "2" / "checkpoints").exists():
            assert driver.poll() is None
            assert time.monotonic() < end
            time.sleep(0.05)
        os.killpg(driver.pid, signal.SIGINT)
        _, said = driver.communicate(timeout=120)
    assert "StudyInterrupted: stopped with 2 of 4 trials unfinished; everything that arrived is saved" in said
    assert StudyRecord(tmp_path / "s").trials["state"].tolist() == ["complete", "complete", "stopped", "stopped"]
    assert gone(driver.pid, within_s=30)
    train(LocalExecutor(), WORKLOAD, CONFIGS, tmp_path / "s")
    assert_whole(tmp_path / "s")
    train(LocalExecutor(), WORKLOAD, CONFIGS, tmp_path / "whole")
    assert_same_study(tmp_path / "s", tmp_path / "whole")
