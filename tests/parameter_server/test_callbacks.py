"""What fit leaves behind, and how it goes on after a crash (T4.8 to T4.10, T10.3, behaviours 65 and 83)."""

from __future__ import annotations

import math
import random
import struct
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.killed_programs import sigkill
from tests.helpers.workloads import small_workload
from tests.parameter_server.conftest import MakeCluster
from workbench.errors import CheckpointError, UsageError
from workbench.logs.event_file import EventFile, crc32c
from workbench.parameter_server.errors import UnavailableError
from workbench.parameter_server.strategy import ParameterServerStrategy
from workbench.parameter_server.training.callbacks import BackupAndRestore, Callback, ModelCheckpoint, TensorBoard
from workbench.parameter_server.training.checkpoint_manager import CheckpointManager
from workbench.parameter_server.training.strategy_model import StrategyModel
from workbench.parameter_server.training.trainer import ParameterServerTrainer
from workbench.train.checkpoint import load_checkpoint, load_model
from workbench.train.hooks import Hook


def adam() -> Any:
    return small_workload(config={"optimizer": "adam"})


def flat(model: StrategyModel) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.module().parameters()])


class Epochs(Callback):
    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_epoch_begin(self, epoch: int) -> None:
        self.seen.append(epoch)


def test_a_lost_server_and_a_new_cluster(own_cluster: MakeCluster, tmp_path: Path) -> None:
    """T10.2, behaviours 61 and 65: the error ends fit; on a cluster of another size the same call goes on, and counts on."""
    cluster, dice = own_cluster(2, 2), random.Random(0)
    moment, victim = dice.randrange(6, 24), dice.randrange(2)

    class Lose(Callback):
        def on_train_batch_end(self, step: int, logs: Any) -> None:
            if step == moment:
                sigkill(cluster.engine, "ps", victim)

    model = StrategyModel(adam(), ParameterServerStrategy(cluster))
    with pytest.raises(UnavailableError, match=f"ps {victim} does not answer") as raised:
        model.fit(epochs=1000, callbacks=[BackupAndRestore(tmp_path / "b", wait_s=0), Lose()], verbose=0)
    assert raised.value.job == "ps"
    done = len(model.history.epoch)
    assert model.history.epoch == list(range(done))
    assert moment // 6 <= done <= moment // 6 + 1, "what was begun before the kill may end"
    again = StrategyModel(adam(), ParameterServerStrategy(own_cluster(2, 3)))
    history = again.fit(epochs=5, callbacks=[BackupAndRestore(tmp_path / "b", delete=False)], verbose=0)
    assert history.epoch == list(range(done, 5))
    assert again.steps == 30
    assert CheckpointManager(again.placed, tmp_path / "b").checkpoints[0].name == "step-00000030"


def test_fit_and_trials_go_on_by_themselves_after_a_servers_death(own_cluster: MakeCluster, tmp_path: Path) -> None:
    """T14.6: the first epoch and a later one are trained again from the backup, and a trial goes on from its checkpoint."""
    cluster = own_cluster(2, 2)
    deaths = {3: 0, 14: 1}

    def lose(victim: int) -> None:
        sigkill(cluster.engine, "ps", victim)
        if cluster.engine.name == "threads":
            threading.Timer(0.5, cluster.engine.restart, ["ps", victim]).start()

    class Lose(Callback):
        def on_train_batch_end(self, step: int, logs: Any) -> None:
            if step in deaths:
                lose(deaths.pop(step))

    model, epochs = StrategyModel(adam(), ParameterServerStrategy(cluster)), Epochs()
    history = model.fit(epochs=4, callbacks=[BackupAndRestore(tmp_path / "b"), epochs, Lose()], verbose=0)
    assert (history.epoch, model.steps, deaths) == ([0, 1, 2, 3], 24, {})
    assert sorted(epochs.seen) == epochs.seen
    assert epochs.seen[:2] == [0, 0]
    assert len(epochs.seen) == 6, "each death has one epoch trained again"

    class LoseOnce(Hook):
        def on_evaluation(self, row: Any) -> None:
            if row["step"] == 12 and not deaths:
                deaths[12] = 0
                lose(0)

    made = adam()
    made = made.replace(config=made.config.replace(total_steps=24, eval_every_steps=6, checkpoint_every_steps=6))
    record = ParameterServerTrainer(cluster=cluster, hooks=[LoseOnce()]).run(made, out=tmp_path / "s")
    assert (record.state, deaths) == ("complete", {12: 0})
    assert record.steps["step"].tolist() == list(range(24))


def test_killed_while_the_backup_is_deleted(tmp_path: Path) -> None:
    """T4.9: the training had ended, so the next one begins anew; half a backup would stop it."""
    folder = tmp_path / "backup"

    def killed_half_way(path: Path, **_: Any) -> None:
        for file in Path(path).rglob("step-*/model.safetensors"):
            file.unlink()
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("shutil.rmtree", killed_half_way)
        with pytest.raises(KeyboardInterrupt):
            StrategyModel(adam()).fit(callbacks=[BackupAndRestore(folder)], verbose=0)
    epochs = Epochs()
    StrategyModel(adam()).fit(epochs=2, callbacks=[epochs, BackupAndRestore(folder)], verbose=0)
    assert epochs.seen == [0, 1]
    assert not list(tmp_path.iterdir())


def test_a_backup_is_not_a_folder_of_checkpoints(tmp_path: Path) -> None:
    model = StrategyModel(adam())
    CheckpointManager(model.placed, tmp_path).save()
    with pytest.raises(CheckpointError, match="it is no backup"):
        model.fit(callbacks=[BackupAndRestore(tmp_path)], verbose=0)


def test_a_checkpoint_an_epoch(strategy: ParameterServerStrategy, tmp_path: Path) -> None:
    """T4.8: the weights of every epoch, as evaluation saw them; they load without a cluster."""
    model = StrategyModel(adam(), strategy)
    history = model.fit(epochs=4, callbacks=[ModelCheckpoint(tmp_path)], verbose=0)
    found = sorted(tmp_path.iterdir())
    assert [load_checkpoint(path).meta["epoch"] for path in found] == [1, 2, 3, 4]
    for path, expected in zip(found, history.history["val_loss"], strict=True):
        plain = load_model(model.module(), path)
        x, y = model.workload.validation_data.tensors
        loss = float(((plain(x.double()).squeeze(-1) - y.double()) ** 2).mean().detach())
        assert loss == pytest.approx(expected, rel=1e-9)


def test_the_best_alone(tmp_path: Path) -> None:
    """A larger one is better, or a smaller one; NaN never is, and an unknown name is an error that names the nearest."""
    model = StrategyModel(adam())
    values = [3.0, math.nan, 2.0, 2.0, 5.0, 1.0]
    for mode, expected in (("min", [0, 2, 5]), ("max", [0, 4])):
        callback = ModelCheckpoint(tmp_path / mode, monitor="val_loss", mode=mode)  # type: ignore[arg-type]
        callback.model, saved = model, []
        callback.on_epoch_begin(0)
        assert callback._manager is not None
        callback._manager.save = lambda epoch, saved=saved: saved.append(epoch - 1)  # type: ignore[method-assign, assignment, misc]
        for epoch, value in enumerate(values):
            callback.on_epoch_end(epoch, {"val_loss": value})
        assert saved == expected
    with pytest.raises(UsageError, match="Did you mean 'val_loss'"):
        ModelCheckpoint(tmp_path, monitor="val_los").on_epoch_end(0, {"val_loss": 1.0})
    with pytest.raises(UsageError, match="mode='best'"):
        ModelCheckpoint(tmp_path, mode="best")  # type: ignore[arg-type]


def test_another_runs_folder_is_refused_before_training(tmp_path: Path) -> None:
    StrategyModel(adam()).fit(epochs=1, callbacks=[ModelCheckpoint(tmp_path)], verbose=0)
    model = StrategyModel(adam())
    with pytest.raises(CheckpointError, match="step-00000006 of another run"):
        model.fit(callbacks=[ModelCheckpoint(tmp_path)], verbose=0)
    assert model.steps == 0
    model.fit(epochs=1, verbose=0)
    model.fit(epochs=1, callbacks=[ModelCheckpoint(tmp_path)], verbose=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000006", "step-00000012"]


def test_the_checksum_is_the_standards() -> None:
    """The examples of RFC 3720, appendix B.4, and the usual check value."""
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(bytes(range(32))) == 0x46DD794E


def field(name: str, number: int, kind: str, type_name: str = "") -> Any:
    from google.protobuf.descriptor_pb2 import FieldDescriptorProto as Field

    label = Field.LABEL_REPEATED if name == "value" else Field.LABEL_OPTIONAL
    kind_number = getattr(Field, f"TYPE_{kind}")
    return Field(name=name, number=number, type=kind_number, label=label, type_name=type_name or None)


def read_events(path: Path) -> list[Any]:
    """Messages of a file, with both of their checksums checked, read by the protocol buffers library."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="event.proto", package="t", syntax="proto3")
    file.message_type.add(name="Value", field=[field("tag", 1, "STRING"), field("simple_value", 2, "FLOAT")])
    file.message_type.add(name="Summary", field=[field("value", 1, "MESSAGE", ".t.Value")])
    heads = field("wall_time", 1, "DOUBLE"), field("step", 2, "INT64"), field("file_version", 3, "STRING")
    file.message_type.add(name="Event", field=[*heads, field("summary", 5, "MESSAGE", ".t.Summary")])
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    event = message_factory.GetMessageClass(pool.FindMessageTypeByName("t.Event"))

    def checked(data: bytes, stored: bytes) -> bytes:
        value = (struct.unpack("<I", stored)[0] - 0xA282EAD8) % 2**32
        assert crc32c(data) == (value >> 17 | value << 15) % 2**32
        return data

    found, content = [], path.read_bytes()
    while content:
        (length,) = struct.unpack("<Q", checked(content[:8], content[8:12]))
        found.append(event.FromString(checked(content[12 : 12 + length], content[12 + length : 16 + length])))
        content = content[16 + length :]
    return found


def test_scalars_are_read_back_by_protocol_buffers(tmp_path: Path) -> None:
    """T4.10: small and large steps, names beyond ASCII, values that are no numbers."""
    pytest.importorskip("google.protobuf")
    file = EventFile(tmp_path / "new" / "folder")
    rows = [("loss", 0.1, 0), ("größe", -math.inf, 127), ("loss", math.nan, 128), ("x" * 200, 1e38, 2**40)]
    for row in rows:
        file.scalar(*row)
    first, *rest = read_events(file.path)
    assert first.file_version == "brain.Event:2"
    assert first.wall_time == pytest.approx(file.path.stat().st_mtime, abs=60)
    for found, (tag, value, step) in zip(rest, rows, strict=True):
        (entry,) = found.summary.value
        assert (entry.tag, found.step) == (tag, step)
        assert entry.simple_value == struct.unpack("<f", struct.pack("<f", value))[0] or math.isnan(value)


def test_tensorboard_files(strategy: ParameterServerStrategy, tmp_path: Path) -> None:
    """T4.10, behaviour 83: epoch-level values of both splits."""
    pytest.importorskip("google.protobuf")
    model, callback = StrategyModel(adam(), strategy), TensorBoard(tmp_path)
    history = model.fit(epochs=3, callbacks=[callback], verbose=0)
    model.fit(epochs=1, callbacks=[callback], verbose=0)
    for split, prefix in (("train", ""), ("validation", "val_")):
        first, second = sorted((tmp_path / split).iterdir(), key=lambda path: path.stat().st_mtime_ns)
        rows = [(event.summary.value[0], event.step) for event in read_events(first)[1:]]
        losses = [entry.simple_value for entry, _ in rows if entry.tag == "epoch_loss"]
        assert losses == pytest.approx(history.history[f"{prefix}loss"], rel=1e-6)
        assert [step for entry, step in rows if entry.tag == "epoch_close"] == [0, 1, 2]
        assert len(read_events(second)) == 3
