"""Three workloads whose answer is known beforehand: `quadratic`, `catapult` and `valley`; all are in float64.

quadratic: the loss of example i is 1/2 (theta - x_i)' H (theta - x_i) with H diagonal; its mean over the data has the Hessian H
and its minimum at 0. On the full batch SGD is stable iff lr * largest eigenvalue < 2, momentum iff < 2 + 2 momentum, and
Nesterov iff < (2 + 2 momentum) / (1 + 2 momentum) (Cohen et al. 2021, arXiv 2103.00065).

catapult: f = u.v / sqrt(width), loss 1/2 f^2, curvature c = (|u|^2 + |v|^2) / width. With gradient descent and a wide network:
lr * c < 2 falls throughout; 2 < lr * c < 4 rises first and then converges where it is flatter; lr * c > 4 diverges
(Lewkowycz et al. 2020, arXiv 2003.02218).

valley: loss = 1/2 wall^2 + 1/4 (steepness - 1) wall^4 + 1/2 slow_curvature |slow|^2, from wall = 1. Gradient descent multiplies
wall by 1 - lr (1 + (steepness - 1) wall^2): from the start it is unstable iff lr * steepness > 2, and for good, because the wall
only gets steeper outside. At the bottom every lr up to 2 is stable. So the largest lr without warmup is 2 / steepness, and the
shortest warmup for a multiple of it follows from that one line of arithmetic: 12 steps for 10 times, 116 for 100 times.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from workbench.config import OptimizerName, TrainConfig
from workbench.errors import UsageError
from workbench.workloads.base import Workload


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
    """Return the oracle: its curvature is known, so the largest stable lr is an exact number.

    Args:
        condition: largest over smallest eigenvalue; they are equally spaced in the logarithm.
        loss_scale: largest eigenvalue, and factor on the loss.
        noise: standard deviation, per parameter and before `loss_scale`, of one example's gradient around the mean gradient. 0 makes
            all examples equal.
        num_examples: None is 2, or 4,096 with noise.
        batch_size: None is the full batch, or 32 with noise.
        peak_lr: None is 1 / `loss_scale`, half of the largest stable lr of SGD, and 0.01 for the adaptive rules.
        seed: of the noise.

    Raises:
        UsageError: a number is out of its range.
    """
    for name, value, fits, rule in (
        ("dimension", dimension, dimension >= 1, "at least 1"),
        ("condition", condition, condition >= 1, "at least 1: it is the largest over the smallest eigenvalue"),
        ("loss_scale", loss_scale, loss_scale > 0, "above 0: it is the largest eigenvalue"),
        ("noise", noise, noise >= 0, "at least 0: it is a standard deviation"),
    ):
        if not fits:
            raise UsageError(f"{name}={value!r} must be {rule}.")
    if num_examples is not None and num_examples < (2 if noise else 1):
        raise UsageError(f"num_examples={num_examples!r} must be at least 1, and at least 2 with noise.")
    curvature = eigenvalues(dimension=dimension, condition=condition, loss_scale=loss_scale)
    count = (4096 if noise else 2) if num_examples is None else num_examples
    usual_lr = 0.01 if optimizer in ("rmsprop", "adam", "nadam", "adamw") else 1.0 / loss_scale
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


class Catapult(nn.Module):
    """f(x) = x u.v / sqrt(width), of width 1,000, initialised in a random direction with curvature 1 and output 1."""

    def __init__(self) -> None:
        super().__init__()
        width = 1000
        axes, _ = torch.linalg.qr(torch.randn(width, 2, dtype=torch.float64))
        length, cosine = math.sqrt(width / 2), 2 / math.sqrt(width)
        self.u = nn.Parameter(length * axes[:, 0])
        self.v = nn.Parameter(length * (cosine * axes[:, 0] + math.sqrt(1 - cosine**2) * axes[:, 1]))

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, 1) to (batch, 1)."""
        return x * (self.u * self.v).sum() / math.sqrt(self.u.shape[0])


def catapult(*, peak_lr: float = 2.5, total_steps: int = 300) -> Workload:
    """Return a two-layer linear network whose early instability, and recovery, are known; the full batch, two equal examples.

    The largest Hessian eigenvalue is 1 at the start, but for the output's small part: a `peak_lr` of 2 to 4 is the catapult's range.
    """
    inputs = torch.ones(2, 1, dtype=torch.float64)
    return _full_batch("catapult", Catapult, inputs, half_squared_length, peak_lr=peak_lr, total_steps=total_steps)


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


def valley(*, steepness: float = 201.0, peak_lr: float | None = None, total_steps: int = 400) -> Workload:
    """Return one that is steep where training starts and flat where it ends, so that a warmup opens far larger learning rates.

    The slow directions start 20 from the bottom, with a curvature of 0.1: they are what a larger lr is good for.

    Args:
        steepness: lr * steepness = 2 is the edge of stability at the start; the bottom of the wall has curvature 1.
        peak_lr: None is 1 / `steepness`, half of the largest stable lr.

    Raises:
        UsageError: the wall is not steeper at the start than at its bottom.
    """
    if not steepness > 1:
        raise UsageError(f"steepness={steepness!r} must be above 1, the curvature at the bottom of the wall.")
    return _full_batch(
        "valley",
        lambda: Valley(steepness=steepness, slow=20.0, slow_curvature=0.1),
        torch.zeros(2, 1, dtype=torch.float64),
        loss_itself,
        peak_lr=1.0 / steepness if peak_lr is None else peak_lr,
        total_steps=total_steps,
    )


def _full_batch(
    name: str, build_model: Any, inputs: Tensor, loss: Any, *, peak_lr: float, total_steps: int
) -> Workload:
    data = TensorDataset(inputs)
    return Workload(
        name=name,
        build_model=build_model,
        train_data=data,
        validation_data=data,
        loss=loss,
        config=TrainConfig(optimizer="sgd", peak_lr=peak_lr, total_steps=total_steps, batch_size=len(data)),
    )
