"""One forward pass: outputs, a loss per example and the weights, with shapes checked."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from workbench.workloads.base import Workload
from workbench.workloads.checks import check_loss_shape

__all__ = ["autocast", "per_example"]


def autocast(device: torch.device, precision: str | None) -> contextlib.AbstractContextManager[Any]:
    """Return the context of the forward pass: bfloat16 autocast where asked for."""
    if precision == "bfloat16":
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return contextlib.nullcontext()


def per_example(workload: Workload, model: nn.Module, batch: Any, examples: int) -> tuple[Any, Tensor, Tensor | None]:
    """Return (outputs, losses (examples,), weights (examples,) or None) of one batch, shapes checked."""
    outputs = workload.forward(model, batch)
    losses = workload.loss(outputs, batch)
    check_loss_shape(losses, examples)
    weights = None if workload.weights is None else workload.weights(batch)
    if weights is not None:
        check_loss_shape(weights, examples, what="weights(batch)")
    return outputs, losses, weights
