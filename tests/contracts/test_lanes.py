"""What every way to the gradients promises: a lane is the same trial as one that is trained alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from workbench.config import TrainConfig
from workbench.record import StudyRecord, TrialRecord
from workbench.record_writer import StudyWriter
from workbench.train.trainer import Trainer
from workbench.train.update_rules import RULES
from workbench.workloads.base import Workload
from workbench.workloads.helpers import classification

WAYS = ("loop", "vmap")
FEATURES, CLASSES = 12, 4


class Tied(nn.Module):
    """Two layers with the same weights, used a third time transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(FEATURES, 8)
        self.again = nn.Linear(FEATURES, 8)
        self.again.weight = self.inside.weight
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.inside(x))
        out: torch.Tensor = self.head(torch.tanh(self.again(hidden @ self.inside.weight)))
        return out


class Buffered(nn.Module):
    """Keeps a running mean of its inputs and the number of calls, as a module of the user's own would."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(FEATURES))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=False)
        self.net = nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, CLASSES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.lerp_(x.mean(0), 0.1)
            self.calls.add_(1)
        out: torch.Tensor = self.net(x - self.mean)
        return out


def frozen() -> nn.Module:
    net = mlp()
    for p in net[0].parameters():  # type: ignore[index]
        p.requires_grad_(False)
    return net


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 3, 4)),
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(8, CLASSES),
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "batch_norm": lambda: nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES)),
    "dropout": lambda: nn.Sequential(
        nn.Linear(FEATURES, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, CLASSES), nn.Dropout(0.1)
    ),
    "convolutional": convolutional,
    "tied": Tied,
    "frozen": frozen,
    "buffers": Buffered,
}


class Noisy(Dataset[Any]):
    """A map-style dataset that augments with the global random state."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index] + 0.01 * torch.randn(FEATURES, dtype=self.x.dtype) + 0.01 * np.random.rand(), self.y[index]


def workload(
    model: str = "mlp", *, augmented: bool = False, dtype: torch.dtype = torch.float32, **config: Any
) -> Workload:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(96, FEATURES, generator=generator).to(dtype)
    y = (x[:, :CLASSES] + 0.3 * torch.randn(96, CLASSES, generator=generator).to(dtype)).argmax(1)
    data: Any = (Noisy if augmented else TensorDataset)(x[:64], y[:64])
    base: dict[str, Any] = {"peak_lr": 0.02, "total_steps": 200, "batch_size": 16, "eval_every_steps": 100}
    return classification(
        name=model,
        build_model=lambda: MODELS[model]().to(dtype),
        train_data=data,
        validation_data=TensorDataset(x[64:], y[64:]),
        config=TrainConfig(**base | config),
    )


def variants(config: TrainConfig, count: int) -> list[TrainConfig]:
    """Lanes that differ in everything a lane may differ in, clipping and warmup on."""
    return [
        config.replace(
            peak_lr=config.peak_lr * (1 + 0.4 * k),
            warmup_steps=5 * (k + 1),
            max_grad_norm=(0.5, None, 1.0)[k % 3],
            weight_decay=0.01 * (k % 2),
            momentum=(0.9, 0.8)[k % 2],
            beta1=(0.9, 0.85)[k % 2],
            shared_seed=k % 3,
        )
        for k in range(count)
    ]


def together(given: Workload, configs: Sequence[TrainConfig], out: Path, way: str, **trainer: Any) -> StudyRecord:
    study = StudyWriter.open(out, kind="lr_sweep", workload=given.name, config=given.config.to_dict())
    try:
        Trainer(gradients=way, **trainer).run_trials(given, configs, study, stage="lr_sweep")  # type: ignore[arg-type]
    finally:
        study.close()
    return StudyRecord(out)


def assert_same(
    lanes: StudyRecord, number: int, alone: Any, *, rel: float, names: Sequence[str] = ("loss", "grad_norm")
) -> None:
    rows: pd.DataFrame = lanes.trial(number).steps
    for name in names:
        np.testing.assert_allclose(rows[name], alone.steps[name], rtol=rel, atol=rel * 1e-2, err_msg=name)
    np.testing.assert_array_equal(rows["lr"], alone.steps["lr"])
    np.testing.assert_array_equal(rows["clipped"], alone.steps["clipped"])
    values, expected = lanes.trial(number).evals, alone.evals
    assert list(values["step"]) == list(expected["step"])
    np.testing.assert_allclose(values["value"], expected["value"], rtol=max(rel, 1e-7) * 10, atol=1e-7)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Workload, TrainConfig], TrialRecord]:
    """Trains a trial alone by plain autograd, once for all ways that are held against it."""
    known: dict[Any, TrialRecord] = {}

    def train(given: Workload, config: TrainConfig) -> TrialRecord:
        key = (given.name, str(given.validation_data.tensors[0].dtype), config)
        if key not in known:
            known[key] = Trainer(gradients="loop").run(given, config, out=tmp_path_factory.mktemp("alone") / "run")
        return known[key]

    return train


def check(
    given: Workload, configs: Sequence[TrainConfig], out: Path, way: str, alone: Any, *, rel: float
) -> StudyRecord:
    lanes = together(given, configs, out / "lanes", way)
    for number, config in enumerate(configs):
        assert_same(lanes, number, alone(given, config), rel=rel)
    return lanes


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("optimizer", "rules"), RULES)
def test_every_rule_trains_a_lane_like_a_trial_of_its_own(
    tmp_path: Path, way: str, alone: Any, optimizer: str, rules: str
) -> None:
    lr = 0.02 if optimizer in ("sgd", "momentum", "nesterov") else 2e-3
    given = workload(dtype=torch.float64, optimizer=optimizer, rules=rules, peak_lr=lr)
    check(given, variants(given.config, 3), tmp_path, way, alone, rel=1e-10)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("dtype", "rel"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_every_model_trains_a_lane_like_a_trial_of_its_own(
    tmp_path: Path, way: str, alone: Any, model: str, dtype: torch.dtype, rel: float
) -> None:
    given = workload(model, dtype=dtype)
    check(given, variants(given.config, 3), tmp_path, way, alone, rel=rel)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("lanes", [1, 2, 7])
def test_any_number_of_lanes(tmp_path: Path, way: str, alone: Any, lanes: int) -> None:
    given = workload("batch_norm", dtype=torch.float64)
    check(given, variants(given.config, lanes), tmp_path, way, alone, rel=1e-10)
