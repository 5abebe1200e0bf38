"""The side-car evaluator: follows checkpoints, survives a deletion, ends by itself, and knows no cluster (T8.6, T8.7)."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import threading
import time
import types
from pathlib import Path

import pytest
import torch

from tests.helpers.killed_programs import Diary, killed, life, wait_until
from tests.helpers.workloads import small_net, small_workload
from workbench.errors import CheckpointError, UsageError
from workbench.parameter_server.strategy import ParameterServerStrategy
from workbench.parameter_server.training import sidecar
from workbench.parameter_server.training.callbacks import Callback, ModelCheckpoint
from workbench.parameter_server.training.checkpoint_manager import CheckpointManager
from workbench.parameter_server.training.sidecar import SidecarEvaluator
from workbench.parameter_server.training.strategy_model import StrategyModel
from workbench.train.checkpoint import Checkpoint, load_checkpoint

EPOCHS = 12


class Wait(Callback):
    """Lets the evaluator keep up, so that the test knows what it sees."""

    def __init__(self, seen: threading.Semaphore) -> None:
        self._seen = seen

    def on_epoch_end(self, epoch: int, logs: object) -> None:
        assert self._seen.acquire(timeout=30.0)


def test_it_follows_training_and_ends_with_it(strategy: ParameterServerStrategy, tmp_path: Path) -> None:
    """T8.6: every checkpoint, with the values that evaluation inside fit found; it was started first."""
    seen, found = threading.Semaphore(0), []

    def follow() -> None:
        for each in SidecarEvaluator(small_workload(), tmp_path / "c", epochs=4, poll_s=0.005, timeout_s=30.0):
            found.append(each)
            seen.release()

    evaluator = threading.Thread(target=follow)
    evaluator.start()
    model = StrategyModel(small_workload(), strategy)
    history = model.fit(epochs=4, callbacks=[ModelCheckpoint(tmp_path / "c", max_to_keep=2), Wait(seen)], verbose=0)
    evaluator.join(30.0)
    assert not evaluator.is_alive()
    assert [(each.epoch, each.steps) for each in found] == [(1, 6), (2, 12), (3, 18), (4, 24)]
    for name in ("loss", "close"):
        assert [each.values[name] for each in found] == pytest.approx(history.history[f"val_{name}"], rel=1e-12)


def test_a_checkpoint_deleted_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """T8.7: no crash, no wrong value: it goes on with the newer one."""
    model = StrategyModel(small_workload())
    manager = CheckpointManager(model.placed, tmp_path)
    first = manager.save(epoch=1)

    def deleted_meanwhile(path: Path) -> Checkpoint:
        if Path(path) == first:
            model.fit(epochs=1, verbose=0)
            manager.save(epoch=2)
            shutil.rmtree(first)
        return load_checkpoint(path)

    monkeypatch.setattr(sidecar, "load_checkpoint", deleted_meanwhile)
    found = SidecarEvaluator(small_workload(), tmp_path, epochs=2, poll_s=0.01, timeout_s=20.0).run()
    assert [each.epoch for each in found] == [2]
    assert found[0].values["loss"] == pytest.approx(model.evaluate()["loss"], rel=1e-12)


def follow(folder: Path) -> None:
    """The evaluator as a program of its own, which takes its time to read."""
    torch.set_num_threads(1)
    diary = Diary(folder / "diary")

    def slowly(path: Path) -> Checkpoint:
        diary.write(pid=os.getpid(), reads=path.name)
        time.sleep(0.01)
        checkpoint = load_checkpoint(path)
        time.sleep(0.01)
        return checkpoint

    sidecar.load_checkpoint = slowly
    for each in SidecarEvaluator(small_workload(), folder / "c", epochs=EPOCHS, poll_s=0.002, timeout_s=120.0):
        diary.write(pid=os.getpid(), epoch=each.epoch, loss=each.values["loss"])


def test_killed_while_it_reads_it_goes_on_and_ends_by_itself(tmp_path: Path) -> None:
    """T8.6, T8.7: SIGKILL at random moments; training does not notice, and what is found is not changed."""
    dice, diary, expected = random.Random(0), Diary(tmp_path / "diary"), {}
    kills = sorted([EPOCHS, *dice.sample(range(1, EPOCHS), 4)])
    model = StrategyModel(small_workload())
    manager = CheckpointManager(model.placed, tmp_path / "c", max_to_keep=2)
    with contextlib.ExitStack() as alive:
        evaluator = alive.enter_context(life(follow, tmp_path))
        for epoch in range(1, EPOCHS + 1):
            model.fit(epochs=1, verbose=0)
            path = manager.save(epoch=epoch)
            expected[epoch] = model.evaluate()["loss"]
            if epoch in kills:
                reading = {"pid": evaluator.pid, "reads": path.name}
                wait_until(lambda reading=reading: reading in diary.read(), what="the reading of a checkpoint")
                time.sleep(dice.uniform(0.0, 0.03))
                assert killed(evaluator) or epoch == EPOCHS, "at last it may have read, and have ended"
                evaluator = alive.enter_context(life(follow, tmp_path))
        evaluator.join(120)
        assert evaluator.exitcode == 0
    entries = [entry for entry in diary.read() if "epoch" in entry]
    assert [entry["epoch"] for entry in entries if entry["pid"] == evaluator.pid] == [EPOCHS]
    for entry in entries:
        assert entry["loss"] == pytest.approx(expected[entry["epoch"]], rel=1e-12)
    assert sorted(each.name for each in (tmp_path / "c").iterdir()) == sorted(each.name for each in manager.checkpoints)


def test_it_waits_from_the_newest_checkpoint_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """T8.7: an epoch may take as long as `timeout_s`, all of them together longer; steps end it as epochs do."""
    manager = CheckpointManager(StrategyModel(small_workload()).placed, tmp_path)
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        if now in (6.0, 12.0, 18.0):
            manager.save(epoch=int(now) // 6, steps=int(now))

    monkeypatch.setattr(sidecar, "time", types.SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    evaluator = SidecarEvaluator(small_workload(), tmp_path, epochs=3, poll_s=1.0, timeout_s=8.0)
    assert [each.steps for each in evaluator.run()] == [6, 12, 18]
    followed = SidecarEvaluator(small_workload(), tmp_path, steps=19, poll_s=1.0, timeout_s=8.0)
    with pytest.raises(TimeoutError, match="for 8 s, the newest is step-00000018; update 19 has not come"):
        followed.run()
    shutil.rmtree(tmp_path)
    with pytest.raises(TimeoutError, match="the newest is None; epoch 3 has not come"):
        evaluator.run()
    for given, says in (({"epochs": 0}, "epochs=0"), ({"epochs": 1, "steps": 1}, "give one of them")):
        with pytest.raises(UsageError, match=says):
            SidecarEvaluator(small_workload(), tmp_path, **given)  # type: ignore[arg-type]


def test_what_is_damaged_or_does_not_fit_is_an_error(tmp_path: Path) -> None:
    """Only what is gone is passed over."""
    path = CheckpointManager(StrategyModel(small_workload()).placed, tmp_path).save(epoch=1)
    other = small_workload(build_model=lambda: torch.nn.Linear(3, 1))
    with pytest.raises(CheckpointError, match="does not fit Linear"):
        SidecarEvaluator(other, tmp_path, epochs=1).run()
    (path / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="damaged"):
        SidecarEvaluator(small_workload(), tmp_path, epochs=1).run()


def test_the_weights_are_the_checkpoints_and_its_curves_are_written(tmp_path: Path) -> None:
    """T8.7: the loss is that of the stored weights, and the caller's random state is left alone."""
    model = StrategyModel(small_workload())
    model.fit(epochs=2, verbose=0)
    CheckpointManager(model.placed, tmp_path / "c").save(epoch=2)
    state = torch.get_rng_state()
    (found,) = SidecarEvaluator(small_workload(), tmp_path / "c", epochs=2, log_dir=tmp_path / "log").run()
    assert torch.equal(torch.get_rng_state(), state)
    plain = small_net().double()
    plain.load_state_dict(load_checkpoint(found.checkpoint).model)
    x, y = (column.double() for column in small_workload().validation_data.tensors)
    assert found.values["loss"] == pytest.approx(float(((plain(x)[:, 0] - y) ** 2).mean().detach()), rel=1e-12)
    (file,) = (tmp_path / "log").iterdir()
    assert all(f"evaluation_{name}_vs_iterations".encode() in file.read_bytes() for name in ("loss", "close"))
