"""`LaneStep`: a workload's step as a function of the tensors that lanes differ in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from workbench.train.gradients import autocast, per_example
from workbench.train.lane_stack import LaneStack
from workbench.train.traced.batch import BatchLayout
from workbench.workloads.base import Workload
from workbench.workloads.checks import check_loss_shape
from workbench.workloads.losses import label_of, prediction_of

__all__ = ["LaneStep", "LaneTensors", "Objective", "lane_tensors"]

Objective = Literal["mean", "sum", "evaluate"]
"""What a step computes: gradients of the mean loss, of the weighted sum, or no gradient but the metrics."""


@dataclass(frozen=True)
class LaneTensors:
    """Views of the rows of a stack that one call reads; without a lane axis where the call has one lane."""

    trained: list[Tensor]
    frozen: list[Tensor]
    buffers: list[Tensor]

    @property
    def all(self) -> list[Tensor]:
        """All of them, in the order of a program's inputs."""
        return [*self.trained, *self.frozen, *self.buffers]


def lane_tensors(stack: LaneStack, first: int, lanes: int, *, copy: bool = False) -> LaneTensors:
    """Return views of the rows from `first` on, or of a copy of them with the same strides."""
    rows: Any = slice(first, first + lanes) if lanes > 1 else first
    lead = (lanes,) if lanes > 1 else ()

    def read(tensor: Tensor) -> Tensor:
        return tensor[rows].clone() if copy else tensor[rows]

    values = read(stack.values)
    return LaneTensors(
        [values[..., where].view(*lead, *shape) for where, shape in zip(stack.slices, stack.shapes, strict=True)],
        [read(t) for t in stack.frozen.values()],
        [read(t) for t in stack.buffers.values()],
    )


class LaneStep(nn.Module):
    """The workload's step as a function of the tensors that change: `functional_call` puts them into the model."""

    def __init__(
        self, workload: Workload, model: nn.Module, stack: LaneStack, layout: BatchLayout, objective: Objective
    ) -> None:
        super().__init__()
        self.model = model
        self._workload, self._layout, self.objective = workload, layout, objective
        self._device, self._precision = stack.device, stack.precision
        self._buffer_names = list(stack.buffers)
        self._names = [f"model.{name}" for name in (*stack.names, *stack.frozen, *stack.buffers)]

    def own(self) -> list[Tensor]:
        """Return the tensors of the model that the inputs stand for."""
        return [*self.model.parameters(), *self.model.buffers()]

    def run(self, lane: Sequence[Tensor], leaves: Sequence[Tensor]) -> Any:
        """Return (losses, weights, metrics, buffers, predictions) of one lane."""
        return functional_call(self, dict(zip(self._names, lane, strict=True)), (self._layout.rebuild(leaves),))

    def forward(self, batch: Any) -> Any:
        """Run with whatever tensors the model holds now."""
        for module in self.model.modules():
            if isinstance(module, nn.RNNBase):  # it keeps a list of its weights beside their names
                module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]
        examples = self._layout.examples
        with autocast(self._device, self._precision):
            outputs, losses, weights = per_example(self._workload, self.model, batch, examples)
        metrics: dict[str, Tensor] = {}
        predictions: tuple[Tensor, ...] = ()
        if self.objective == "evaluate":
            metrics = {name: metric(outputs, batch) for name, metric in self._workload.metrics.items()}
            for name, value in metrics.items():
                check_loss_shape(value, examples, what=f"metric {name!r}")
            prediction = prediction_of(outputs, label_of(self._workload.loss, batch, examples), examples)
            predictions = () if prediction is None else (prediction,)
        buffers = [self.model.get_buffer(name) for name in self._buffer_names]
        return losses, () if weights is None else (weights,), tuple(metrics.values()), buffers, predictions

    def differentiate(self, losses: Tensor, weights: tuple[Tensor, ...], trained: list[Tensor]) -> list[Tensor | None]:
        """Return the gradients, with the arithmetic of `LoopGradients`; lanes do not mix, so their sum gives each its own."""
        if self.objective == "evaluate":
            return []
        if self.objective == "mean":
            value = losses.mean(-1, dtype=torch.float32) if losses.dtype == torch.bfloat16 else losses.mean(-1)
        else:
            value = ((weights[0].to(losses.dtype) if weights else torch.ones_like(losses)) * losses).sum(-1)
        return list(torch.autograd.grad(value.sum() if value.dim() else value, trained, allow_unused=True))
