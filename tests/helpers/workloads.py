"""Small workloads for the tests of everything above them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from workbench.config import TrainConfig
from workbench.workloads.base import Workload


def squared(outputs: Tensor, batch: Any) -> Tensor:
    return (outputs.squeeze(-1) - batch[1]) ** 2


def small_net(dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 1))


def small_workload(
    *,
    examples: int = 48,
    build_model: Callable[[], nn.Module] = small_net,
    loss: Any = squared,
    config: dict[str, Any] | None = None,
    **fields: Any,
) -> Workload:
    """A regression on 48 examples in float64 that trains in milliseconds."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(examples, 3, generator=generator)
    y = torch.sin(x.sum(1)) + 0.1 * torch.randn(examples, generator=generator)
    settings: dict[str, Any] = {"peak_lr": 0.05, "total_steps": 40, "batch_size": 8, "precision": "float64"}
    defaults: dict[str, Any] = {
        "name": "small",
        "train_data": TensorDataset(x, y),
        "validation_data": TensorDataset(x[:13], y[:13]),
        "metrics": {"close": lambda outputs, batch: ((outputs.squeeze(-1) - batch[1]).abs() < 0.5).double()},
    }
    return Workload(
        build_model=build_model, loss=loss, config=TrainConfig(**(settings | (config or {}))), **(defaults | fields)
    )


class Having(nn.Module):
    """A model of these modules, parameters and other attributes, from a function of it and its inputs."""

    def __init__(self, forward: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.said = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Any) -> Any:
        return self.said(self, *inputs)
