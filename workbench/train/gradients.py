"""Loss and gradient of one batch by plain autograd, one lane after the other (`gradients="loop"`)."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from workbench.train.parameters import FlatParameters
from workbench.workloads.base import Workload
from workbench.workloads.checks import check_loss_shape, check_weights

__all__ = ["BatchLoss", "LoopGradients", "autocast", "per_example"]


class BatchLoss(NamedTuple):
    """Weighted mean loss of one update's batch and the squared standard error of that mean, each shape ()."""

    loss: Tensor
    squared_se: Tensor


def autocast(device: torch.device, precision: str | None) -> contextlib.AbstractContextManager[Any]:
    """Return the context of the forward pass: bfloat16 autocast where asked for."""
    if precision == "bfloat16":
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return contextlib.nullcontext()


def per_example(workload: Workload, model: nn.Module, batch: Any, examples: int) -> tuple[Any, Tensor, Tensor | None]:
    """Return (outputs, losses (examples,), weights (examples,) or None) of one batch, shapes checked."""
    outputs = workload.forward(model, batch)
    losses = workload.loss(outputs, batch)
    check_loss_shape(losses, examples)
    weights = None if workload.weights is None else workload.weights(batch)
    if weights is not None:
        check_loss_shape(weights, examples, what="weights(batch)")
    return outputs, losses, weights


class LoopGradients:
    """Fills `FlatParameters.grad` with the gradient of the weighted mean loss over all micro-batches."""

    def __init__(
        self, workload: Workload, model: nn.Module, flat: FlatParameters, device: torch.device, precision: str | None
    ) -> None:
        self._workload, self._model, self._flat = workload, model, flat
        self._device, self._precision = device, precision
        self._weights_checked = False

    def __call__(self, micro_batches: Sequence[tuple[Any, int]]) -> BatchLoss:
        """Return the loss of one update; the gradient is left in the flat parameters."""
        if len(micro_batches) == 1 and self._workload.weights is None:
            return self._single(*micro_batches[0])
        return self._weighted(micro_batches)

    def _single(self, batch: Any, examples: int) -> BatchLoss:
        with autocast(self._device, self._precision):
            _, losses, _ = per_example(self._workload, self._model, batch, examples)
        loss = losses.mean(dtype=torch.float32) if losses.dtype == torch.bfloat16 else losses.mean()
        self._flat.collect(torch.autograd.grad(loss, self._flat.parameters, allow_unused=True), add=False)
        detached = losses.detach()
        spread = detached.float().var() if detached.dtype == torch.bfloat16 else _variance(detached, examples)
        return BatchLoss(loss.detach(), spread / examples)

    def _weighted(self, micro_batches: Sequence[tuple[Any, int]]) -> BatchLoss:
        kept: list[tuple[Tensor, Tensor]] = []
        for number, (batch, examples) in enumerate(micro_batches):
            with autocast(self._device, self._precision):
                _, losses, weights = per_example(self._workload, self._model, batch, examples)
            weights = torch.ones_like(losses) if weights is None else weights.to(losses.dtype)
            grads = torch.autograd.grad((weights * losses).sum(), self._flat.parameters, allow_unused=True)
            self._flat.collect(grads, add=number > 0)
            kept.append((losses.detach(), weights))
        losses, weights = (torch.cat(parts) for parts in zip(*kept, strict=True))
        if not self._weights_checked and self._workload.weights is not None:
            check_weights(weights, where="the first batch of the train split")  # the values only once: it synchronises
            self._weights_checked = True
        total = weights.sum()
        self._flat.grad.div_(total)
        loss = (weights * losses).sum() / total
        n = losses.numel()
        squared_se = ((weights * (losses - loss)) ** 2).sum() / total**2 * (n / (n - 1) if n > 1 else math.nan)
        return BatchLoss(loss, squared_se)


def _variance(losses: Tensor, examples: int) -> Tensor:
    return losses.var() if examples > 1 else losses.new_full((), math.nan)
