"""Which learning rates to train next, several at a time: trials that do not depend on each other train side by side.

Each function answers one question of a sweep with the lrs of one round; () means that the question is settled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from workbench.curves.judged import judged
from workbench.curves.lr_search import tied, unstable_bracket
from workbench.curves.sweep import LRPoint, SweepTable
from workbench.curves.trials import RecordLike


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


SAME = 1.001
"""lrs closer than this are the same question."""


def spread(low: float, high: float, *, tolerance: float, lanes: int) -> tuple[float, ...]:
    """Return lrs that cut the gap between two lrs into equal factors.

    As many as make the fewest rounds of at most `lanes` until no gap is wider than the tolerance; of those, the fewest:
    cutting a gap into three in two rounds costs fewer trials than into nine in one. One lane is bisection.

    Args:
        low: lower end of the gap.
        high: upper end.
        tolerance: how wide a gap may stay, as a share of its lower end.
        lanes: lrs in a round, at most.
    """
    needed = math.ceil(math.log(high / low) / math.log1p(tolerance) - 1e-6)
    if needed <= 1:
        return ()
    rounds = math.ceil(math.log(needed) / math.log(lanes + 1) - 1e-9)
    parts = math.ceil(needed ** (1 / rounds) - 1e-9)
    return tuple(low * (high / low) ** (k / parts) for k in range(1, parts))


def edge_round(
    table: SweepTable,
    *,
    lanes: int,
    tolerance: float = 0.05,
    near: Sequence[float] = (),
    wide: float = 2.2,
) -> tuple[float, ...]:
    """Return the lrs that narrow the bracket of `lr.unstable`; () when it is narrow enough, or there is none yet.

    Args:
        lanes: lrs in a round, at most.
        tolerance: width of the bracket, as a share of its lower end.
        near: two lrs between which the edge may lie, from short runs or from `edge_from_growth`; tried first.
        wide: where the edge turns out to lie beside them, a bracket wider than this is searched from their side,
            a factor of 2 at a time (rule of thumb: it is rarely off by more).
    """
    bracket = unstable_bracket(table)
    if bracket is None or bracket.lower is None or bracket.ratio <= (1 + tolerance) * (1 + 1e-9):
        return ()
    low, high = bracket.lower, bracket.upper
    fresh = tuple(lr for lr in near if low * SAME < lr < high / SAME)
    if fresh:
        return fresh[:lanes]
    if near and bracket.ratio > wide:
        if high <= max(near) * SAME:
            return tuple(high / 2 ** (k / lanes) for k in range(1, lanes + 1))
        if low >= min(near) / SAME:
            return tuple(low * 2 ** (k / lanes) for k in range(1, lanes + 1))
    return spread(low, high, tolerance=tolerance, lanes=lanes)


def bisect_next(table: SweepTable, *, tolerance: float = 0.05, hint: float | None = None) -> float | None:
    """Return the next lr that narrows the bracket of `lr.unstable`, or None when it is narrow enough.

    Args:
        tolerance: width of the bracket, as a share of its lower end.
        hint: where the edge may be; both of its sides are tried first.
    """
    found = edge_round(table, lanes=1, tolerance=tolerance, near=around(hint, tolerance))
    return found[0] if found else None


def around(hint: float | None, tolerance: float) -> tuple[float, ...]:
    """Return the two lrs that bracket a hint to the tolerance; () without a hint."""
    side = math.sqrt(1 + tolerance)
    return () if hint is None else (hint / side, hint * side)


def raise_round(
    table: SweepTable, *, highest: float, near: Sequence[float] = (), steps: Sequence[float] = (2.0, 8.0)
) -> tuple[float, ...]:
    """Return lrs above all that were tried, where no lr above the best one is lastingly unstable yet.

    Args:
        highest: largest lr that may be tried.
        near: lrs at which short runs turned unstable; with them, the steps are taken to the power of one half.
        steps: multiples of the largest lr tried (rule of thumb).
    """
    if table.best is None or unstable_bracket(table) is not None:
        return ()
    top = table.points[-1].lr
    ahead = [lr for lr in near if lr > top * SAME] or [top * (step**0.5 if near else step) for step in steps]
    return tuple(lr for lr in ahead if lr <= highest)


def climb_round(
    table: SweepTable,
    *,
    lowest: float,
    highest: float,
    lanes: int,
    blind_lanes: int | None = None,
    factor: float = 4.0,
) -> tuple[float, ...]:
    """Return lrs below all that were tried, where the best lies at that border; above, see `raise_round`.

    Where no lr learned anything, the reason is usually that all are too high, and lower ones cost least to rule out.

    Args:
        lowest: smallest lr that may be tried.
        highest: largest.
        lanes: lrs in a round, at most.
        blind_lanes: the same where no lr learned anything; None is `lanes`.
        factor: from one lr to the next (rule of thumb).
    """
    if table.best is None:
        return _blind_round(table, lowest=lowest, highest=highest, lanes=blind_lanes or lanes, factor=factor)
    low = table.points[0].lr
    return () if table.best else tuple(low / factor**k for k in range(1, lanes + 1) if low / factor**k >= lowest)


def _blind_round(table: SweepTable, *, lowest: float, highest: float, lanes: int, factor: float) -> tuple[float, ...]:
    """Return where to look when no lr that was tried learned anything: down from the densest part, then up from it.

    A single lr far from the others, such as a baseline that is much too low or too high, leaves a gap that nobody has looked into.
    Below a run that only comes down slowly, and above one that is unstable, there is nothing to look for.
    """
    groups: list[list[LRPoint]] = []
    for point in table.points:
        if groups and point.lr / groups[-1][-1].lr <= factor**1.5:
            groups[-1].append(point)
        else:
            groups.append([point])
    at = max(range(len(groups)), key=lambda k: (len(groups[k]), -k))
    room = math.sqrt(factor)
    floor = max(lowest, groups[at - 1][-1].lr * room) if at else lowest
    ceiling = min(highest, groups[at + 1][0].lr / room) if at + 1 < len(groups) else highest
    first, last = groups[at][0], groups[at][-1]
    down = [] if _slow(table, first) else [first.lr / factor**k for k in range(1, lanes + 1)]
    up = [] if _blown(last) else [last.lr * factor**k for k in range(1, lanes + 1)]
    return tuple(lr for lr in down if lr >= floor) or tuple(lr for lr in up if lr <= ceiling)


def _slow(table: SweepTable, point: LRPoint, *, far_frac: float = 0.25) -> bool:
    """Tell whether a stable run ends with this share of the way to chance still before it (rule of thumb)."""
    way = table.loss_ref - table.level
    return way > 0 and not _blown(point) and point.loss - table.level > far_frac * way


def _blown(point: LRPoint) -> bool:
    return any(outcome in ("lasting", "divergent") for outcome in point.outcomes)


def fill_round(table: SweepTable, *, base: float, factor: float = 2.0) -> tuple[float, ...]:
    """Return the lrs beside the best one that are missing in a lattice.

    A side is left alone where its neighbour is as good as the best (the bowl is flat in between), or unstable: the search
    for the edge looks there.

    Args:
        base: an lr of the lattice, the baseline's own.
        factor: of the lattice; a neighbour farther than 1.5 of its steps leaves room for another lr.
    """
    if table.best is None:
        return ()
    at, found = table.points[table.best], []
    for sign in (-1, 1):
        side = _neighbour(table, table.best + sign)
        if side is None or side.unstable or (not table.noise_free and tied(table, side)):
            continue
        if max(at.lr / side.lr, side.lr / at.lr) > factor**1.5:
            found.append(on_lattice(at.lr * factor**sign, base, factor))
    return tuple(found)


def _neighbour(table: SweepTable, index: int) -> LRPoint | None:
    return table.points[index] if 0 <= index < len(table.points) else None


def on_lattice(lr: float, base: float, factor: float) -> float:
    """Return the lr nearest to `lr` among base * factor^k, so that the baseline's own lr is one of the grid."""
    return float(base * factor ** round(math.log(lr / base) / math.log(factor)))
