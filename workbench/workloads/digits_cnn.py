"""`digits_cnn`: a small convolutional network with batch norm on the digits."""

from __future__ import annotations

from torch import nn

from workbench.config import TrainConfig
from workbench.workloads.base import Workload
from workbench.workloads.digits_data import digits_data
from workbench.workloads.helpers import classification

__all__ = ["build_model", "digits_cnn"]


def build_model() -> nn.Module:
    """Return a fresh network: conv 16 - BN - conv 32 - BN - pool - linear."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


def digits_cnn() -> Workload:
    """Return the workload; a run takes some ten seconds."""
    data = digits_data(flat=False)
    return classification(
        name="digits_cnn",
        build_model=build_model,
        train_data=data.train,
        validation_data=data.validation,
        test_data=data.test,
        config=TrainConfig(peak_lr=0.05, total_steps=4000, batch_size=64),
    )
