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


def test_a_bundled_workload_travels_by_name_with_its_config() -> None:
    workload = load_workload("quadratic")
    workload = workload.replace(config=workload.config.replace(peak_lr=0.0625))
    shipment = packed(workload)
    assert shipment.source == "quadratic"
    assert len(shipment.workload) < 2000
    arrived, trainer = unpack_shipment(shipment, "n")
    assert arrived.config == workload.config
    assert trainer == TRAINER


def test_a_file_travels_by_its_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(SOURCE.format(examples=64))
    monkeypatch.chdir(tmp_path)
    shipment = packed(load_workload("mine.py:workload"))
    assert shipment.source == f"{tmp_path}/mine.py:workload"
    monkeypatch.chdir("/")
    sys.modules.pop("_workload_mine")
    arrived, _ = unpack_shipment(shipment, "n")
    assert os.getcwd() == str(tmp_path), "the worker works where the driver does"
    assert arrived.name == "mine"
    assert arrived.config.schedule(0.3) == 0.5  # type: ignore[operator]


def test_a_changed_copy_travels_as_it_is() -> None:
    workload = load_workload("quadratic").replace(name="another")
    shipment = packed(workload)
    assert shipment.source is None
    assert unpack_shipment(shipment, "n")[0].name == "another"


def test_what_is_built_in_place_travels_pickled_closures_included() -> None:
    workload = small_workload(build_model=lambda: __import__("torch").nn.Linear(3, 1))
    arrived, _ = unpack_shipment(packed(workload), "n")
    assert len(arrived.train_data) == 48
    assert arrived.build_model().in_features == 3


def test_other_data_on_a_node_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SOURCE.format(examples=64))
    shipment = packed(load_workload(f"{tmp_path}/mine.py:workload"))
    (tmp_path / "mine.py").write_text(SOURCE.format(examples=65))
    with pytest.raises(
        WorkloadError, match=r"'mine' is not the same on node n7 \(examples: here .*64.*there .*65.*Copy the same code"
    ):
        unpack_shipment(shipment, "n7")


def test_a_file_that_is_not_on_a_node_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SOURCE.format(examples=64))
    shipment = packed(load_workload(f"{tmp_path}/mine.py:workload"))
    (tmp_path / "mine.py").unlink()
    with pytest.raises(WorkloadError, match=r"cannot be loaded on node n7: .*mine\.py.*must be on every machine"):
        unpack_shipment(shipment, "n7")


@pytest.mark.parametrize(
    ("workload", "culprit"),
    [
        (lambda: small_workload(train_data=Holding(threading.Lock())), "train_data"),
        (lambda: small_workload(build_model=_closing_over(threading.Lock())), "build_model"),
    ],
)
def test_what_cannot_be_pickled_is_named_with_what_to_do(workload: Any, culprit: str) -> None:
    with pytest.raises(WorkloadError) as raised:
        packed(workload())
    said = str(raised.value)
    assert f"workload 'small' cannot be sent to a Ray worker: {culprit} cannot be pickled (TypeError:" in said
    assert "load_workload('path/to/file.py:attribute')" in said
    assert "inside build_model" in said
    assert "executor='local'" in said


def _closing_over(lock: Any) -> Any:
    def build() -> Any:
        with lock:
            return __import__("torch").nn.Linear(3, 1)

    return build


class Locked(Hook):
    def __init__(self) -> None:
        self.lock = threading.Lock()


def test_a_hook_that_cannot_be_pickled_is_named() -> None:
    with pytest.raises(ConfigError, match=r"hook Locked cannot be pickled.*on_start, not in __init__"):
        packed(small_workload(), Trainer(device="cpu", hooks=[Locked()]))


def test_a_schedule_that_cannot_be_pickled_is_named() -> None:
    lock = threading.Lock()

    def schedule(progress: float) -> float:
        with lock:
            return 1.0

    with pytest.raises(ConfigError, match=r"optimizer or schedule.*cannot pickle"):
        packed_configs(cloudpickle.dumps, [small_workload().config.replace(schedule=schedule)])
