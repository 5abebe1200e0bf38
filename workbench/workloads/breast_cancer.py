"""`breast_cancer`: a small network on an imbalanced table, 212 malignant and 357 benign."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

from workbench.config import TrainConfig
from workbench.workloads.base import Workload
from workbench.workloads.helpers import classification
from workbench.workloads.splits import stratified_split

__all__ = ["breast_cancer", "build_model"]


def build_model() -> nn.Module:
    """Return a fresh 30-32-2 network."""
    return nn.Sequential(nn.Linear(30, 32), nn.ReLU(), nn.Linear(32, 2))


def breast_cancer() -> Workload:
    """Return the workload; class 1 is benign, 63 % of the rows; columns are standardised on the training rows."""
    train, validation, test = _data()
    return classification(
        name="breast_cancer",
        build_model=build_model,
        train_data=train,
        validation_data=validation,
        test_data=test,
        config=TrainConfig(peak_lr=0.01, total_steps=1000, batch_size=32),
    )


def _data() -> tuple[TensorDataset, TensorDataset, TensorDataset]:
    from sklearn.datasets import load_breast_cancer

    bunch = load_breast_cancer()
    rows = torch.from_numpy(bunch.data)
    labels = torch.from_numpy(bunch.target).long()
    train, validation, test = (torch.from_numpy(part) for part in stratified_split(bunch.target))
    rows = ((rows - rows[train].mean(0)) / rows[train].std(0)).float()

    def split(part: torch.Tensor) -> TensorDataset:
        return TensorDataset(rows[part], labels[part])

    return split(train), split(validation), split(test)
