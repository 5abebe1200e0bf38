"""Workloads on two sets of data that scikit-learn ships: 1,797 handwritten digits of 8x8, and an imbalanced table of 569 rows.

`digits_mlp`, `digits_cnn`, `digits_resnet` with the stride variant of F1.3, `deep_residual` with its options, `breast_cancer`.
"""

import math
from functools import cache, partial
from typing import Any, Literal, TypedDict, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from workbench.checks import check_integer
from workbench.config import TrainConfig
from workbench.errors import UsageError, nearest
from workbench.workloads.base import Workload
from workbench.workloads.losses import classification
from workbench.workloads.subsets import stratified_split


def _splits(inputs: Tensor, labels: Tensor, indices: tuple[Tensor, ...]) -> dict[str, Any]:
    names = ("train_data", "validation_data", "test_data")
    return {name: TensorDataset(inputs[part], labels[part]) for name, part in zip(names, indices, strict=True)}


@cache
def digits_data(*, flat: bool) -> dict[str, Any]:
    """Return the digits, of shape (64,) if `flat` else (1, 8, 8), standardised by one mean and deviation of the training pixels."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = torch.from_numpy(bunch.images).float()
    indices = tuple(torch.from_numpy(part) for part in stratified_split(bunch.target))
    train = images[indices[0]]
    images = (images - train.mean()) / train.std()
    images = images.flatten(1) if flat else images.unsqueeze(1)
    return _splits(images, torch.from_numpy(bunch.target).long(), indices)


def breast_cancer() -> Workload:
    """Return a 30-32-2 network; class 1 is benign, 63 % of the rows; columns are standardised on the training rows."""
    from sklearn.datasets import load_breast_cancer

    bunch = load_breast_cancer()
    rows = torch.from_numpy(bunch.data)
    indices = tuple(torch.from_numpy(part) for part in stratified_split(bunch.target))
    train = rows[indices[0]]
    rows = ((rows - train.mean(0)) / train.std(0)).float()
    return classification(
        name="breast_cancer",
        build_model=lambda: nn.Sequential(nn.Linear(30, 32), nn.ReLU(), nn.Linear(32, 2)),
        config=TrainConfig(peak_lr=0.01, total_steps=1000, batch_size=32),
        **_splits(rows, torch.from_numpy(bunch.target).long(), indices),
    )


def mlp(*, init_scale: float = 1.0) -> nn.Module:
    """Return a fresh 64-32-32-10 ReLU network, its weights `init_scale` times as large as torch makes them."""
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))
    with torch.no_grad():
        for weight in list(model.parameters())[::2]:
            weight.mul_(init_scale)
    return model


def digits_mlp(*, init_scale: float = 1.0) -> Workload:
    """Return a small network on the digits, its weights `init_scale` times as large at the start; a run takes about a second."""
    _check_init_scale(init_scale)
    return classification(
        name="digits_mlp" if init_scale == 1 else f"digits_mlp_scale{init_scale:g}",
        build_model=mlp if init_scale == 1 else partial(mlp, init_scale=init_scale),
        config=TrainConfig(peak_lr=0.05, total_steps=2000, batch_size=64),
        **digits_data(flat=True),
    )


def _check_init_scale(init_scale: float) -> None:
    if not (init_scale > 0 and math.isfinite(init_scale)):
        raise UsageError(f"init_scale={init_scale!r} must be a finite number above 0; 1 is the healthy size.")


def _cnn() -> nn.Module:
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
    """Return two convolutions with batch norm on the digits; a run takes some ten seconds."""
    return classification(
        name="digits_cnn",
        build_model=_cnn,
        config=TrainConfig(peak_lr=0.05, total_steps=4000, batch_size=64),
        **digits_data(flat=False),
    )


class WideBlock(nn.Module):
    """A residual block: x + conv(relu(norm(conv(relu(norm(x))))))."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(channels_in)
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride=stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        same_shape = channels_in == channels_out and stride == 1
        self.skip = nn.Identity() if same_shape else nn.Conv2d(channels_in, channels_out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, channels_in, side, side) to (batch, channels_out, side / stride, side / stride)."""
        h = self.conv1(F.relu(self.norm1(x)))
        h = self.conv2(F.relu(self.norm2(h)))
        out: Tensor = self.skip(x) + h
        return out


class WideResNet(nn.Module):
    """Three residual blocks of width `width`, `2 * width` and `4 * width` for images (batch, 1, 8, 8)."""

    def __init__(self, *, stride: int = 2, width: int = 16) -> None:
        super().__init__()
        side = 8 // stride // 2
        self.stem = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.blocks = nn.Sequential(
            WideBlock(width, width, stride=1),
            WideBlock(width, 2 * width, stride=stride),
            WideBlock(2 * width, 4 * width, stride=2),
        )
        self.norm = nn.BatchNorm2d(4 * width)
        self.pool = nn.AvgPool2d(2)
        self.classifier = nn.Linear(4 * width * (side // 2) ** 2, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (batch, 10)."""
        features = F.relu(self.norm(self.blocks(self.stem(images))))
        logits: Tensor = self.classifier(self.pool(features).flatten(1))
        return logits


def digits_resnet(*, stride: int = 2) -> Workload:
    """Return a wide residual network on the digits; stride 2 of its second block is the baseline of F1.3, 1 the modification."""
    return classification(
        name="digits_resnet" if stride == 2 else f"digits_resnet_stride{stride}",
        build_model=lambda: WideResNet(stride=stride),
        config=TrainConfig(peak_lr=0.05, total_steps=4000, batch_size=64),
        **digits_data(flat=False),
    )


def digits_resnet_stride1() -> Workload:
    """Return `digits_resnet(stride=1)`, so that it has a name of its own."""
    return digits_resnet(stride=1)


Placement = Literal["none", "branch", "after_add", "pre"]


class _Block(TypedDict):
    width: int
    residual: bool
    norm: Placement
    zero_init: bool
    init_scale: float


class DeepBlock(nn.Module):
    """A block of `width` units: x + f(x), or f(x) alone, with a layer norm where `norm` says; f(x) = outer(relu(inner(x))).

    With the initialisation of He et al. 2015 (arXiv 1502.01852) f passes on the variance that it gets. At the start x + f(x) then
    doubles the variance block by block, x + Norm(f(x)) and x + f(Norm(x)) add 1 to it, Norm(x + f(x)) keeps it, and so does a
    network without additions. A branch that begins at zero has a zero in what ends it: in the gain of its norm (Goyal et al.
    2017, arXiv 1706.02677), or else in the weights of its last layer.
    """

    def __init__(self, width: int, *, residual: bool, norm: Placement, zero_init: bool, init_scale: float) -> None:
        super().__init__()
        self.residual, self.placement = residual, norm
        self.inner = _linear(width, width, std=init_scale * math.sqrt(2 / width))
        self.outer = _linear(width, width, std=init_scale * math.sqrt(1 / width))
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
    """`depth` blocks between a first layer and a classifier, for images of shape (batch, 64)."""

    def __init__(self, depth: int, block: _Block) -> None:
        super().__init__()
        width, scale = block["width"], block["init_scale"]
        self.stem = _linear(64, width, std=scale / 8)
        self.blocks = nn.Sequential(*(DeepBlock(**block) for _ in range(depth)))
        # nothing else bounds the sum of the branches
        self.norm = nn.LayerNorm(width) if block["norm"] == "pre" else nn.Identity()
        self.classifier = _linear(width, 10, std=0.1 * scale / math.sqrt(width))  # the first loss is near chance

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (batch, 10)."""
        logits: Tensor = self.classifier(self.norm(self.blocks(self.stem(images))))
        return logits


def _linear(fan_in: int, fan_out: int, *, std: float) -> nn.Linear:
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
    """Return a deep network on the digits, whose residual connections, normalisation and initialisation are options.

    Args:
        depth: blocks; a block is two weight layers.
        residual: x + f(x), or f(x) alone.
        norm: "none"; "branch": x + Norm(f(x)) (F2.6); "after_add": Norm(x + f(x)) (F2.7); "pre": x + f(Norm(x)), with a
            norm before the classifier.
        zero_init: every branch is 0 at step 0, so that the network begins as its first layer and classifier (F2.8).
        init_scale: all weights are this many times as large at the start; 1 is the healthy size.

    Raises:
        UsageError: an option is out of its range, or needs residual=True.
    """
    check_integer("depth", depth, error=UsageError)
    check_integer("width", width, error=UsageError)
    if norm not in get_args(Placement):
        raise UsageError(f"norm={norm!r} is not known.{nearest(norm, get_args(Placement))}")
    _check_init_scale(init_scale)
    if not residual and (zero_init or norm == "after_add"):
        asked = "zero_init=True" if zero_init else "norm='after_add'"
        raise UsageError(
            f"{asked} needs residual=True: without the addition a zero branch lets nothing through, and there is no sum to "
            "normalise. Take residual=True, or norm='branch', which normalises what each block returns."
        )
    block = _Block(width=width, residual=residual, norm=norm, zero_init=zero_init, init_scale=init_scale)
    changed = [f"depth{depth}"] * (depth != 12) + [f"width{width}"] * (width != 32) + ["plain"] * (not residual)
    changed += [norm] * (norm != "none") + ["zero"] * zero_init + [f"scale{init_scale:g}"] * (init_scale != 1)
    return classification(
        name="_".join(["deep_residual", *changed]),
        build_model=lambda: DeepResidual(depth, block),
        config=TrainConfig(peak_lr=peak_lr, total_steps=total_steps, batch_size=64),
        **digits_data(flat=True),
    )
