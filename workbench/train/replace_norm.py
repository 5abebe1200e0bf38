"""`replace_batch_norm`: layer norm or group norm in the place of batch norm, which look at no other example (P6.1)."""

from __future__ import annotations

from typing import Literal

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from workbench.errors import UnknownNameError, UsageError, nearest
from workbench.train.batch_norm import batch_norm_layers, swap_batch_norm

__all__ = ["Norm", "replace_batch_norm"]

Norm = Literal["layer", "group"]


def replace_batch_norm(model: nn.Module, norm: Norm, *, channels_per_group: int = 16) -> nn.Module:
    """Return the model with every batch norm layer replaced by one that normalises each example by itself.

        model = wb.replace_batch_norm(model, "layer")

    "layer" normalises over all channels and places of an example, which is group norm with one group; "group" over groups of
    channels. Scale and shift stay the same parameters, so an optimizer that has them keeps working; running statistics go.

    Args:
        model: changed in place; the returned one differs where it is a batch norm layer itself.
        norm: "layer" or "group".
        channels_per_group: at least; the number of groups is the largest that divides the channels (16 was among the best of
            Wu and He 2018, arXiv:1803.08494, table 3).

    Raises:
        UnknownNameError: `norm` is neither.
        UsageError: the model has no batch norm, or `channels_per_group` is below 1.
        ConfigError: a layer has a `forward` of its own.

    Source: P6.1.
    """
    if norm not in ("layer", "group"):
        raise UnknownNameError(f"norm={norm!r} is not known.{nearest(norm, ('layer', 'group'))}")
    if isinstance(channels_per_group, bool) or not isinstance(channels_per_group, int) or channels_per_group < 1:
        raise UsageError(f"channels_per_group={channels_per_group!r} must be an integer of at least 1.")
    if not batch_norm_layers(model):
        raise UsageError(f"{type(model).__name__} has no batch norm layer to replace.")

    def replaced(layer: _BatchNorm) -> nn.Module:
        channels = layer.num_features
        groups = 1 if norm == "layer" else _groups(channels, channels_per_group)
        new = nn.GroupNorm(groups, channels, eps=layer.eps, affine=layer.affine)
        if layer.affine:
            new.weight, new.bias = layer.weight, layer.bias
        return new.train(layer.training)

    return swap_batch_norm(model, replaced)


def _groups(channels: int, at_least: int) -> int:
    """Return the largest number of equal groups that have so many channels each, one where there are not enough."""
    return next((g for g in range(channels // at_least, 0, -1) if channels % g == 0), 1)
