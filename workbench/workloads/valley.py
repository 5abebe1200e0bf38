"""`valley`: steep where training starts, flat where it ends, so that a warmup opens learning rates far above the unstable one.

loss = 1/2 wall^2 + 1/4 (steepness - 1) wall^4 + 1/2 slow_curvature |slow|^2, from wall = 1. Gradient descent multiplies wall by
1 - lr (1 + (steepness - 1) wall^2): from the start it is unstable iff lr * steepness > 2, and for good, because the wall only
gets steeper outside. At the bottom every lr up to 2 is stable. So the largest lr without warmup is 2 / steepness, and
the shortest warmup for a multiple of it follows from that one line of arithmetic: 12 steps for 10 times, 116 for 100 times.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from workbench.config import TrainConfig
from workbench.errors import UsageError
from workbench.workloads.base import Workload

__all__ = ["Valley", "valley"]


class Valley(nn.Module):
    """Returns the loss itself, the same for every example; the seed decides in which direction `slow` points."""

    def __init__(self, *, steepness: float, slow: float, slow_curvature: float) -> None:
        super().__init__()
        self.steepness, self.slow_curvature = steepness, slow_curvature
        self.wall = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
        direction = torch.randn(4, dtype=torch.float64)
        self.slow = nn.Parameter(slow * direction / direction.norm())

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, 1) to (batch,)."""
        square = self.wall.square()
        steep = 0.5 * square + 0.25 * (self.steepness - 1) * square.square()
        return (steep + 0.5 * self.slow_curvature * self.slow.square().sum()).expand(len(x))


def loss_itself(outputs: Tensor, batch: Any) -> Tensor:  # noqa: ARG001 - the contract of a loss
    """Return the outputs, shape (batch,)."""
    return outputs


def valley(
    *,
    steepness: float = 201.0,
    slow: float = 20.0,
    slow_curvature: float = 0.1,
    peak_lr: float | None = None,
    total_steps: int = 400,
) -> Workload:
    """Return the workload, in float64, on the full batch of two equal examples.

    Args:
        steepness: lr * steepness = 2 is the edge of stability at the start; the bottom of the wall has curvature 1.
        slow: how far from the bottom the slow directions start.
        slow_curvature: their curvature; it is what a larger lr is good for.
        peak_lr: of the baseline; None is 1 / `steepness`, half of the largest stable lr.
        total_steps: of the baseline.

    Raises:
        UsageError: the wall is not steeper at the start than at its bottom.
    """
    if not steepness > 1:
        raise UsageError(f"steepness={steepness!r} must be above 1, the curvature at the bottom of the wall.")
    if not 0 <= slow_curvature <= 1:
        raise UsageError(
            f"slow_curvature={slow_curvature!r} must be at least 0 and at most 1, that of the wall's bottom."
        )
    data = TensorDataset(torch.zeros(2, 1, dtype=torch.float64))
    return Workload(
        name="valley",
        build_model=lambda: Valley(steepness=steepness, slow=slow, slow_curvature=slow_curvature),
        train_data=data,
        validation_data=data,
        loss=loss_itself,
        config=TrainConfig(
            optimizer="sgd",
            peak_lr=1.0 / steepness if peak_lr is None else peak_lr,
            total_steps=total_steps,
            batch_size=len(data),
        ),
    )
