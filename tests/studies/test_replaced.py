"""The baseline once more with a usual value, for rules by name and for optimizers of a person's own."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.workloads import small_workload
from workbench.config import TrainConfig
from workbench.curves.replaced import diagnose_replaced
from workbench.record.read import StudyRecord
from workbench.studies.session import open_session
from workbench.topics.recommendation.replaced import collect_replaced, torch_constants
from workbench.train.any_trainer import AnyTrainer
from workbench.train.trainer import Trainer

DECAY, CONSTANTS = "optimizers.weight_decay_shrinks", "optimizers.constants"


def decayed(params: Iterable[Any], lr: float) -> torch.optim.Optimizer:
    every = list(params)
    matrices, rest = [p for p in every if p.dim() > 1], [p for p in every if p.dim() < 2]
    groups = [{"params": rest, "weight_decay": 0.0}, {"params": matrices, "weight_decay": 2.0}]
    return torch.optim.SGD(groups, lr=lr, momentum=0.9)


def slow(params: Iterable[Any], lr: float) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=lr, eps=10.0)


def usual(params: Iterable[Any], lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=lr)


def looked_at(folder: Path, **config: Any) -> StudyRecord:
    workload = small_workload()
    workload = workload.replace(config=TrainConfig(**{"peak_lr": 0.05, "total_steps": 60, "batch_size": 8} | config))
    trainer: AnyTrainer = Trainer(device="cpu")
    with open_session(workload, stem="diagnosis", settings={}, trainer=trainer, out=folder) as session:
        for _ in range(2):  # asked again, nothing is trained again
            collect_replaced(session)
        return session.record


@pytest.mark.parametrize(
    ("config", "code", "field"),
    [
        ({"weight_decay": 2.0}, DECAY, "weight_decay"),
        ({"optimizer": decayed}, DECAY, "weight_decay"),
        ({"optimizer": "adam", "eps": 10.0}, CONSTANTS, "eps"),
        ({"optimizer": slow}, CONSTANTS, "eps"),
    ],
)
def test_a_setting_that_keeps_it_from_learning_is_found_and_its_twin_trained_once(
    tmp_path: Path, config: dict[str, Any], code: str, field: str
) -> None:
    record = looked_at(tmp_path / "s", **config)
    assert record.trials["stage"].tolist() == ["baseline", "replaced"]
    found = diagnose_replaced(record)[code]
    assert found.status in ("warn", "fail"), found
    assert field in found.summary
    twin = record.trials.iloc[1]
    if not callable(config.get("optimizer")):
        assert twin[field] != record.config[field]


@pytest.mark.parametrize(
    "config", [{}, {"optimizer": usual, "peak_lr": 3e-3}, {"optimizer": "adamw", "weight_decay": 0.1, "peak_lr": 3e-3}]
)
def test_usual_settings_cost_no_run(tmp_path: Path, config: dict[str, Any]) -> None:
    record = looked_at(tmp_path / "s", **config)
    assert record.trials["stage"].tolist() == ["baseline"]
    assert {f.status for f in diagnose_replaced(record)} == {"ok"}


def test_the_constants_of_torch() -> None:
    """What its own optimizers call them, the largest of all groups."""
    weights = [torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2, 2))]
    assert torch_constants(decayed(weights, 0.1)) == {"momentum": 0.9, "weight_decay": 2.0, "decoupled": 0.0}
    adamw = torch_constants(torch.optim.AdamW(weights, betas=(0.8, 0.95), eps=1e-6))
    assert adamw == {"beta1": 0.8, "beta2": 0.95, "eps": 1e-6, "weight_decay": 0.01, "decoupled": 1.0}
    assert torch_constants(torch.optim.RMSprop(weights, alpha=0.98))["rho"] == 0.98
    assert torch_constants(torch.optim.SGD(weights, lr=0.1)) == {"weight_decay": 0.0, "decoupled": 0.0}
