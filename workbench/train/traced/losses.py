"""`LaneLosses`: the per-example losses of one step for all lanes, and the means that are taken of them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from workbench.train.gradients import LaneLoss

__all__ = ["LaneLosses"]


class LaneLosses:
    """Losses and weights of a step, shape (lanes, examples), with the arithmetic of plain autograd for each lane.

    Args:
        lanes: of the stack.
        examples: of all micro-batches of the step together.
        dtype: of the losses.
        device: where.
        weighted: whether means will be weighted; without it there are no weights.
    """

    def __init__(self, lanes: int, examples: int, dtype: torch.dtype, device: torch.device, *, weighted: bool) -> None:
        self.losses = torch.empty((lanes, examples), dtype=dtype, device=device)
        self.weights = torch.ones_like(self.losses) if weighted else None

    def put(self, rows: slice, first: int, losses: Tensor, weights: Tensor | None) -> None:
        """Write what some rows have on the examples from `first` on; no weights are ones."""
        where = slice(first, first + losses.shape[-1])
        self.losses[rows, where] = losses
        if weights is not None and self.weights is not None:
            self.weights[rows, where] = weights

    def mean(self) -> LaneLoss:
        """Return plain means and their squared standard error."""
        losses, n = self.losses, self.losses.shape[1]
        loss = losses.mean(1, dtype=torch.float32) if losses.dtype == torch.bfloat16 else losses.mean(1)
        if n == 1:
            return LaneLoss(loss, torch.full_like(loss, math.nan))
        residuals = losses.to(loss.dtype) - loss.unsqueeze(1)
        return LaneLoss(loss, residuals.square_().sum(1).div_(n * (n - 1)))

    def weighted(self) -> tuple[LaneLoss, Tensor]:
        """Return weighted means with their squared standard error, and what each lane's sum of gradients is divided by."""
        losses, weights, n = self.losses, self.weights, self.losses.shape[1]
        assert weights is not None
        total = weights.sum(1)
        divisor = torch.where(total > 0, total, 1)
        loss = (weights * losses).sum(1) / divisor
        residuals = weights * (losses - loss.unsqueeze(1))
        squared_se = (residuals**2).sum(1) / divisor**2 * (n / (n - 1) if n > 1 else math.nan)
        return LaneLoss(loss, squared_se), divisor
