"""The clipping rule: a gradient longer than the threshold is rescaled to it, any other is left alone (F4.6)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from workbench.config import TrainConfig

__all__ = ["clip_by_norm", "clip_thresholds", "global_norm"]


def global_norm(grad: Tensor) -> Tensor:
    """Return the L2 norm of each lane's whole gradient: (lanes, parameters) -> (lanes,) (F1.9)."""
    norm: Tensor = torch.linalg.vector_norm(grad, dim=1)
    return norm


def clip_by_norm(
    grad: Tensor, norm: Tensor, max_grad_norm: float | Tensor, *, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return (clipped gradient, whether it was clipped) by the rule g' = threshold * g / |g| where |g| > threshold.

    The norm that the trainer records is the unclipped one (F4.7). A non-finite norm is left as it is, so that it
    shows in the record instead of turning into zeros. `torch.nn.utils.clip_grad_norm_` adds 1e-6 to the norm.

    Args:
        grad: shape (lanes, parameters).
        norm: its unclipped norm, shape (lanes,).
        max_grad_norm: threshold, a number or shape (lanes,); infinite is off.
        out: takes the clipped gradient; it may be `grad`, which saves a copy.
    """
    clipped = (norm > max_grad_norm) & (norm < math.inf)
    scale = torch.where(clipped, norm.reciprocal() * max_grad_norm, 1.0)
    return torch.mul(grad, scale.unsqueeze(1), out=out), clipped


def clip_thresholds(configs: Sequence[TrainConfig], like: Tensor) -> Tensor | None:
    """Return the threshold of each lane, shape (lanes,), infinite where a lane does not clip; None where none does."""
    if all(config.max_grad_norm is None for config in configs):
        return None
    values = [math.inf if config.max_grad_norm is None else config.max_grad_norm for config in configs]
    return torch.tensor(values, dtype=like.dtype, device=like.device)
