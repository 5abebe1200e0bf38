"""`quadratic`: the oracle. Its curvature is known, so the largest stable lr is an exact number.

The loss of example i is 1/2 (theta - x_i)' H (theta - x_i) with H diagonal; its mean over the data has the Hessian H
and its minimum at 0. On the full batch SGD is stable iff lr * largest eigenvalue < 2, momentum iff < 2 + 2 momentum, and
Nesterov iff < (2 + 2 momentum) / (1 + 2 momentum) (Cohen et al. 2021, arXiv 2103.00065).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from workbench.config import OptimizerName, TrainConfig
from workbench.errors import UsageError
from workbench.workloads.base import Workload

__all__ = ["Quadratic", "eigenvalues", "half_squared_length", "quadratic"]


def eigenvalues(*, dimension: int = 50, condition: float = 100.0, loss_scale: float = 1.0) -> Tensor:
    """Return the Hessian's eigenvalues, (dimension,) in float64, from `loss_scale / condition` up to `loss_scale`."""
    exponents = torch.linspace(-1, 0, dimension, dtype=torch.float64) if dimension > 1 else torch.zeros(1).double()
    return loss_scale * condition**exponents


class Quadratic(nn.Module):
    """Returns sqrt(H) (theta - x), so that half its squared length is the loss of an example."""

    def __init__(self, curvature: Tensor) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.randn(curvature.shape, dtype=curvature.dtype))
        self.register_buffer("sqrt_curvature", curvature.sqrt())

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, dimension) to (batch, dimension)."""
        assert isinstance(self.sqrt_curvature, Tensor)
        return self.sqrt_curvature * (self.theta - x)


def half_squared_length(outputs: Tensor, batch: Any) -> Tensor:  # noqa: ARG001 - the contract of a loss
    """Return 1/2 |output|^2 per example, shape (batch,)."""
    return 0.5 * outputs.flatten(1).square().sum(1)


def quadratic(
    *,
    dimension: int = 50,
    condition: float = 100.0,
    loss_scale: float = 1.0,
    noise: float = 0.0,
    num_examples: int | None = None,
    batch_size: int | None = None,
    optimizer: OptimizerName = "sgd",
    peak_lr: float | None = None,
    total_steps: int = 300,
    seed: int = 0,
) -> Workload:
    """Return the workload, in float64.

    Args:
        dimension: parameters.
        condition: largest over smallest eigenvalue; they are equally spaced in the logarithm.
        loss_scale: largest eigenvalue, and factor on the loss.
        noise: standard deviation, per parameter and before `loss_scale`, of one example's gradient around the mean
            gradient: the same everywhere. 0 makes all examples equal.
        num_examples: None is 2, or 4,096 with noise.
        batch_size: None is the full batch, or 32 with noise.
        optimizer: of the baseline.
        peak_lr: of the baseline; None is 1 / `loss_scale`, half of the largest stable lr of SGD, and 0.01 for the
            adaptive rules.
        total_steps: of the baseline.
        seed: of the noise; the initial parameters are standard normal under the trial's init seed.

    Raises:
        UsageError: a number is out of its range.
    """
    _check(dimension=dimension, condition=condition, loss_scale=loss_scale, noise=noise)
    if num_examples is not None and num_examples < (2 if noise else 1):
        raise UsageError(f"num_examples={num_examples!r} must be at least 1, and at least 2 with noise.")
    curvature = eigenvalues(dimension=dimension, condition=condition, loss_scale=loss_scale)
    count = (4096 if noise else 2) if num_examples is None else num_examples
    adaptive = optimizer in ("rmsprop", "adam", "nadam", "adamw")
    usual_lr = 0.01 if adaptive else 1.0 / loss_scale
    return Workload(
        name="quadratic",
        build_model=lambda: Quadratic(curvature),
        train_data=TensorDataset(_optima(curvature / loss_scale, noise=noise, count=count, seed=seed)),
        validation_data=TensorDataset(torch.zeros(2, dimension, dtype=torch.float64)),
        loss=half_squared_length,
        config=TrainConfig(
            optimizer=optimizer,
            peak_lr=usual_lr if peak_lr is None else peak_lr,
            total_steps=total_steps,
            batch_size=(min(32, count) if noise else count) if batch_size is None else batch_size,
        ),
    )


def _optima(curvature: Tensor, *, noise: float, count: int, seed: int) -> Tensor:
    if not noise:
        return torch.zeros(count, len(curvature), dtype=torch.float64)
    z = torch.randn(count, len(curvature), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    z = z - z.mean(0)
    return noise * z / z.square().mean(0).sqrt() / curvature


def _check(*, dimension: int, condition: float, loss_scale: float, noise: float) -> None:
    if dimension < 1:
        raise UsageError(f"dimension={dimension!r} must be at least 1.")
    if condition < 1:
        raise UsageError(f"condition={condition!r} must be at least 1: it is the largest over the smallest eigenvalue.")
    if loss_scale <= 0:
        raise UsageError(f"loss_scale={loss_scale!r} must be above 0: it is the largest eigenvalue.")
    if noise < 0:
        raise UsageError(f"noise={noise!r} must be at least 0: it is a standard deviation.")
