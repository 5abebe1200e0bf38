"""`FlatParameters`: all trained parameters of a model as one tensor of shape (lanes, parameters).

The model's own parameters become views of it. One tensor makes the global norm, clipping and every update rule a
handful of operations, and gives training its lane axis.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

from workbench.errors import WorkloadError

__all__ = ["FlatParameters"]


class FlatParameters:
    """Flat parameters and gradient of one model; tied weights count once, frozen ones stay out.

    Attributes:
        values: shape (1, parameters); the model reads through views of it.
        grad: shape (1, parameters); each parameter's `.grad` is a view of it.
        names: names of the trained parameters, in order.
        slices: where each of them lies.
    """

    def __init__(self, model: nn.Module) -> None:
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        kinds = sorted({str(p.dtype) for _, p in named})
        if len(kinds) > 1 or any(p.is_complex() for _, p in named):
            raise WorkloadError(
                f"the model's trained parameters have dtypes {', '.join(kinds)}; one real dtype is needed. Call .float() in "
                "build_model, or set precision='float32'; precision='bfloat16' runs the forward pass in bfloat16."
            )
        self.parameters = [p for _, p in named]
        self.names = [name for name, _ in named]
        ends = torch.tensor([0] + [p.numel() for p in self.parameters]).cumsum(0).tolist()
        self.slices = [slice(a, b) for a, b in itertools.pairwise(ends)]
        self.values = torch.cat([p.detach().reshape(-1) for p in self.parameters]).unsqueeze(0)
        self.grad = torch.zeros_like(self.values)
        for p, where in zip(self.parameters, self.slices, strict=True):
            p.data = self.values[0, where].view(p.shape)
            p.grad = self.grad[0, where].view(p.shape)

    def collect(self, grads: tuple[Tensor | None, ...], *, add: bool) -> None:
        """Copy per-parameter gradients into the flat one, or add them to it; None is zero."""
        flat = [
            p.new_zeros(p.numel()) if g is None else g.reshape(-1) for g, p in zip(grads, self.parameters, strict=True)
        ]
        if add:
            self.grad[0].add_(torch.cat(flat))
        else:
            torch.cat(flat, out=self.grad[0])
