"""One point of a learning-rate sweep: the loss of an lr over its seeds, and its paired distance to the best."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from workbench.curves.classify import ignorance
from workbench.curves.smoothing import noise_per_step
from workbench.curves.trials import (
    TrialCurve,
    TrialVerdict,
    initial_losses,
    judge,
)

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class LRPoint:
    """All full-length trials at one learning rate.

    Attributes:
        lr: peak learning rate.
        loss: mean over the seeds of the tail loss (the objective), infinite when a seed diverged.
        loss_se: standard error of `loss` over the last steps and the seeds.
        above_best: paired difference to the best lr: same seeds, same steps, same batches.
        above_best_se: standard error of that difference.
        seeds: seeds that were run.
        losses: tail loss of each seed.
        outcomes: stability outcome of each seed.
        lasting: how many seeds are lastingly unstable.
        trials: trial numbers, in the order of `seeds`.
    """

    lr: float
    loss: float
    loss_se: float
    above_best: float = math.nan
    above_best_se: float = math.nan
    seeds: tuple[int, ...]
    losses: tuple[float, ...]
    outcomes: tuple[str, ...]
    lasting: int
    trials: tuple[int, ...]

    @property
    def unstable(self) -> bool:
        """At least half of the seeds are lastingly unstable."""
        return 2 * self.lasting >= len(self.seeds)

    @property
    def disputed(self) -> bool:
        """The seeds disagree on whether this lr is stable."""
        return 0 < self.lasting < len(self.seeds)


@dataclass(frozen=True, kw_only=True)
class SweepTable:
    """The points of a sweep in order of lr, with what is common to them.

    Attributes:
        points: one per learning rate.
        noise_free: every trial saw the full batch in every step.
        memory: momentum or beta1 of the optimizer.
        loss_ref: loss of the initial model, mean over the seeds.
        chance: loss of the best constant output, None where unknown.
        progress: what the best trial learned: how far it came below the initial model, or below chance where that is lower.
        learned: some lr learned something: its progress, or its lead over a smaller lr, stands out of the noise.
        total_steps: length of the trials.
    """

    points: tuple[LRPoint, ...]
    noise_free: bool
    memory: float
    loss_ref: float
    progress: float
    learned: bool
    total_steps: int
    chance: float | None = None

    @property
    def lowest(self) -> int | None:
        """Index of the lowest objective among the lrs that are not unstable, on the seeds that they share."""
        usable = [i for i, p in enumerate(self.points) if math.isfinite(p.loss) and not p.unstable]
        if not usable:
            return None
        shared = set.intersection(*(set(self.points[i].seeds) for i in usable))
        return min(usable, key=lambda i: _mean_over(self.points[i], shared))

    @property
    def best(self) -> int | None:
        """The same, or None when no lr makes progress: then the lowest objective is a matter of chance."""
        return self.lowest if self.learned else None

    @property
    def level(self) -> float:
        """The loss of knowing nothing: that of the initial model, or chance where that is lower."""
        return ignorance(self.loss_ref, self.chance)

    @property
    def loss_scale(self) -> float:
        """What relative differences refer to: the best loss, or what was learned where that is smaller."""
        lowest = min((p.loss for p in self.points if math.isfinite(p.loss)), default=math.nan)
        fitted = lowest == 0 and not self.noise_free  # to the last example: differences are what they are
        return min(self.progress, lowest) if lowest > 0 or fitted else self.progress


def _mean_over(point: LRPoint, seeds: set[int]) -> float:
    chosen = [v for s, v in zip(point.seeds, point.losses, strict=True) if not seeds or s in seeds]
    return float(np.mean(chosen))


def objective(curve: TrialCurve, *, tail_frac: float = 0.1) -> float:
    """Return the mean training loss of the last tenth of the steps at full length; infinite for a diverged run.

    Never the best loss so far (biased downwards by noise) nor the last value alone.

    Args:
        tail_frac: share of the steps averaged.
    """
    return math.inf if curve.diverged else float(np.mean(curve.loss[-_tail(curve, tail_frac) :]))


def _tail(curve: TrialCurve, tail_frac: float) -> int:
    return max(1, round(tail_frac * curve.total_steps))


def paired_difference(
    one: TrialCurve, other: TrialCurve, *, tail_frac: float = 0.1, blocks: int = 8
) -> tuple[float, float]:
    """Return the mean of `one - other` over the last steps, and its standard error.

    Two trials with the same seed see the same batches, so the batches' noise cancels. The standard error comes from
    the means of blocks, because neighbouring steps are correlated, around their straight line, because a trend is no
    noise. It is 0 for full batches.

    Args:
        other: another of the same length.
        tail_frac: share of the steps compared.
        blocks: blocks the steps are cut into (rule of thumb).
    """
    if one.diverged or other.diverged:
        return (0.0 if other.diverged else math.inf) if one.diverged else -math.inf, 0.0
    n = _tail(one, tail_frac)
    difference = one.loss[-n:] - other.loss[-n:]
    free = one.full_batch and other.full_batch
    return float(np.mean(difference)), 0.0 if free else _mean_se(difference, blocks)


def _mean_se(values: FloatArray, blocks: int) -> float:
    count = min(blocks, values.size)
    if count < 3:
        return math.nan
    scale = float(np.max(np.abs(values))) or 1.0
    means = np.array([(part / scale).mean() for part in np.array_split(values, count)])
    place = np.arange(count) - (count - 1) / 2
    residual = means - means.mean() - place * (place @ means) / (place @ place)
    return scale * math.sqrt(float(residual @ residual) / (count - 2) / count)


def mean_and_error(parts: Sequence[FloatArray], *, blocks: int = 8) -> tuple[float, float]:
    """Return the mean of some stretches of training loss, one a seed, and its standard error, free of their trends.

    Args:
        parts: of one length, shape (steps,) each.
    """
    errors = [_finite_or_zero(_mean_se(part, blocks)) for part in parts]
    return float(np.mean([np.mean(part) for part in parts])), math.hypot(*errors) / len(errors)


def sweep_of_curves(
    full_length: Sequence[TrialCurve], *, tail_frac: float = 0.1, blocks: int = 8, noise_sds: float = 4.0
) -> SweepTable:
    """Return the sweep's points, one a learning rate.

    Args:
        full_length: finished trials of one config but for the learning rate and the seeds.
        tail_frac: share of the steps that the objective averages.
        noise_sds: standard errors that what was learned must stand out by (rule of thumb).
    """
    peers = _first_of_each(full_length)
    verdicts = judge(peers, peers)
    groups = _by_lr(verdicts)
    points = tuple(_point(group, lr_star=None, tail_frac=tail_frac, blocks=blocks) for group in groups)
    table = _table(points, peers)
    best = table.lowest
    if best is None:
        return table
    star = points[best].lr
    points = tuple(_point(group, lr_star=star, tail_frac=tail_frac, blocks=blocks) for group in groups)
    points = _with_differences(points, groups, best, tail_frac=tail_frac, blocks=blocks)
    curves = [item.curve for item in groups[best]]
    table = replace(table, points=points)
    return replace(table, learned=_learned(table, best, curves, _start_noise(peers), noise_sds))


def _learned(table: SweepTable, best: int, curves: Sequence[TrialCurve], start_noise: float, noise_sds: float) -> bool:
    """Tell whether the best lr came below the loss of knowing nothing by more than the noise of the last steps.

    Where chance is below the initial loss it is known without noise, and the second half of the run, which sees more
    examples than its end, tells as well. Else the lead over a smaller lr does, on minibatches.
    """
    se = max(_finite_or_zero(table.points[best].loss_se), 4 * float(np.finfo(np.float32).eps) * abs(table.level))
    if table.level < table.loss_ref:
        later, error = mean_and_error([c.loss[c.total_steps // 2 :] for c in curves])
        below = not table.noise_free and table.level - later > noise_sds * max(error, se / 4)
        return table.progress > noise_sds * se or below
    worse_below = any(
        p.above_best > max(noise_sds * _finite_or_zero(p.above_best_se), 0.0) for p in table.points[:best]
    )
    lead = table.progress > 0 and not table.noise_free and worse_below
    return table.progress > noise_sds * math.hypot(start_noise, se) or lead


def _first_of_each(curves: Sequence[TrialCurve]) -> list[TrialCurve]:
    """Keep one trial for each lr and seed: the same run twice is no second opinion."""
    kept: dict[tuple[str, int], TrialCurve] = {}
    for curve in curves:
        kept.setdefault((f"{curve.lr:.9e}", curve.seed), curve)
    return list(kept.values())


def _by_lr(verdicts: Sequence[TrialVerdict]) -> list[list[TrialVerdict]]:
    groups: dict[str, list[TrialVerdict]] = {}
    for item in sorted(verdicts, key=lambda v: (v.curve.lr, v.curve.seed)):
        groups.setdefault(f"{item.curve.lr:.9e}", []).append(item)
    return list(groups.values())


def _point(group: Sequence[TrialVerdict], *, lr_star: float | None, tail_frac: float, blocks: int) -> LRPoint:
    losses = tuple(objective(v.curve, tail_frac=tail_frac) for v in group)
    finite = [v for v in losses if math.isfinite(v)]
    own = [_mean_se(v.curve.loss[-_tail(v.curve, tail_frac) :], blocks) for v in group if not v.curve.diverged]
    within = 0.0 if group[0].curve.full_batch else math.hypot(*own) / max(1, len(own))
    between = _spread(finite) / math.sqrt(len(finite)) if len(finite) > 1 else 0.0
    return LRPoint(
        lr=group[0].curve.lr,
        loss=float(np.mean(losses)),
        loss_se=max(within, between),
        seeds=tuple(v.curve.seed for v in group),
        losses=losses,
        outcomes=tuple(v.verdict.outcome for v in group),
        lasting=sum(v.is_lasting(lr_star) for v in group),
        trials=tuple(v.curve.trial for v in group),
    )


def _with_differences(
    points: tuple[LRPoint, ...], groups: Sequence[Sequence[TrialVerdict]], best: int, *, tail_frac: float, blocks: int
) -> tuple[LRPoint, ...]:
    """Add each point's paired difference to the best; the spread over seeds is pooled over the lrs near the best."""
    reference = {v.curve.seed: v.curve for v in groups[best]}
    pairs: list[list[tuple[float, float]]] = []
    for group in groups:
        shared = [(v.curve, reference[v.curve.seed]) for v in group if v.curve.seed in reference]
        pairs.append([paired_difference(a, b, tail_frac=tail_frac, blocks=blocks) for a, b in shared])
    star = points[best].lr
    spreads = [
        _spread([d for d, _ in found])
        for point, found in zip(points, pairs, strict=True)
        if 0.25 <= point.lr / star <= 4 and point.lr != star and len(found) > 1 and math.isfinite(point.loss)
    ]
    pooled = float(np.median(spreads)) if spreads and not groups[best][0].curve.full_batch else 0.0
    done = []
    for k, (point, found) in enumerate(zip(points, pairs, strict=True)):
        if not found:
            mean, se = point.loss - points[best].loss, math.hypot(point.loss_se, points[best].loss_se)
        else:
            mean = float(np.mean([d for d, _ in found]))
            within = math.hypot(*(s for _, s in found)) / len(found)
            se = 0.0 if k == best else max(within, pooled / math.sqrt(len(found)))
        done.append(replace(point, above_best=mean, above_best_se=se))
    return tuple(done)


def _table(points: tuple[LRPoint, ...], peers: Sequence[TrialCurve]) -> SweepTable:
    starts = initial_losses(peers)
    loss_ref = float(np.mean(list(starts.values()))) if starts else math.nan
    finite = [p.loss for p in points if math.isfinite(p.loss)]
    return SweepTable(
        points=points,
        noise_free=bool(peers) and all(c.full_batch for c in peers),
        memory=peers[0].memory if peers else 0.0,
        loss_ref=loss_ref,
        progress=ignorance(loss_ref, peers[0].chance) - min(finite) if finite else 0.0,
        learned=False,
        total_steps=peers[0].total_steps if peers else 0,
        chance=peers[0].chance if peers else None,
    )


def _start_noise(peers: Sequence[TrialCurve]) -> float:
    """Return the standard error of the initial loss, mean over the seeds."""
    found = []
    for curve in peers:
        head = curve.loss[: max(10, curve.total_steps // 10)]
        head = head[np.isfinite(head)]
        if head.size:
            found.append(float(noise_per_step(head, curve.loss_se, full_batch=curve.full_batch)[0]))
    return min(found, default=0.0) / math.sqrt(max(1, len({c.seed for c in peers})))


def _finite_or_zero(value: float) -> float:
    return value if math.isfinite(value) else 0.0


def _spread(values: Sequence[float]) -> float:
    """Return the sample standard deviation, without overflow for the huge losses of unstable runs."""
    scale = max(map(abs, values)) or 1.0
    return scale * float(np.std(np.asarray(values) / scale, ddof=1))
