"""A workload on its way to a worker: by name where it has one, as it is where not, and told why where it cannot."""

from __future__ import annotations

import os
import pickle
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from tests.helpers.executors import Holding
from tests.helpers.workloads import small_workload
from workbench.errors import ConfigError, WorkloadError
from workbench.studies.executors.shipping import Shipment, pack_shipment, packed_configs, unpack_shipment
from workbench.train.hooks import Hook
from workbench.train.trainer import Trainer
from workbench.workloads.base import Workload
from workbench.workloads.registry import load_workload

TRAINER = Trainer(device="cpu")

SOURCE = """
import torch
from torch.utils.data import TensorDataset
import workbench as wb

x = torch.linspace(-1, 1, {examples}).unsqueeze(1)

def halved(progress):
    return 0.5

def workload():
    return wb.regression(
        name="mine", build_model=lambda: torch.nn.Linear(1, 1), train_data=TensorDataset(x, x), validation_data=TensorDataset(x, x),
        config=wb.TrainConfig(peak_lr=0.1, total_steps=10, batch_size=4, schedule=halved),
    )
"""


@pytest.fixture(autouse=True)
def same_place(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = os.getcwd()
    yield
    os.chdir(before)
    sys.modules.pop("_workload_mine", None)


def packed(workload: Workload, trainer: Trainer = TRAINER) -> Shipment:
    shipment = pack_shipment(cloudpickle.dumps, workload, trainer, workload.config)
    again: Shipment = pickle.loads(pickle.dumps(shipment))
    return again


def test_a_bundled_workload_travels_by_name_with_its_config_and_a_changed_one_as_it_is() -> None:
    workload = load_workload("quadratic")
    workload = workload.replace(config=workload.config.replace(peak_lr=0.0625))
    shipment = packed(workload)
    assert (shipment.source, len(shipment.workload) < 2000) == ("quadratic", True)
    arrived, trainer = unpack_shipment(shipment, "n")
    assert (arrived.config, trainer) == (workload.config, TRAINER)
    changed = packed(workload.replace(name="another"))
    assert changed.source is None
    assert unpack_shipment(changed, "n")[0].name == "another"
    closure, _ = unpack_shipment(packed(small_workload(build_model=lambda: __import__("torch").nn.Linear(3, 1))), "n")
    assert closure.build_model().in_features == 3


def test_a_file_travels_by_its_absolute_path_and_has_to_be_the_same_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(SOURCE.format(examples=64))
    monkeypatch.chdir(tmp_path)
    shipment = packed(load_workload("mine.py:workload"))
    assert shipment.source == f"{tmp_path}/mine.py:workload"
    monkeypatch.chdir("/")
    sys.modules.pop("_workload_mine")
    arrived, _ = unpack_shipment(shipment, "n")
    assert os.getcwd() == str(tmp_path), "the worker works where the driver does"
    assert arrived.config.schedule(0.3) == 0.5  # type: ignore[operator]
    (tmp_path / "mine.py").write_text(SOURCE.format(examples=65))
    other = r"'mine' is not the same on node n7 \(examples: here .*64.*there .*65.*Copy the same code"
    with pytest.raises(WorkloadError, match=other):
        unpack_shipment(shipment, "n7")
    (tmp_path / "mine.py").unlink()
    with pytest.raises(WorkloadError, match=r"cannot be loaded on node n7: .*mine\.py.*must be on every machine"):
        unpack_shipment(shipment, "n7")


class Locked(Hook):
    def __init__(self) -> None:
        self.lock = threading.Lock()


def test_what_cannot_be_pickled_is_named_with_what_to_do() -> None:
    lock = threading.Lock()

    def build() -> Any:
        with lock:
            return __import__("torch").nn.Linear(3, 1)

    def schedule(progress: float) -> float:
        with lock:
            return 1.0

    for culprit, workload in (
        ("train_data", small_workload(train_data=Holding(lock))), ("build_model", small_workload(build_model=build)),
    ):  # fmt: skip
        said = (
            rf"'small' cannot be sent to a Ray worker: {culprit} cannot be pickled \(TypeError:.*load_workload\('path"
        )
        with pytest.raises(WorkloadError, match=rf"{said}.*inside build_model.*executor='local'"):
            packed(workload)
    with pytest.raises(ConfigError, match=r"hook Locked cannot be pickled.*on_start, not in __init__"):
        packed(small_workload(), Trainer(device="cpu", hooks=[Locked()]))
    with pytest.raises(ConfigError, match=r"optimizer or schedule.*cannot pickle"):
        packed_configs(cloudpickle.dumps, [small_workload().config.replace(schedule=schedule)])
