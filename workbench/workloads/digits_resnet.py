"""`digits_resnet`: a small wide residual network on the digits, and the stride variant of F1.3.

As in wide residual networks (Zagoruyko and Komodakis 2016) the blocks normalise first and the last feature map is
averaged over a window of fixed size. The modification makes one block keep its resolution: the window then fits four
times, and the classifier sees four times the inputs.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from workbench.config import TrainConfig
from workbench.workloads.base import Workload
from workbench.workloads.digits_data import digits_data
from workbench.workloads.helpers import classification

__all__ = ["Block", "WideResNet", "digits_resnet", "digits_resnet_stride1"]


class Block(nn.Module):
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
            Block(width, width, stride=1),
            Block(width, 2 * width, stride=stride),
            Block(2 * width, 4 * width, stride=2),
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
    """Return the workload.

    Args:
        stride: of the second residual block; 2 is the baseline of F1.3, 1 its modification.
    """
    data = digits_data(flat=False)
    return classification(
        name="digits_resnet" if stride == 2 else f"digits_resnet_stride{stride}",
        build_model=lambda: WideResNet(stride=stride),
        train_data=data.train,
        validation_data=data.validation,
        test_data=data.test,
        config=TrainConfig(peak_lr=0.05, total_steps=4000, batch_size=64),
    )


def digits_resnet_stride1() -> Workload:
    """Return `digits_resnet(stride=1)`, so that it has a name of its own."""
    return digits_resnet(stride=1)
