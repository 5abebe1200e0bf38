"""`digits_mlp`: a 64-32-32-10 ReLU network on the digits."""

from __future__ import annotations

from torch import nn

from workbench.config import TrainConfig
from workbench.workloads.base import Workload
from workbench.workloads.digits_data import digits_data
from workbench.workloads.helpers import classification

__all__ = ["build_model", "digits_mlp"]


def build_model() -> nn.Module:
    """Return a fresh 64-32-32-10 network."""
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))


def digits_mlp() -> Workload:
    """Return the workload; a run takes about a second."""
    data = digits_data(flat=True)
    return classification(
        name="digits_mlp",
        build_model=build_model,
        train_data=data.train,
        validation_data=data.validation,
        test_data=data.test,
        config=TrainConfig(peak_lr=0.05, total_steps=2000, batch_size=64),
    )
