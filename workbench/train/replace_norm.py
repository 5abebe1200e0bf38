"""`replace_batch_norm`: layer norm or group norm in the place of batch norm, which look at no other example (P6.1)."""

from __future__ import annotations

from typing import Literal

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from workbench.errors import UnknownNameError, UsageError, nearest
from workbench.train.batch_norm import batch_norm_layers, swap_batch_norm

__all__ = ["Norm", "replace_batch_norm"]

Norm = Literal["layer", "group"]


def replace_batch_norm(model: nn.Module, norm: Norm, *, max_groups: int = 32, channels_per_group: int = 4) -> nn.Module:
    """Return the model with every batch norm layer replaced by one that normalises each example by itself.

        model = wb.replace_batch_norm(model, "layer")

    "layer" normalises over all channels and places of an example, which is group norm with one group; "group" over groups of
    channels: 8 of 32 channels, 6 of 24, 4 of 16. Channels that cannot be divided so, such as 17 or fewer than 8, make a single
    group, which is layer norm. Scale and shift stay the same parameters, so an optimizer that has them keeps working; running statistics go.

    Args:
        model: changed in place; the returned one differs where it is a batch norm layer itself.
        norm: "layer" or "group".
        max_groups: the number of groups is the largest up to this that divides the channels (32 is what Wu and He 2018,
            arXiv:1803.08494, use).
        channels_per_group: that it has to leave in each: a group of one channel is instance norm (4 is a rule of thumb).

    Raises:
        UnknownNameError: `norm` is neither.
        UsageError: the model has no batch norm, or `max_groups` or `channels_per_group` is below 1.
        ConfigError: a layer has a `forward` of its own.

    Source: P6.1.
    """
    if norm not in ("layer", "group"):
        raise UnknownNameError(f"norm={norm!r} is not known.{nearest(norm, ('layer', 'group'))}")
    for name, given in (("max_groups", max_groups), ("channels_per_group", channels_per_group)):
        if isinstance(given, bool) or not isinstance(given, int) or given < 1:
            raise UsageError(f"{name}={given!r} must be an integer of at least 1.")
    if not batch_norm_layers(model):
        raise UsageError(f"{type(model).__name__} has no batch norm layer to replace.")

    def replaced(layer: _BatchNorm) -> nn.Module:
        channels = layer.num_features
        groups = 1 if norm == "layer" else _groups(channels, max_groups, channels_per_group)
        new = nn.GroupNorm(groups, channels, eps=layer.eps, affine=layer.affine)
        if layer.affine:
            new.weight, new.bias = layer.weight, layer.bias
        return new.train(layer.training)

    return swap_batch_norm(model, replaced)


def _groups(channels: int, at_most: int, channels_each: int) -> int:
    """Return the largest number of equal groups that have so many channels each, one where there are not enough."""
    return next((g for g in range(min(channels // channels_each, at_most), 0, -1) if channels % g == 0), 1)
