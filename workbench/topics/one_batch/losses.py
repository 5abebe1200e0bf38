"""`find_loss`: what the loss does with the outputs, asked of the loss itself with outputs that no model need produce."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from torch import Tensor

from workbench.instruments.losses.ranges import INF, REFUSED, LossAt, Span, end_of, ideals_of, reachable
from workbench.topics.one_batch.batch import OneBatch
from workbench.workloads.losses import next_tokens

SCALES = (10.0, 100.0, 1000.0)


def find_loss(one: OneBatch) -> dict[str, Any]:
    """Return what the loss is like: "kind", what it can reach, whether it is a mean over pairs, whether it has a lower bound.

    kind: "regression" (0 where outputs are the targets), "binary" or "classes" (falls as the right logit rises), None (none of
    these). "head": the operation that ends the model, "range": what it can return. "floor": the mean loss of ideal outputs, "reachable":
    of outputs as ideal as that range allows, "ignorant": of the targets' mean (regression) or of logits of 0. "reversed": it falls
    without end as the right output falls; "leans", "broadcast" and "escape" as the functions below say.
    """
    outputs = one.forward(train=True, grad=True)
    tensors = one.tensors(outputs)
    out = tensors[0] if len(tensors) == 1 else None
    head, known = (None, None) if out is None else end_of(out)
    span = known or (-INF, INF)
    facts: dict[str, Any] = {
        "kind": None, "head": head, "range": known and list(known), "reversed": False,
        "broadcast": _broadcast(one, outputs, out), "escape": _escape(one, outputs, span),
    }  # fmt: skip

    def at(values: Tensor) -> Tensor:
        """Return the loss of each example were these the values of the only tensor of the outputs."""
        return one.losses(one.with_tensors(outputs, lambda _: values.detach()))

    ideals = [] if out is None else _ideals(one, out)
    found = reachable(at, ideals, span)
    if found is not None:
        return facts | found | {"leans": _leans(one, outputs, ideals) if found["kind"] == "regression" else {}}
    facts["astray"] = next(
        (away for kind, ideal in ideals if kind == "regression" and (away := _astray(one, outputs, ideal, at))), None
    )
    return facts | {"reversed": any(_reversed(at, ideal, span) for kind, ideal in ideals if kind != "regression")}


def _ideals(one: OneBatch, out: Tensor) -> list[tuple[str, Tensor]]:
    """Return ideal outputs under every reading of the batch: targets themselves, or +1 for the right logit and -1 for the others."""
    given = getattr(one.workload.loss, "targets", None)
    tensors = [given(one.batch)] if callable(given) else one.inputs()[::-1]
    if not callable(given) and isinstance(one.batch, Tensor):
        tensors = [next_tokens(one.batch), one.batch]
    return [ideal for target in tensors if isinstance(target, Tensor) for ideal in ideals_of(target, out)]


def _leans(one: OneBatch, outputs: Any, ideals: list[tuple[str, Tensor]], *, size: float = 0.1) -> dict[str, float]:
    """Return how many times as much outputs above their targets cost as such below, by the loss ("") and by each metric that is least at the targets.

    They lie `size` deviations of the targets beside them (rule of thumb: little, so that a square of logarithms costs the same on both sides).
    """
    ideal = next(ideal for kind, ideal in ideals if kind == "regression")
    found = {}
    for name, cost in {"": one.workload.loss, **one.workload.metrics}.items():
        with contextlib.suppress(*REFUSED), torch.no_grad():
            exact, above, below = (
                float(cost(one.with_tensors(outputs, lambda _: ideal + side * size * _scale(ideal)), one.batch).double().mean())  # noqa: B023
                for side in (0.0, 1.0, -1.0)
            )  # fmt: skip
            if 0 <= exact < min(above, below) and math.isfinite(above / below):
                found[name] = above / below
    return found


def _astray(one: OneBatch, outputs: Any, ideal: Tensor, at: LossAt, *, most: float = 0.9) -> dict[str, Any] | None:
    """Return a metric that is 0 at the targets and larger beside them, where the loss of more than `most` of the examples is lower at other outputs (rule of thumb); else None.

    That is "metric", its name, and the means of "loss" there, "at_targets", of these "outputs" and of the "targets".
    """
    others = [size * ideal for size in (0.25, 0.5, 0.75, 1.5, 2.0, 4.0)] + [ideal.sign() * ideal.abs().log1p()]
    apart, exactly, best = (ideal != 0).reshape(len(ideal), -1).any(1), None, None
    with contextlib.suppress(*REFUSED):
        exactly = at(ideal)
        rated = [(float((at(values) < exactly)[apart].double().mean()), k) for k, values in enumerate(others)]
        share, best = max(rated, default=(0.0, None))
    if exactly is None or best is None or not share > most:
        return None
    for name, cost in one.workload.metrics.items():
        with contextlib.suppress(*REFUSED), torch.no_grad():
            exact, above, below, there = (
                float(cost(one.with_tensors(outputs, lambda _: values), one.batch).double().mean())  # noqa: B023
                for values in (ideal, ideal + 0.1 * _scale(ideal), ideal - 0.1 * _scale(ideal), others[best])
            )
            if abs(exact) < 1e-6 * min(above, below, there):
                means = [float(values.double().mean()) for values in (at(others[best]), exactly, others[best], ideal)]
                return {"metric": name} | dict(zip(("loss", "at_targets", "outputs", "targets"), means, strict=True))
    return None


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


def _broadcast(one: OneBatch, outputs: Any, out: Tensor | None) -> str | None:
    """Return "targets" or "outputs" where each example's loss is a mean over all of them, as (B, 1) against (B,) makes it; "" where that cannot be asked.

    The mark of it: with the outputs held, the loss of an example stays when the targets change places, and changes when another
    set of targets comes; or the same with outputs and targets exchanged. A loss that is a mean, and that is meant to compare two sets
    of values, has that mark, too: outputs that are the targets have to be no better than a constant.
    """
    n = one.examples
    if n < 4 or not one.exchangeable:
        return "" if n >= 4 and one.tensors(outputs) else None
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
        return bool(((values - there).reshape(-1)[:first].abs() <= 1e-4 * float(there.abs().max()) + 1e-12).all())

    if there.dim() == 0:
        if not same(moved) or same(other):
            return None
        ideals = [] if out is None else _ideals(one, out)
        ideal = next((ideal for kind, ideal in ideals if kind == "regression"), None)
        if ideal is None:
            return ""
        flat = ideal.mean(0, keepdim=True).expand_as(ideal)
        exact, constant = (one.losses(one.with_tensors(outputs, lambda _: v)) for v in (ideal, flat))  # noqa: B023
        return "targets" if bool(exact >= constant) else None
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
