"""`deep_residual`: a deep network on the digits, whose residual connections, normalisation and initialisation are options.

A block is f(x) = outer(relu(inner(x))), with the initialisation of He et al. 2015 (arXiv 1502.01852) under which f passes on
the variance that it gets. At the start x + f(x) then doubles the variance block by block, x + Norm(f(x)) and x + f(Norm(x))
add 1 to it, Norm(x + f(x)) keeps it, and so does a network without additions.
"""

from __future__ import annotations

import math
from typing import Literal, TypedDict, get_args

from torch import Tensor, nn
from torch.nn import functional as F

from workbench.config import TrainConfig
from workbench.errors import UsageError, nearest
from workbench.workloads.base import Workload
from workbench.workloads.digits_data import digits_data
from workbench.workloads.helpers import classification

__all__ = ["Block", "DeepResidual", "Placement", "deep_residual"]

Placement = Literal["none", "branch", "after_add", "pre"]


class Options(TypedDict):
    """What a variant is; see `deep_residual`."""

    depth: int
    width: int
    residual: bool
    norm: Placement
    zero_init: bool
    init_scale: float


class Block(nn.Module):
    """A block of `width` units: x + f(x), or f(x) alone, with a layer norm where `norm` says.

    A branch that begins at zero has a zero in what ends it: in the gain of its norm (Goyal et al. 2017, arXiv 1706.02677),
    or else in the weights of its last layer.
    """

    def __init__(self, width: int, *, residual: bool, norm: Placement, zero_init: bool, init_scale: float) -> None:
        super().__init__()
        self.residual, self.placement = residual, norm
        self.inner = linear(width, width, std=init_scale * math.sqrt(2 / width))
        self.outer = linear(width, width, std=init_scale * math.sqrt(1 / width))
        self.norm = nn.Identity() if norm == "none" else nn.LayerNorm(width)
        if zero_init:
            last = self.norm if norm == "branch" else self.outer
            nn.init.zeros_(last.get_parameter("weight"))

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, width) to (batch, width)."""
        branch = self.norm(x) if self.placement == "pre" else x
        branch = self.outer(F.relu(self.inner(branch)))
        if self.placement == "branch":
            branch = self.norm(branch)
        out: Tensor = x + branch if self.residual else branch
        return self.norm(out) if self.placement == "after_add" else out


class DeepResidual(nn.Module):
    """`depth` blocks of `width` units between a first layer and a classifier, for images of shape (batch, 64)."""

    def __init__(
        self, *, depth: int, width: int, residual: bool, norm: Placement, zero_init: bool, init_scale: float
    ) -> None:
        super().__init__()
        self.stem = linear(64, width, std=init_scale / 8)
        self.blocks = nn.Sequential(
            *(
                Block(width, residual=residual, norm=norm, zero_init=zero_init, init_scale=init_scale)
                for _ in range(depth)
            )
        )
        self.norm = (
            nn.LayerNorm(width) if norm == "pre" else nn.Identity()
        )  # nothing else bounds the sum of the branches
        self.classifier = linear(width, 10, std=0.1 * init_scale / math.sqrt(width))  # the first loss is near chance

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (batch, 10)."""
        logits: Tensor = self.classifier(self.norm(self.blocks(self.stem(images))))
        return logits


def linear(fan_in: int, fan_out: int, *, std: float) -> nn.Linear:
    """Return a linear layer with weights of deviation `std` and no bias at the start."""
    layer = nn.Linear(fan_in, fan_out)
    nn.init.normal_(layer.weight, std=std)
    nn.init.zeros_(layer.bias)
    return layer


def deep_residual(
    *,
    depth: int = 12,
    width: int = 32,
    residual: bool = True,
    norm: Placement = "none",
    zero_init: bool = False,
    init_scale: float = 1.0,
    peak_lr: float = 0.00025,
    total_steps: int = 1000,
) -> Workload:
    """Return the workload.

    Args:
        depth: blocks; a block is two weight layers.
        width: units of every hidden layer.
        residual: x + f(x), or f(x) alone.
        norm: "none"; "branch": x + Norm(f(x)) (F2.6); "after_add": Norm(x + f(x)) (F2.7); "pre": x + f(Norm(x)), with a
            norm before the classifier.
        zero_init: every branch is 0 at step 0, so that the network begins as its first layer and classifier (F2.8).
        init_scale: all weights are this many times as large at the start; 1 is the healthy size.
        peak_lr: of the baseline.
        total_steps: of the baseline.

    Raises:
        UsageError: an option is out of its range, or asks for a norm after an addition, or a zero branch, in a network
            that adds nothing.
    """
    for name, count in (("depth", depth), ("width", width)):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise UsageError(f"{name}={count!r} must be an integer of at least 1.")
    if norm not in get_args(Placement):
        raise UsageError(f"norm={norm!r} is not known.{nearest(norm, get_args(Placement))}")
    if not (init_scale > 0 and math.isfinite(init_scale)):
        raise UsageError(f"init_scale={init_scale!r} must be a finite number above 0; 1 is the healthy size.")
    if not residual and (zero_init or norm == "after_add"):
        asked = "zero_init=True" if zero_init else "norm='after_add'"
        raise UsageError(
            f"{asked} needs residual=True: without the addition a zero branch lets nothing through, and there is no sum to "
            "normalise. Take residual=True, or norm='branch', which normalises what each block returns."
        )
    data = digits_data(flat=True)
    options: Options = {
        "depth": depth,
        "width": width,
        "residual": residual,
        "norm": norm,
        "zero_init": zero_init,
        "init_scale": init_scale,
    }
    return classification(
        name=name_of(options),
        build_model=lambda: DeepResidual(**options),
        train_data=data.train,
        validation_data=data.validation,
        test_data=data.test,
        config=TrainConfig(peak_lr=peak_lr, total_steps=total_steps, batch_size=64),
    )


def name_of(options: Options) -> str:
    """Return `deep_residual` with the options that are not the default."""
    parts = ["deep_residual"]
    parts += [f"depth{options['depth']}"] * (options["depth"] != 12)
    parts += [f"width{options['width']}"] * (options["width"] != 32)
    parts += ["plain"] * (not options["residual"]) + [options["norm"]] * (options["norm"] != "none")
    parts += ["zero"] * options["zero_init"] + [f"scale{options['init_scale']:g}"] * (options["init_scale"] != 1)
    return "_".join(parts)
