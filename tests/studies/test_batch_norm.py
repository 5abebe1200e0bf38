"""The study of batch norm: which trials it asks for, what its simulated devices are held against, and a model without any."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from workbench.config import TrainConfig
from workbench.errors import ConfigError, UsageError
from workbench.record.read import StudyRecord
from workbench.studies.session import open_session
from workbench.topics.batch_norm.collect import measure_devices
from workbench.topics.batch_norm.diagnose import CODES, diagnose_batch_norm, read_norm_arms
from workbench.topics.batch_norm.study import BatchNormStudy
from workbench.train.trainer import Trainer
from workbench.workloads.base import Workload
from workbench.workloads.losses import classification

CLASSES, APART = 4, 5.0


def workload(*, norm: bool = True, examples: int = 128) -> Workload:
    """Four classes whose first feature says which: sorted by label, each of four devices sees one."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(examples) % CLASSES
    x = torch.randn(examples, 3, generator=generator)
    x[:, 0] += APART * labels
    layers: list[Callable[[], nn.Module]] = [lambda: nn.BatchNorm1d(3)] if norm else []
    return classification(
        name="four",
        build_model=lambda: nn.Sequential(
            *(make() for make in layers), nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, CLASSES)
        ),
        train_data=TensorDataset(x, labels),
        validation_data=TensorDataset(x[:32], labels[:32]),
        config=TrainConfig(peak_lr=0.05, total_steps=30, batch_size=32),
    )


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> StudyRecord:
    study = BatchNormStudy(stat_examples=[8, 16, 64], batch_sizes=[16, 32], held=16, swap_batch_sizes=[4], lr_factors=[0.5, 1.0], seeds=2)  # fmt: skip
    return study.run(workload(), Trainer(device="cpu", gradients="loop"), out=tmp_path_factory.mktemp("bn") / "s")


def arms(record: StudyRecord, stage: str) -> dict[tuple[int | None, int, int], int]:
    found = read_norm_arms(record, f"batch_norm_{stage}")
    return {(a.stat_examples, a.batch_size, a.devices): len(a.metrics) for a in found}


def test_every_arm_is_trained_under_every_seed_and_no_trial_twice(record: StudyRecord) -> None:
    assert arms(record, "virtual") == {(8, 32, 1): 2, (16, 32, 1): 2, (None, 32, 1): 2}
    assert arms(record, "held") == {(None, 16, 1): 2, (16, 32, 1): 2, (None, 32, 1): 2}
    assert arms(record, "split") == {(None, 32, devices): 2 for devices in (1, 2, 4, 8)}
    rows = record.facts["batch_norm_swap"]
    assert {(row["norm"], row["batch_size"], row["lr"]) for row in rows} == {
        (norm, 4, lr) for norm in ("batch", "layer", "group") for lr in (0.025, 0.05)
    }
    assert all(len(row["values"]) == 2 and math.isfinite(row["mean"]) for row in rows)
    means = {(row["norm"], row["lr"]): row["mean"] for row in rows}
    assert all(means["batch", lr] != means["layer", lr] for lr in (0.025, 0.05)), "another norm trains otherwise"
    assert len(record.trials) == 2 * (3 + 1 + 3 + 2), "virtual, held at 16, split, batch norm at batch size 4"
    assert not record.trials.duplicated(["batch_size", "bn_stat_examples", "accumulate_steps", "seed", "peak_lr"]).any()


def test_virtual_batches_differ_and_only_in_their_statistics(record: StudyRecord) -> None:
    found = {a.stat_examples: a for a in read_norm_arms(record, "batch_norm_virtual")}
    assert [found[size].statistic for size in (8, 16, None)] == [8, 16, 32]
    assert len({a.mean for a in found.values()}) == 3
    configs = [record.trial(number).config for number in record.facts["batch_norm_virtual"]]
    changed = {name for name in record.config for config in configs if config[name] != configs[0][name]}
    assert changed == {"bn_stat_examples", "shared_seed", "per_host_seed"}


def test_every_code_is_given_once(record: StudyRecord) -> None:
    found = diagnose_batch_norm(record)
    assert [f.code for f in found] == list(CODES)
    assert found["batch_norm.first_device_ema"].status == "ok"
    assert len(found["batch_norm.ghost_size"].evidence["arms"]) == 3
    assert "Norm by norm at equal budgets" in found["batch_norm.small_batch"].summary
    assert "held at 16" in found["batch_norm.ghost_size"].summary


def test_the_same_call_again_trains_nothing(record: StudyRecord) -> None:
    before = record.trials["trial"].tolist()
    study = BatchNormStudy(stat_examples=[8, 16, 64], batch_sizes=[16, 32], held=16, swap_batch_sizes=[4], lr_factors=[0.5, 1.0], seeds=2)  # fmt: skip
    again = study.run(workload(), Trainer(device="cpu", gradients="loop"), out=record.path)
    assert again.trials["trial"].tolist() == before
    assert again.facts == record.facts


def test_the_whole_batch_is_whole_whatever_the_baseline_asks_for(tmp_path: Path) -> None:
    given = workload()
    given = given.replace(config=given.config.replace(bn_stat_examples=8))
    study = BatchNormStudy(stat_examples=[], batch_sizes=[], devices=[], norms=[], seeds=1, steps=2)
    assert arms(study.run(given, Trainer(gradients="loop"), out=tmp_path / "s"), "virtual") == {(None, 32, 1): 1}


def test_a_model_without_batch_norm_trains_nothing(tmp_path: Path) -> None:
    found = BatchNormStudy(seeds=1).run(workload(norm=False), Trainer(), out=tmp_path / "s")
    assert not len(found.trials)
    diagnosis = diagnose_batch_norm(found)
    assert [f.code for f in diagnosis] == list(CODES)
    assert {f.status for f in diagnosis} == {"ok"}


# Simulated devices, against what the examples of each are known to have.


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], dict[str, Any]]:
    given = workload(examples=512)
    with open_session(
        given, stem="x", settings={}, trainer=Trainer(), out=tmp_path_factory.mktemp("d") / "s"
    ) as session:
        torch.manual_seed(0)
        model = given.build_model()
        before = {name: t.clone() for name, t in model.state_dict().items()}
        found = measure_devices(
            session, model, batch_size=32, devices=(1, 2, 4, 8, 32), shards=("dealt", "sorted"), batches=16
        )
        assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    return {(row["shards"], row["devices"]): row for row in found}


def test_one_device_is_the_whole_batch(rows: dict[tuple[str, int], dict[str, Any]]) -> None:
    for shards in ("dealt", "sorted"):
        row = rows[shards, 1]
        assert row["apart"] == row["step_apart"] == row["missing"] == 0
        assert row["losses"]["own"] == [row["losses"]["whole"]]
        assert row["losses"]["merged"] == row["losses"]["whole"]
    assert ("dealt", 32) not in rows, "a device needs 2 examples"


def test_dealt_shards_part_by_sampling_noise_alone(rows: dict[tuple[str, int], dict[str, Any]]) -> None:
    for devices in (2, 4, 8):
        row = rows["dealt", devices]
        examples = 32 // devices
        expected = math.sqrt((1 - 1 / devices) / examples)  # of the mean of so many, about the mean over the devices
        assert row["step_apart"] == pytest.approx(expected, rel=0.25)
        assert row["apart"] < row["step_apart"], "a moving average is less noisy than a batch"
        assert row["missing"] < 0.05


def test_sorted_shards_are_missing_the_spread_of_the_means(rows: dict[tuple[str, int], dict[str, Any]]) -> None:
    """Of the first feature, with means 0, 5, 10, 15 on four devices: 31.25 of 32.25; nothing of the other two."""
    row = rows["sorted", 4]
    spread = float(np.var([0.0, APART, 2 * APART, 3 * APART]))
    assert row["missing"] == pytest.approx(spread / (spread + 1) / 3, rel=0.05)
    assert row["average_error"] > 0.5
    assert row["merged_error"] < 0.1
    losses = row["losses"]
    assert abs(losses["merged"] / losses["whole"] - 1) < 0.05
    assert max(losses["own"]) / losses["whole"] > 1.2


class Shared(nn.Module):
    """One layer for two inputs; every third forward pass leaves the second one out."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head, self.calls = nn.BatchNorm1d(3), nn.Linear(3, CLASSES), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        out = self.norm(x)
        found: torch.Tensor = self.head(out if self.calls % 3 == 0 else out + self.norm(x + 4))
        return found


def measured(given: Workload, model: nn.Module, folder: Path) -> list[dict[str, Any]]:
    with open_session(given, stem="x", settings={}, trainer=Trainer(), out=folder) as session:
        return measure_devices(session, model, batch_size=32, devices=(1, 2), shards=("dealt",), batches=6)


def test_a_shared_layer_is_measured_call_by_call_and_a_frozen_one_not_at_all(tmp_path: Path) -> None:
    given = workload()
    one, two = measured(given, Shared(), tmp_path / "shared")
    assert one["step_apart"] == one["apart"] == 0
    assert two["apart"] > 0
    assert 0 < two["step_apart"] < 3
    frozen = given.build_model()
    frozen[0].eval()  # type: ignore[index,operator]
    assert measured(given, frozen, tmp_path / "frozen") == []


def test_without_labels_there_are_no_sorted_shards(tmp_path: Path) -> None:
    given = workload()
    data: Any = given.train_data
    bare = given.replace(train_data=TensorDataset(data.tensors[0], data.tensors[1].double()))
    with open_session(given, stem="x", settings={}, trainer=Trainer(), out=tmp_path / "s") as session:
        session.workload = bare
        found = measure_devices(session, given.build_model(), batch_size=32, devices=(2,), shards=("dealt", "sorted"))
    assert [row["shards"] for row in found] == ["dealt"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"seeds": 0}, "seeds=0"),
        ({"held": True}, "held=True"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"stat_examples": [8, 0]}, r"stat_examples\[1\]=0"),
        ({"devices": [1.5]}, r"devices\[0\]=1.5"),
        ({"shards": "dealt"}, "shards='dealt'"),
        ({"shards": ["shuffled"]}, "'dealt' and 'sorted'"),
        ({"norms": ["batch"]}, r"norms=\['batch'\]"),
        ({"lr_factors": [0]}, r"lr_factors\[0\]=0"),
        ({"lr_factors": []}, r"lr_factors=\(\)"),
    ],
)
def test_fields_are_checked(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BatchNormStudy(**fields)


def test_a_batch_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="batch size 256 does not fit: the training split has 128"):
        BatchNormStudy(batch_size=256, norms=[], seeds=1).run(workload(), Trainer(), out=tmp_path / "s")
