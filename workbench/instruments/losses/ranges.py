"""What the operation that makes outputs can return, and what a loss is at the outputs that it likes best."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from workbench.errors import WorkbenchError
from workbench.instruments.order import plain_part

INF = math.inf
Span = tuple[float, float]
LossAt = Callable[[Tensor], Tensor]
RANGES = {
    "Sigmoid": (0.0, 1.0), "Softmax": (0.0, 1.0), "SafeSoftmax": (0.0, 1.0), "Tanh": (-1.0, 1.0), "Relu": (0.0, INF),
    "Softplus": (0.0, INF), "Exp": (0.0, INF), "Abs": (0.0, INF), "Elu": (-1.0, INF), "Silu": (-0.2785, INF),
    "Gelu": (-0.17, INF), "LogSoftmax": (-INF, 0.0), "LogSigmoid": (-INF, 0.0),
}  # fmt: skip
"""What an activation function returns at the least and at the most, by the name of its node in autograd's graph."""
_VIEWS = (
    "View", "ReshapeAlias", "UnsafeView", "Squeeze", "Unsqueeze", "Select", "Slice", "Transpose", "Permute", "ToCopy", "Clone",
    "Alias", "T", "Expand",
)  # fmt: skip
_UNIT = 1e-2
"""By which a length may differ from 1, as in bfloat16."""
STRETCHES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
REFUSED = (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError, WorkbenchError)
"""What a loss may raise on outputs that its model never gives."""


def end_of(out: Tensor, *, values: bool = True, saved: bool = True) -> tuple[str | None, Span | None]:
    """Return the name of the operation that made the outputs, views left out, and what it can return, None for anything.

    "Cosine" are products of vectors of length 1, times a number. "Softmax" are probabilities, however made, where `values` are looked at.
    Cosines are found where what the graph has `saved` may be asked for: hooks, as of a checkpoint, would compute it anew.
    """
    node, factor = plain_part(out) if saved else (None, None)
    while node is not None and node.next_functions and type(node).__name__.split("Backward")[0] in _VIEWS:
        node = node.next_functions[0][0]
    if node is not None and factor is not None and node.name() in ("MmBackward0", "BmmBackward0"):
        sides = ((node._saved_self, -1), (node._saved_mat2, -2))
        if all(side is not None and bool(((side.norm(dim=axis) - 1).abs() < _UNIT).all()) for side, axis in sides):
            return "Cosine", (-abs(factor), abs(factor))
    head = _head_of(out, values=values)
    return head, RANGES.get(head or "")


def _head_of(out: Tensor, *, values: bool) -> str | None:
    if values and out.dim() > 1 and bool((out >= 0).all()):
        sums = [out.detach().float().sum(axis) for axis in {1, out.dim() - 1} if out.shape[axis] > 1]
        if any(bool(((total - 1).abs() < 1e-4).all()) for total in sums):
            return "Softmax"
    node: Any = out.grad_fn
    while node is not None:
        name = type(node).__name__.split("Backward")[0]
        if name not in _VIEWS or not node.next_functions:
            return name
        node = node.next_functions[0][0]
    return None


def ideals_of(target: Tensor, out: Tensor) -> list[tuple[str, Tensor]]:
    """Return ideal outputs under every reading of a target: itself, or +1 for the right logit and -1 for the others."""
    found = []
    if target.numel() == out.numel():
        shaped = target.reshape(out.shape).to(out.dtype)
        found.append(("regression", shaped))
        if bool(((shaped == 0) | (shaped == 1)).all()):
            found.append(("binary", 2 * shaped - 1))
    for axis in () if target.is_floating_point() or out.dim() < 2 else {1, out.dim() - 1}:
        count = out.shape[axis]
        if count > 1 and target.numel() * count == out.numel():
            shape = [n for i, n in enumerate(out.shape) if i != axis]
            hot = F.one_hot(target.reshape(shape).long().clamp(0, count - 1), count).to(out.dtype)
            found.append(("classes", 2 * hot.movedim(-1, axis) - 1))
    return found


def reachable(at: LossAt, ideals: list[tuple[str, Tensor]], span: Span) -> dict[str, Any] | None:
    """Return under which reading of the targets a loss is least at its ideal outputs, and what it is there and within a range; None under none."""
    for kind, ideal in ideals:
        with contextlib.suppress(*REFUSED):
            found = _at_targets(at, ideal, span) if kind == "regression" else _at_logits(at, kind, ideal, span)
            if found is not None:
                return {"kind": kind, **found}
    return None


def _at_targets(at: LossAt, ideal: Tensor, span: Span) -> dict[str, Any] | None:
    """Return what the loss of a regression is at and near its targets; None where it is not least there."""
    floor, constant = at(ideal), at(ideal.mean(0, keepdim=True).expand_as(ideal))
    spread = float(ideal.float().std()) if ideal.numel() > 1 else 0.0
    near = at(ideal + 0.5 * (spread or 1.0))
    if not float(floor.abs().max()) < 1e-6 * float(near.mean()) or float(near.min()) <= 0:
        return None
    return {
        "floor": float(floor.mean()), "ignorant": float(constant.mean()), "reachable": float(at(ideal.clamp(*span)).mean()),
        "target_mean": float(ideal.float().mean()), "target_spread": spread,
        "target_low": float(ideal.min()), "target_high": float(ideal.max()),
    }  # fmt: skip


def _at_logits(at: LossAt, kind: str, ideal: Tensor, span: Span) -> dict[str, Any] | None:
    """Return what the loss is at ideal logits; None where it does not fall as the right logit rises."""
    ignorant, wrong = at(torch.zeros_like(ideal)), at(-ideal * 4)
    best = torch.stack([at(ideal * stretch) for stretch in STRETCHES]).amin(0)
    if not bool((best <= ignorant).all() & (wrong >= ignorant).all() & (best < wrong).any()):
        return None
    limited = torch.stack([at((ideal * s).clamp(*span)) for s in STRETCHES])
    ratios, hot = (best / ignorant)[ignorant > 0], (ideal > 0).double()
    axes = () if kind == "binary" else (1, ideal.dim() - 1)
    axis = next((a for a in axes if bool((hot.sum(a) == 1).all())), None)
    shares = hot.mean([k for k in range(hot.dim()) if k != axis], keepdim=True)
    logits = (shares.logit() if axis is None else shares.log()).clamp(-30.0, 30.0).to(ideal.dtype)
    count = 2 if axis is None else ideal.shape[axis]
    rows = hot.numel() / (1 if axis is None else count)
    bias = (count - 1) / (2 * rows)  # of frequencies in a batch (Miller and Madow, 1955)
    return {
        "floor": float(best.mean()), "ignorant": float(ignorant.mean()), "reachable": float(limited.amin(0).mean()),
        "constant": float(at(logits.expand_as(ideal)).mean()) + bias, "floor_ratios": [float(ratios.min()), float(ratios.max())],
        "classes": count,
    }  # fmt: skip
