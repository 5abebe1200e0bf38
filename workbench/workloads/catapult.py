"""`catapult`: a two-layer linear network whose early instability, and recovery, are known beforehand.

f = u.v / sqrt(width), loss 1/2 f^2, curvature c = (|u|^2 + |v|^2) / width. With gradient descent and a wide network:
lr * c < 2 falls throughout; 2 < lr * c < 4 rises first and then converges where it is flatter; lr * c > 4 diverges
(Lewkowycz et al. 2020, arXiv 2003.02218).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from workbench.config import TrainConfig
from workbench.errors import UsageError
from workbench.workloads.base import Workload
from workbench.workloads.quadratic import half_squared_length

__all__ = ["Catapult", "catapult"]


class Catapult(nn.Module):
    """f(x) = x u.v / sqrt(width), initialised in a random direction with exactly the given curvature and output."""

    def __init__(self, *, width: int, curvature: float, output: float) -> None:
        super().__init__()
        axes, _ = torch.linalg.qr(torch.randn(width, 2, dtype=torch.float64))
        length = math.sqrt(curvature * width / 2)
        cosine = 2 * output / (curvature * math.sqrt(width))
        self.u = nn.Parameter(length * axes[:, 0])
        self.v = nn.Parameter(length * (cosine * axes[:, 0] + math.sqrt(1 - cosine**2) * axes[:, 1]))

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, 1) to (batch, 1)."""
        return x * (self.u * self.v).sum() / math.sqrt(self.u.shape[0])


def catapult(
    *,
    width: int = 1000,
    curvature: float = 1.0,
    output: float = 1.0,
    peak_lr: float | None = None,
    total_steps: int = 300,
) -> Workload:
    """Return the workload, in float64, on the full batch of two equal examples.

    Args:
        width: length of u and of v.
        curvature: (|u|^2 + |v|^2) / width at the start, the largest Hessian eigenvalue but for the output's small part.
        output: f at the start.
        peak_lr: of the baseline; None is 2.5 / `curvature`, in the middle of the catapult's range.
        total_steps: of the baseline.

    Raises:
        UsageError: no u and v have this curvature and output.
    """
    largest = curvature * math.sqrt(width) / 2
    if width < 2 or curvature <= 0 or not abs(output) <= largest:
        raise UsageError(
            f"width={width!r}, curvature={curvature!r}, output={output!r}: width must be at least 2, curvature above 0 "
            "and output at most curvature * sqrt(width) / 2 in size."
        )
    data = TensorDataset(torch.ones(2, 1, dtype=torch.float64))
    return Workload(
        name="catapult",
        build_model=lambda: Catapult(width=width, curvature=curvature, output=output),
        train_data=data,
        validation_data=data,
        loss=half_squared_length,
        config=TrainConfig(
            optimizer="sgd",
            peak_lr=2.5 / curvature if peak_lr is None else peak_lr,
            total_steps=total_steps,
            batch_size=len(data),
        ),
    )
