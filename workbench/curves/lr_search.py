"""Pure functions on a sweep's table: lr*, where instability starts, and which lrs to try next to sharpen lr*."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

from workbench.curves.sweep import LRPoint, SweepTable

DENSE_RATIO = 1.118
"""Neighbours this close bracket lr* to a factor of 1.25 (1.118 squared)."""

EDGE_MARGIN = 1.5
"""How far below the unstable lr a recommended one stays (rule of thumb)."""


@dataclass(frozen=True, kw_only=True)
class BestLR:
    """lr*, with its doubt. Beyond the first unstable lr nothing counts: a run that trains well there is luck.

    Attributes:
        lr: the reported learning rate.
        low: lower end of the interval around `lr` in which all lrs tried are as good.
        high: upper end.
        measured_lr: the lr with the lowest objective; `lr` may be its lower neighbour.
        point: the measurement at `lr`.
        tied: lrs whose paired difference to the best is within the tolerance.
        border: "low" or "high" where the lowest objective lies at the border of the lrs tried, else None.
        needs_refinement: the grid around the minimum is too coarse for the promise made in `reason`.
        reason: how `lr` follows from the measurements.
    """

    lr: float
    low: float
    high: float
    measured_lr: float
    point: LRPoint
    tied: tuple[float, ...]
    border: str | None
    needs_refinement: bool
    reason: str


@dataclass(frozen=True, kw_only=True)
class UnstableBracket:
    """Where lasting instability starts above lr*.

    Attributes:
        lower: largest lr below `upper` that is not lastingly unstable; None if none was run.
        upper: smallest lr above lr* at which at least half of the seeds are lastingly unstable.
        stable_above: larger lrs that are not lastingly unstable all the same.
    """

    lower: float | None
    upper: float
    stable_above: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Upper / lower, infinite when the lower end is unknown."""
        return math.inf if self.lower is None else self.upper / self.lower

    @property
    def middle(self) -> float:
        """Geometric middle: off by at most the square root of the ratio, either way."""
        return self.upper if self.lower is None else math.sqrt(self.lower * self.upper)


def tied(
    table: SweepTable,
    point: LRPoint,
    *,
    noise_sds: float = 2.0,
    loss_tolerance: float = 0.02,
    progress_tolerance: float = 1e-3,
    material_frac: float = 0.05,
) -> bool:
    """Tell whether a point is as good as the best, by the paired difference.

    Args:
        noise_sds: standard errors of the paired difference that count as equal, where they are a small share of what was
            learned: a run that blew up has so large an error that it would be as good as any.
        loss_tolerance: relative difference that counts as equal (O1).
        progress_tolerance: on minibatches, a difference below this share of what was learned counts as equal too (rule
            of thumb): once a network fits its training set, rounding decides which lr ends at 4e-5 and which at 6e-5.
        material_frac: the small share of what was learned (rule of thumb).
    """
    se = point.above_best_se if math.isfinite(point.above_best_se) else 0.0
    noise = min(noise_sds * se, material_frac * table.progress)
    rounding = 0.0 if table.noise_free else progress_tolerance * table.progress
    return point.above_best <= max(noise, loss_tolerance * table.loss_scale, rounding)


def lr_best(
    table: SweepTable,
    *,
    own: float | None = None,
    noise_sds: float = 2.0,
    loss_tolerance: float = 0.02,
    same_loss: float = 1.04,
    dense_ratio: float = DENSE_RATIO,
    edge_margin: float = EDGE_MARGIN,
) -> BestLR | None:
    """Return lr* with its interval, or None when no lr makes progress.

    With noise several lrs may be as good as the one with the lowest objective: lr* is the person's own where it is one of them,
    else the middle of them, with a margin to where training becomes unstable. Without noise the loss may explode right above
    lr*, so the lower neighbour is reported where it is as good, or, for a rule without memory, where the grid is dense: with one
    minimum that neighbour cannot lie above the true lr*.

    Args:
        own: the lr that the person trains with today.
        same_loss: without noise, a lower neighbour with a loss up to this many times the lowest is taken.
        dense_ratio: neighbours closer than this make the grid dense.
    """
    if table.best is None:
        return None
    points = table.points
    equal = _as_good(table, noise_sds=noise_sds, loss_tolerance=loss_tolerance)
    bracket = unstable_bracket(table, above=points[equal[0]].lr)
    top = math.inf if bracket is None else bracket.upper
    equal = [i for i in equal if points[i].lr < top]
    best = table.best if points[table.best].lr < top else min(equal, key=lambda i: points[i].above_best)
    if table.noise_free:
        chosen, reason = _choose(table, best, same_loss=same_loss, dense_ratio=dense_ratio)
    else:
        chosen, reason = _middle(table, equal, own, edge_margin)
    low, high = _around(chosen, {*equal, chosen, best})
    border = "low" if best == 0 else "high" if best == len(points) - 1 else None
    return BestLR(
        lr=points[chosen].lr,
        low=math.sqrt(points[low].lr * points[max(low - 1, 0)].lr),
        high=_upper_end(points, high),
        measured_lr=points[best].lr,
        point=points[chosen],
        tied=tuple(points[i].lr for i in equal),
        border=border,
        needs_refinement=refine_next(table, dense_ratio=dense_ratio) is not None,
        reason=reason,
    )


def _as_good(table: SweepTable, **thresholds: float) -> list[int]:
    """Return the points that are as good as the best, which is one of them, wherever they lie."""
    at = enumerate(table.points)
    return [i for i, p in at if i == table.best or (not p.unstable and tied(table, p, **thresholds))]


def _around(chosen: int, among: Collection[int]) -> tuple[int, int]:
    """Return the first and last of the neighbours of a point that are all among some points."""
    low = high = chosen
    while low - 1 in among:
        low -= 1
    while high + 1 in among:
        high += 1
    return low, high


def _upper_end(points: Sequence[LRPoint], high: int) -> float:
    """Return half a grid step above a point, but never towards an lr that is unstable."""
    if high + 1 >= len(points) or points[high + 1].unstable:
        return points[high].lr
    return math.sqrt(points[high].lr * points[high + 1].lr)


def below_edge(table: SweepTable, indices: Sequence[int], edge_margin: float = EDGE_MARGIN) -> list[int]:
    """Return the points that keep a margin to the lr where training becomes unstable; the lowest of them where none does.

    Args:
        edge_margin: how many times larger the unstable lr has to be (rule of thumb: another seed moves it by so much).
    """
    bracket = unstable_bracket(table)
    if bracket is None:
        return list(indices)
    safe = [i for i in indices if table.points[i].lr * edge_margin <= bracket.middle]
    return safe or sorted(indices)[:1]


def _middle(table: SweepTable, equal: Sequence[int], own: float | None, edge_margin: float) -> tuple[int, str]:
    """Return one of several points that are as good: the person's own, or the middle one away from the edge."""
    points = table.points
    if len(equal) == 1:
        return equal[0], "the lowest mean loss of the last tenth of the steps"
    mine = [i for i in equal if own is not None and math.isclose(points[i].lr, own, rel_tol=1e-9)]
    if mine:
        return mine[0], "the baseline's own, which is as good as the lowest mean loss of the last tenth of the steps"
    safe = below_edge(table, equal, edge_margin)
    middle = math.sqrt(points[safe[0]].lr * points[safe[-1]].lr)
    chosen = min(safe, key=lambda i: abs(math.log(points[i].lr / middle)))
    return chosen, "the middle of those that are as good as the lowest mean loss of the last tenth of the steps"


def _choose(table: SweepTable, best: int, *, same_loss: float, dense_ratio: float) -> tuple[int, str]:
    points = table.points
    if best == 0 or points[best - 1].unstable:
        return best, "the lowest mean loss of the last tenth of the steps"
    below = points[best - 1]
    if below.above_best <= (same_loss - 1) * table.loss_scale:
        return best - 1, f"the lower neighbour of the lowest loss, no more than {same_loss:g} times as high"
    if table.memory == 0 and points[best].lr / below.lr <= dense_ratio * (1 + 1e-9):
        return best - 1, "the lower neighbour of the lowest loss, which cannot lie above the true minimum"
    return best, "the lowest loss; the true minimum may lie on either side of it"


def refine_next(table: SweepTable, **thresholds: float) -> float | None:
    """Return the next lr that sharpens lr*, or None when it is sharp enough or lies at the border of the grid."""
    found = refine_round(table, lanes=1, **thresholds)
    return found[0] if found else None


def refine_round(
    table: SweepTable,
    *,
    lanes: int,
    same_loss: float = 1.04,
    dense_ratio: float = DENSE_RATIO,
    noisy_ratio: float = 1.25,
    noise_sds: float = 2.0,
    min_ratio: float = 1.002,
    flat_loss: float = 1.15,
    flat_ratio: float = 1.5,
) -> tuple[float, ...]:
    """Return the lrs that sharpen lr*, several for one round; () when it is sharp enough or at the border of the grid.

    Args:
        lanes: lrs in a round, at most.
        same_loss: without noise, refine until no lr between the neighbours can be better by more than this factor.
        dense_ratio: without noise, refine at least until the neighbours are this close.
        noisy_ratio: with noise, a neighbour that is clearly worse may stay this far away.
        noise_sds: with noise, standard errors of the paired difference that count as equal: two ties end the search.
            0 refines through ties, at about two more lrs.
        min_ratio: never try lrs closer than this.
        flat_loss: without noise, an optimizer with memory has several minima: lrs up to this many times the lowest
            loss are looked at as well.
        flat_ratio: gap that may stay open beside those.
    """
    best = table.best
    if best is None or best in (0, len(table.points) - 1):
        return ()
    below, at, above = table.points[best - 1 : best + 2]
    if not table.noise_free:
        worse = [
            p
            for p in (below, above)
            if _gap(p, at) > noisy_ratio and (p.unstable or not tied(table, p, noise_sds=noise_sds))
        ]
        return _cut(at, worse, lanes)
    if any(_gap(p, at) > dense_ratio * (1 + 1e-9) for p in (below, above)):
        return _cut(at, [p for p in (below, above) if _gap(p, at) > dense_ratio * (1 + 1e-9)], lanes)
    tolerance = (same_loss - 1) * table.loss_scale
    # Further to the right the loss falls by at most this much more, if it keeps the slope it had on the left.
    further = below.above_best * math.log(_gap(above, at)) / math.log(_gap(below, at))
    sides = [
        p for p, gain in ((below, below.above_best), (above, further)) if gain > tolerance and _gap(p, at) > min_ratio
    ]
    if sides:
        return _cut(at, sides, lanes)
    return _flat_gaps(table, flat_loss=flat_loss, flat_ratio=flat_ratio)[:lanes] if table.memory > 0 else ()


def _cut(at: LRPoint, sides: Sequence[LRPoint], lanes: int) -> tuple[float, ...]:
    """Return lrs that cut the gaps between a point and its neighbours evenly, the widest gap first."""
    sides = sorted(sides, key=lambda p: -_gap(p, at))[:lanes]
    found: list[float] = []
    for k, side in enumerate(sides):
        parts = (lanes + len(sides) - 1 - k) // len(sides) + 1
        found += [at.lr * (side.lr / at.lr) ** (j / parts) for j in range(1, parts)]
    return tuple(found)


def _gap(one: LRPoint, other: LRPoint) -> float:
    return max(one.lr / other.lr, other.lr / one.lr)


def _flat_gaps(table: SweepTable, *, flat_loss: float, flat_ratio: float) -> tuple[float, ...]:
    """Return the middles of the open gaps beside lrs that are nearly as good as the best, the most promising first."""
    limit = (flat_loss - 1) * table.loss_scale
    stable = [p for p in table.points if not p.unstable]
    open_gaps = [
        (min(p.above_best, q.above_best), math.sqrt(p.lr * q.lr))
        for p, q in pairwise(stable)
        if _gap(p, q) > flat_ratio and min(p.above_best, q.above_best) <= limit
    ]
    return tuple(lr for _, lr in sorted(open_gaps))


def unstable_bracket(table: SweepTable, *, above: float | None = None) -> UnstableBracket | None:
    """Return where lasting instability starts, or None when no lr above lr* is lastingly unstable.

    Args:
        above: lr to start from; None is the lowest lr that is as good as the one of the lowest objective.
    """
    if above is None:
        if table.best is None:
            return None
        above = table.points[_as_good(table)[0]].lr
    upper = next((p for p in table.points if p.lr > above and p.unstable), None)
    if upper is None:
        return None
    below = [p.lr for p in table.points if p.lr < upper.lr and not p.unstable]
    beyond = tuple(p.lr for p in table.points if p.lr > upper.lr and not p.unstable)
    return UnstableBracket(lower=max(below, default=None), upper=upper.lr, stable_above=beyond)
