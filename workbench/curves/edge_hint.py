"""The edge of stability from one unstable run: a hint where to look, never the verdict."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from workbench.curves.judged import judged
from workbench.curves.lr_search import unstable_bracket
from workbench.curves.trials import RecordLike

__all__ = ["edge_from_growth", "growth_edge"]


def edge_from_growth(
    loss: ArrayLike,
    *,
    lr: float,
    optimizer: str,
    momentum: float = 0.9,
    beta1: float = 0.9,
    steps: int = 6,
) -> float | None:
    """Return the largest stable lr that the growth of one unstable run points to.

    On a quadratic the unstable mode grows by a factor rho a step, and rho fixes lr times curvature (the root of the
    rule's characteristic polynomial); its ratio to the rule's exact threshold is that of lr to the edge. On a network
    the curvature moves, so this only says where to confirm with two runs.

    Args:
        loss: training loss of a run that grows at its end, shape (steps,).
        lr: learning rate of its last steps.
        optimizer: name of the update rule; None is returned for a rule without a known edge.
        momentum: of momentum, nesterov and rmsprop.
        beta1: of adam and adamw.
        steps: how many of the last steps the growth is taken from.

    Returns:
        The edge, or None when the run does not grow or the rule is unknown.
    """
    values = np.asarray(loss, dtype=np.float64).ravel()
    finite = values[np.isfinite(values)]
    if finite.size < steps + 1:
        return None
    excess = finite - finite.min()
    first, last = excess[-1 - steps], excess[-1]
    if first <= 0 or last <= first:
        return None
    rho = math.exp((math.log(last) - math.log(first)) / (2 * steps))
    return _edge(rho, lr, optimizer, momentum, beta1)


def _edge(rho: float, lr: float, optimizer: str, momentum: float, beta1: float) -> float | None:
    """Return lr times the threshold over lr * curvature at which the rule grows by `rho` a step."""
    if optimizer == "sgd":
        return lr * 2.0 / (1.0 + rho)
    if optimizer in ("momentum", "rmsprop"):
        return lr * _heavy_ball(1.0, momentum) / _heavy_ball(rho, momentum)
    if optimizer == "nesterov":
        grown = 1.0 + rho**2 / ((1.0 + momentum) * rho + momentum)
        return lr * (1.0 + 1.0 / (1.0 + 2.0 * momentum)) / grown
    if optimizer in ("adam", "adamw"):
        return lr * _heavy_ball(1.0, beta1) / _heavy_ball(rho, beta1)
    return None


def _heavy_ball(rho: float, memory: float) -> float:
    return (rho**2 + memory) / rho + 1.0 + memory


def growth_edge(record: RecordLike) -> float | None:
    """Return the edge that the growth of the sweep's lowest unstable trial points to, for full batches; else None.

    Args:
        record: a sweep whose bracket is still wide.
    """
    table = judged(record).sweep()
    bracket = unstable_bracket(table)
    if bracket is None or bracket.lower is None or not table.noise_free:
        return None
    for curve in judged(record).curves:
        if math.isclose(curve.lr, bracket.upper, rel_tol=1e-9) and curve.total_steps == table.total_steps:
            return edge_from_growth(
                curve.loss,
                lr=curve.lr,
                optimizer=str(curve.config["optimizer"]),
                momentum=float(curve.config["momentum"]),
                beta1=float(curve.config["beta1"]),
            )
    return None
