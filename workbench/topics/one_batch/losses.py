"""`find_loss`: what the loss does with the outputs, asked of the loss itself with outputs that no model need produce."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from workbench.errors import WorkbenchError
from workbench.topics.one_batch.batch import OneBatch
from workbench.workloads.losses import next_tokens

INF = math.inf
Span = tuple[float, float]
LossAt = Callable[[Tensor], Tensor]
_RANGES = {
    "Sigmoid": (0.0, 1.0), "Softmax": (0.0, 1.0), "SafeSoftmax": (0.0, 1.0), "Tanh": (-1.0, 1.0), "Relu": (0.0, INF),
    "Softplus": (0.0, INF), "Exp": (0.0, INF), "Abs": (0.0, INF), "Elu": (-1.0, INF), "Silu": (-0.2785, INF),
    "Gelu": (-0.17, INF), "LogSoftmax": (-INF, 0.0), "LogSigmoid": (-INF, 0.0),
}  # fmt: skip
"""What an activation function returns at the least and at the most, by the name of its node in autograd's graph."""
_VIEWS = (
    "View", "ReshapeAlias", "UnsafeView", "Squeeze", "Unsqueeze", "Select", "Slice", "Transpose", "Permute", "ToCopy", "Clone",
    "Alias", "T", "Expand",
)  # fmt: skip
SCALES = (10.0, 100.0, 1000.0)
STRETCHES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
REFUSED = (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError, WorkbenchError)
"""What a loss may raise on outputs that its model never gives."""


def find_loss(one: OneBatch) -> dict[str, Any]:
    """Return what the loss is like: "kind", what it can reach, whether it is a mean over pairs, whether it has a lower bound.

    kind: "regression" (0 where outputs are the targets), "binary" or "classes" (falls as the right logit rises), None (none of
    these). "head": the operation that ends the model, "range": what it can return. "floor": the mean loss of ideal outputs, "reachable":
    of outputs as ideal as that range allows, "ignorant": of the targets' mean (regression) or of logits of 0. "reversed": it falls
    without end as the right output falls; "broadcast" and "escape" as the functions below say.
    """
    outputs = one.forward(train=True, grad=True)
    tensors = one.tensors(outputs)
    out = tensors[0] if len(tensors) == 1 else None
    head = None if out is None else _head(out)
    span = _RANGES.get(head or "", (-INF, INF))
    facts: dict[str, Any] = {
        "kind": None, "head": head, "range": list(span) if head in _RANGES else None, "reversed": False,
        "broadcast": _broadcast(one, outputs), "escape": _escape(one, outputs, span),
    }  # fmt: skip

    def at(values: Tensor) -> Tensor:
        """Return the loss of each example were these the values of the only tensor of the outputs."""
        return one.losses(one.with_tensors(outputs, lambda _: values.detach()))

    ideals = [] if out is None else _ideals(one, out)
    for kind, ideal in ideals:
        with contextlib.suppress(*REFUSED):
            found = _at_targets(at, ideal, span) if kind == "regression" else _at_logits(at, kind, ideal, span)
            if found is not None:
                return facts | {"kind": kind, **found}
    return facts | {"reversed": any(_reversed(at, ideal, span) for kind, ideal in ideals if kind != "regression")}


def _head(out: Tensor) -> str | None:
    """Return the name of the operation that made the outputs, views left out; "Softmax" where they are probabilities, however made."""
    if out.dim() > 1 and bool((out >= 0).all()):
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


def _ideals(one: OneBatch, out: Tensor) -> list[tuple[str, Tensor]]:
    """Return ideal outputs under every reading of the batch: targets themselves, or +1 for the right logit and -1 for the others."""
    given = getattr(one.workload.loss, "targets", None)
    tensors = [given(one.batch)] if callable(given) else one.inputs()[::-1]
    if not callable(given) and isinstance(one.batch, Tensor):
        tensors = [next_tokens(one.batch), one.batch]
    found = []
    for target in (t for t in tensors if isinstance(t, Tensor)):
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
    return {
        "floor": float(best.mean()), "ignorant": float(ignorant.mean()), "reachable": float(limited.amin(0).mean()),
        "floor_ratios": [float(ratios.min()), float(ratios.max())],
        "classes": next((ideal.shape[a] for a in axes if bool((hot.sum(a) == 1).all())), 2),
    }  # fmt: skip


def _reversed(at: LossAt, ideal: Tensor, span: Span) -> bool:
    """Whether the loss of every example falls as far as the outputs go, without end or to the wrong end of their range."""
    try:
        near, far, right = (at((size * ideal).clamp(*span)) for size in (-10.0, -1000.0, 1000.0))
    except REFUSED:
        return False
    return bool((far < right).all() and (math.isfinite(sum(span)) or (far < near - 100).all()))


def _scale(t: Tensor) -> float:
    spread = float(t.detach().float().std()) if t.numel() > 1 else 0.0
    return spread if math.isfinite(spread) and spread > 0 else 1.0


def _noisy(one: OneBatch, outputs: Any) -> Any:
    """Return the outputs moved at random, so far that most losses move by a tenth where the loss allows it."""
    there = one.losses(outputs)
    for size in (1.0, 10.0, 100.0, 1e3, 1e4):
        moved = one.with_tensors(outputs, lambda t: t.detach() + torch.randn_like(t) * _scale(t) * size)  # noqa: B023
        if float((one.losses(moved) - there).abs().median()) > 0.1 * float(there.abs().median()):
            return moved
    return one.unlike(one.with_tensors(outputs, lambda t: t.detach()))


def _broadcast(one: OneBatch, outputs: Any) -> str | None:
    """Return "targets" or "outputs" where each example's loss is a mean over all of them, as (B, 1) against (B,) makes it.

    The mark of it: with the outputs held, the loss of an example stays when the targets change places, and changes when another
    set of targets comes; or the same with outputs and targets exchanged.
    """
    n = one.examples
    if n < 4 or not one.exchangeable:
        return None
    places, half = torch.randperm(n, generator=torch.Generator().manual_seed(0)), torch.arange(n) % (n // 2)
    try:
        held = _noisy(one, outputs)
        there, moved, other = one.losses(held), one.losses(held, one.taken(places)), one.losses(held, one.taken(half))
        turned = one.losses(one.with_tensors(held, lambda t: t.index_select(0, places.to(t.device))))
    except REFUSED:
        return None
    if not there.shape == moved.shape == other.shape == turned.shape or not bool(torch.isfinite(there).all()):
        return None

    def same(values: Tensor, first: int = n) -> bool:
        return bool(((values - there)[:first].abs() <= 1e-4 * float(there.abs().max()) + 1e-12).all())

    if same(moved):
        return None if same(other, n // 2) else "targets"
    noise = one.with_tensors(held, lambda t: t + torch.randn_like(t) * _scale(t))
    return "outputs" if same(turned) and not same(one.losses(noise)) else None


def _escape(one: OneBatch, outputs: Any, span: Span) -> dict[str, Any] | None:
    """Return how far the loss falls as outputs go 10, 100 and 1,000 times their spread away, both ways, within their range."""
    falls, share = [], 0.0
    try:
        start = one.losses(outputs)
        for scale in SCALES:
            generator, each = torch.Generator().manual_seed(1), []
            for _ in range(4):
                steps = [
                    torch.randn(t.shape, generator=generator).to(t) * _scale(t) * scale for t in one.tensors(outputs)
                ]
                for sign in (1, -1):
                    left = iter(steps)
                    away = one.with_tensors(outputs, lambda t: (t.detach() + sign * next(left)).clamp(*span))  # noqa: B023
                    each.append(one.losses(away))
            mean = torch.stack(each).mean(0) - start
            mean = torch.where(torch.isnan(mean), INF, mean)
            falls.append(float(mean.mean()))
            share = float((mean < 0).double().mean())
    except REFUSED:
        return None
    return {"start": float(start.abs().mean()), "falls": falls, "share": share}
