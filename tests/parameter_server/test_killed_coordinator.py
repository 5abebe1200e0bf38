"""The coordinator is killed at random moments and started again until it ends: nothing is lost beyond the last checkpoint (T4.9, T10.3 to T10.5, behaviour 65)."""

from __future__ import annotations

import itertools
import os
import random
import time
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import pytest
import torch

from tests.helpers.killed_programs import Diary, killed, life, lives, marked, shared_memory, wait_until
from tests.helpers.workloads import small_net, small_workload
from tests.parameter_server.conftest import ENGINES
from workbench.parameter_server.cluster.cluster import Cluster, create_in_process_cluster
from workbench.parameter_server.coordinator.coordinator import ClusterCoordinator
from workbench.parameter_server.servers.placed import PlacedModule
from workbench.parameter_server.strategy import ParameterServerStrategy
from workbench.parameter_server.training.callbacks import BackupAndRestore, Callback
from workbench.parameter_server.training.checkpoint_manager import CheckpointManager
from workbench.parameter_server.training.strategy_model import StrategyModel
from workbench.ray.folders import temporary_folder

EPOCHS, STEPS = 30, 6
PAUSE_S = 0.003  # after each step, so that moments within an epoch, a save and what is between them are all likely
KILLS = {"threads": 6, "ray": 2}


def adam() -> Any:
    return small_workload(config={"optimizer": "adam"})


def flat(placed: PlacedModule) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in placed.module().parameters()])


class Told(Callback):
    """Writes down where each epoch begins, rests after each step, and waits in the last epoch until all kills are done."""

    def __init__(self, folder: Path) -> None:
        self.diary, self.go = Diary(folder / "diary"), folder / "go"

    def on_epoch_begin(self, epoch: int) -> None:
        self.begun(epoch, self.model.steps)

    def begun(self, epoch: int, steps: int) -> None:
        self.diary.write(pid=os.getpid(), epoch=epoch, steps=steps)
        while epoch == EPOCHS - 1 and not self.go.exists():
            time.sleep(0.005)

    def on_train_batch_end(self, step: int, logs: Any) -> None:
        time.sleep(PAUSE_S)


def fit(cluster: Cluster, folder: Path) -> PlacedModule:
    """Path A; the backup stays, so that a kill after its end finds it."""
    model = StrategyModel(adam(), ParameterServerStrategy(cluster))
    model.fit(epochs=EPOCHS, callbacks=[BackupAndRestore(folder / "c", delete=False), Told(folder)], verbose=0)
    return model.placed


def update(placed: PlacedModule, number: int) -> None:
    """A step that depends on its number alone."""
    generator = torch.Generator().manual_seed(number)
    with placed.step() as module:
        module.train()(torch.randn(8, 3, generator=generator, dtype=torch.float64)).square().sum().backward()
    time.sleep(PAUSE_S)


def loop(cluster: Cluster, folder: Path) -> PlacedModule:
    """Path B: the newest checkpoint before training, one after each epoch, three kept."""
    strategy = ParameterServerStrategy(cluster)
    coordinator = ClusterCoordinator(strategy)
    torch.manual_seed(0)
    placed = strategy.place(small_net().double(), adam().config)
    manager, told = CheckpointManager(placed, folder / "c"), Told(folder)
    manager.restore()
    for epoch in range(placed.steps // STEPS, EPOCHS):
        told.begun(epoch, placed.steps)
        for step in range(STEPS):
            coordinator.schedule(update, args=(placed, epoch * STEPS + step))
        coordinator.join()
        manager.save(epoch=epoch + 1)
    coordinator.shutdown()
    return placed


PROGRAMS = {"fit": (fit, [180]), "loop": (loop, [168, 174, 180])}
"""With the steps of the checkpoints that stay."""


def run(program: str, folder: Path, address: str | None) -> None:
    """One life: a coordinator with a cluster of its own, of threads, or of processes of the Ray cluster at `address`."""
    torch.set_num_threads(1)
    if address is None:
        cluster = create_in_process_cluster(1, 2)
        PROGRAMS[program][0](cluster, folder)
        return
    from workbench.parameter_server.engines.ray_engine import RayEngine

    cluster = Cluster(RayEngine(1, 2, address=address))
    engine: Any = cluster.engine
    tasks = [engine._tasks["worker", 0].pid, engine._tasks["ps", 0].pid, engine._tasks["ps", 1].pid]
    Diary(folder / "tasks").write(pid=os.getpid(), tasks=tasks)
    PROGRAMS[program][0](cluster, folder)
    cluster.shutdown()


def of_this_life(folder: Path, pid: int) -> list[dict[str, Any]]:
    return [entry for entry in Diary(folder / "diary").read() if entry["pid"] == pid]


def backed_up(folder: Path) -> int:
    """Epochs in the newest checkpoint."""
    steps = [int(path.name.removeprefix("step-")) for path in (folder / "c").glob("step-*")]
    return max(steps, default=0) // STEPS


@pytest.fixture
def address(engine: str) -> str | None:
    if engine == "threads":
        return None
    import ray

    return str(ray.get_runtime_context().gcs_address)


@pytest.mark.parametrize(
    ("engine", "program"),
    [
        *itertools.product(ENGINES[:1], PROGRAMS), pytest.param("ray", "fit", marks=ENGINES[1].marks),
        pytest.param("ray", "loop", marks=[*ENGINES[1].marks, pytest.mark.nightly]),
    ],
    indirect=["engine"],
)  # fmt: skip
def test_killed_at_random_moments_it_goes_on_from_its_last_checkpoint(
    lone_cluster: Cluster, engine: str, address: str | None, tmp_path: Path, program: str
) -> None:
    """Each life begins with the epoch after the newest checkpoint, with as many steps; the end is that of a run that nobody killed, bit for bit."""
    dice, folder, begins = random.Random(f"{program} 0"), tmp_path / "killed", []
    folder.mkdir()
    files, memory = set(os.listdir("/dev/shm")), shared_memory()
    for number in range(KILLS[engine] + 1):
        there = backed_up(folder)
        with life(run, program, folder, address) as process:
            assert process.pid is not None
            pid = process.pid
            wait_until(
                lambda pid=pid: bool(of_this_life(folder, pid)) or not process.is_alive(), what="its first epoch"
            )
            assert process.is_alive(), "see its error above"
            first = of_this_life(folder, pid)[0]
            assert (first["epoch"], first["steps"]) == (there, there * STEPS), "nothing that was there is lost"
            begins.append(there)
            if number < KILLS[engine]:
                epoch = min(there + dice.randint(0, 4), EPOCHS - 1)
                wait_until(
                    lambda pid=pid, epoch=epoch: of_this_life(folder, pid)[-1]["epoch"] >= epoch, what="an epoch"
                )
                time.sleep(dice.uniform(0.0, 2 * STEPS * PAUSE_S))
                assert killed(process)
                for entry in Diary(folder / "tasks").read():
                    wait_until(lambda entry=entry: not any(map(lives, entry["tasks"])), what="the end of its actors")
                wait_until(lambda: shared_memory() <= memory, what="the end of its shared memory", poll_s=0.2)
            else:
                (folder / "go").touch()
                process.join(120)
                assert process.exitcode == 0
    wait_until(lambda: set(os.listdir("/dev/shm")) <= files, what="the end of its files in /dev/shm", poll_s=0.1)
    assert begins == sorted(begins)
    assert begins[-1] > 0, "they hit a run that was under way"
    assert backed_up(folder) == EPOCHS
    whole, again = tmp_path / "whole", tmp_path / "again"
    for each in (whole, again):
        each.mkdir()
        (each / "go").touch()
    train, kept = PROGRAMS[program]
    expected = train(lone_cluster, whole)
    (folder / "c").rename(again / "c")
    found = train(lone_cluster, again)  # finds everything done
    assert found.steps == expected.steps == EPOCHS * STEPS
    assert torch.equal(flat(found), flat(expected))
    assert sorted(path.name for path in (again / "c").iterdir()) == [f"step-{step:08d}" for step in kept]


MARK = "WORKBENCH_TEST_LIFE"


def alone(folder: Path) -> None:
    """A life with a Ray cluster of its own."""
    os.environ[MARK] = str(os.getpid())
    torch.set_num_threads(1)
    with create_in_process_cluster(1, 1, engine="ray") as cluster:
        Diary(folder / "diary").write(pid=os.getpid(), there=marked(MARK, str(os.getpid())))
        fit(cluster, folder)


@pytest.mark.cluster
def test_with_a_coordinator_that_is_killed_its_whole_cluster_ends(tmp_path: Path) -> None:
    """T10.3: where it had started the Ray cluster too, no process is left of that, and its folder goes with the next one's."""
    pytest.importorskip("ray")
    with life(alone, tmp_path) as process:
        pid = str(process.pid)
        wait_until(lambda: len(Diary(tmp_path / "diary").read()) > 1, what="the first epoch")
        time.sleep(random.Random(0).uniform(0.0, 0.2))
        assert killed(process)
    assert len(Diary(tmp_path / "diary").read()[0]["there"]) >= 5, "or this test sees nothing"
    wait_until(lambda: not marked(MARK, pid), what="the end of its cluster", poll_s=0.2)
    with temporary_folder():
        assert not list(Path(gettempdir()).glob(f"workbench-{pid}-*"))
