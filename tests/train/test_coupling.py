"""How much of a difference between batches is rounding, and how much makes a loss one of the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.helpers.workloads import small_workload
from workbench.train.coupled_losses import Dependence, Items, batch_dependence

X = torch.randn(16, 3, generator=torch.Generator().manual_seed(0)).double()


@pytest.mark.parametrize(
    ("outputs", "losses", "coupled"), [(0.0, 0.9e-3, False), (0.0, 1.1e-3, True), (0.9e-3, 0.5, True), (1.1e-3, 0.5, False)]
)  # fmt: skip
def test_a_thousandth_is_rounding_of_what_the_loss_says_and_of_what_the_model_does(
    outputs: float, losses: float, coupled: bool
) -> None:
    """In batches of two either is larger by this share than in one of all 16."""

    def forward(model: nn.Module, batch: Any) -> Tensor:
        out: Tensor = model(batch[0]) * (1 + outputs * (len(batch[0]) == 2))
        return out

    def loss(_: Tensor, batch: Any) -> Tensor:
        return torch.ones(len(batch[0]), dtype=torch.float64) * (1 + losses * (len(batch[0]) == 2))

    data = TensorDataset(X, X[:, 0])
    workload = small_workload(forward=forward, loss=loss, train_data=data, validation_data=data)
    found = batch_dependence(workload, nn.Linear(3, 1).double(), Items([data[i] for i in range(16)]))
    assert found == Dependence(0.0, pytest.approx(losses), coupled)
