"""What a study of batch sizes trained: as it is and retuned, at equal steps and at equal examples (F6.2, F6.3, F6.7)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from workbench.curves.judged import trials_with
from workbench.curves.selection import selected_by_seed
from workbench.curves.trial_curves import RecordLike, equal, memory_field, plain_cell

EQUAL = ("steps", "examples")

_TUNED = ("peak_lr", "momentum", "beta1")
_FOLLOWS = (
    "batch_size", "total_steps", "warmup_steps", "eval_every_steps", "checkpoint_every_steps", "eval_batch_size",
    "shared_seed", "per_host_seed",
)  # fmt: skip


class Tuned(NamedTuple):
    """One point of a search: the settings that were tried and the selected metric, under the seeds that choose.

    Attributes:
        memory: momentum, or beta1; 0 for a rule without either.
        value: selected metric, mean over the choosing seeds; inf (or -inf where larger is better) where one was not finite.
        seeds: how many choosing seeds it was trained under.
    """

    lr: float
    memory: float
    value: float
    seeds: int


@dataclass(kw_only=True)
class BatchArm:
    """One batch size at one number of steps.

    Attributes:
        points: what was tried with it under the seeds that choose, the baseline's own settings among them.
        sign: 1 where a smaller metric is better, else -1.
        warmup_steps: of its trials; a share of the run, so another number for another length.
        fixed, tuned: fresh seed -> selected metric, with the baseline's own settings and with the best ones.
    """

    batch_size: int
    total_steps: int
    points: tuple[Tuned, ...]
    sign: float
    warmup_steps: int
    fixed: Mapping[int, float] = field(default_factory=dict)
    tuned: Mapping[int, float] = field(default_factory=dict)

    @property
    def examples(self) -> int:
        """Examples seen in all."""
        return self.batch_size * self.total_steps

    @property
    def best(self) -> Tuned | None:
        """The point with the best selected metric among those with the most choosing seeds, None where none was finite."""
        return next(iter(self.ranked), None)

    @property
    def ranked(self) -> list[Tuned]:
        """The points with a finite metric, best first; one more choosing seed goes before a better metric."""
        finite = [point for point in self.points if math.isfinite(point.value)]
        return sorted(finite, key=lambda point: (-point.seeds, self.sign * point.value))

    @property
    def at_edge(self) -> bool:
        """Whether the best lr is the smallest or the largest that was tried with its memory."""
        best = self.best
        lrs = [p.lr for p in self.points if best is not None and math.isclose(p.memory, best.memory)]
        return best is not None and best.lr in (min(lrs), max(lrs))

    def settings(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of a config that this arm was tuned by, with their best values."""
        memory = memory_field(config["optimizer"])
        assert self.best is not None
        found = {"batch_size": self.batch_size, "total_steps": self.total_steps, "peak_lr": self.best.lr}
        return found | ({memory: self.best.memory} if memory else {})


def read_arms(record: RecordLike) -> list[BatchArm]:
    """Return every batch size and number of steps that was trained with nothing else but lr and memory changed, in their order.

    Trials with a weight decay, clipping or anything else of their own are no part of it.
    """
    own = dict(record.config)
    same = [name for name in own if name not in (*_TUNED, *_FOLLOWS)]
    arms: dict[tuple[int, int], list[Mapping[Any, Any]]] = {}
    for row in record.trials.to_dict("records"):
        if all(equal(plain_cell(row[name]), own[name]) for name in same if name in row):
            arms.setdefault((int(row["batch_size"]), int(row["total_steps"])), []).append(row)
    return [_arm(record, rows, *key) for key, rows in sorted(arms.items())]


def comparable(arms: Sequence[BatchArm], own: BatchArm, equal: str) -> list[BatchArm]:
    """Return the baseline's arm, and those of other batch sizes with as many "steps" or "examples"; to 5 %, as steps are whole."""
    name = {"steps": "total_steps", "examples": "examples"}[equal]
    others = [arm for arm in arms if arm.batch_size != own.batch_size]
    return [own, *(arm for arm in others if math.isclose(getattr(arm, name), getattr(own, name), rel_tol=0.05))]


def choosing_seeds(record: RecordLike) -> list[int]:
    """Return the seeds by which settings are chosen; what is compared was trained under others."""
    count = int((record.facts.get("batch_size") or {}).get("choosing_seeds", 1))
    return [int(record.config["shared_seed"]) + k for k in range(count)]


def _arm(record: RecordLike, rows: Sequence[Mapping[Any, Any]], batch_size: int, total_steps: int) -> BatchArm:
    own, sign = dict(record.config), 1.0 if record.config["select_mode"] == "min" else -1.0
    memory, choosing = memory_field(own["optimizer"]), choosing_seeds(record)
    tried: dict[tuple[float, float], list[float]] = {}
    for row in rows:
        seed = int(row["seed"])
        if seed in choosing and row["state"] in ("complete", "diverged"):
            found = selected_by_seed(record, [int(row["trial"])]) if row["state"] == "complete" else {}
            key = (float(row["peak_lr"]), float(row[memory]) if memory else 0.0)
            tried.setdefault(key, []).append(found.get(seed, sign * math.inf))
    points = tuple(Tuned(*key, sum(values) / len(values), len(values)) for key, values in sorted(tried.items()))
    warmup = int(rows[0].get("warmup_steps", own["warmup_steps"]))
    arm = BatchArm(batch_size=batch_size, total_steps=total_steps, points=points, sign=sign, warmup_steps=warmup)
    seeds = {int(row["trial"]): int(row["seed"]) for row in rows if int(row["seed"]) not in choosing}
    fixed = {name: own[name] for name in _TUNED} | {"batch_size": batch_size, "total_steps": total_steps}

    def fresh(settings: Mapping[str, Any]) -> dict[int, float]:
        """Return the selected metric of the seeds that had no part in the choice; NaN for a trial that has none."""
        numbers = [number for number in trials_with(record, settings) if number in seeds]
        values = selected_by_seed(record, numbers)
        return {seeds[number]: values.get(seeds[number], math.nan) for number in numbers}

    arm.fixed, arm.tuned = fresh(fixed), fresh(fixed | arm.settings(own)) if arm.best else {}
    return arm


def next_points(
    tried: Mapping[float, float], centre: float, *, ratio: float, reach: int, sign: float = 1.0
) -> list[float]:
    """Return the learning rates to try next, until the best of a geometric grid has a worse neighbour on both sides.

    The grid is centre * ratio**k with |k| up to `reach`; `tried` holds the selected metric, inf where nothing was
    finite, and `sign` is 1 where a smaller one is better, else -1. The first three come at first, later one beyond the best.
    """
    first = [centre * ratio**k for k in (-1, 0, 1)]
    missing = [lr for lr in first if not any(math.isclose(lr, known, rel_tol=1e-9) for known in tried)]
    if missing:
        return missing
    places = {lr: math.log(lr / centre, ratio) for lr in tried}
    steps = {round(k): tried[lr] for lr, k in places.items() if abs(k - round(k)) < 1e-6}
    finite = {k: sign * v for k, v in steps.items() if math.isfinite(v)}
    if not finite:  # nothing trained: the way out is down
        lowest = min(steps) - 1
        return [centre * ratio**lowest] if lowest >= -reach else []
    best = min(finite, key=lambda k: finite[k])
    return [centre * ratio**k for k in (best - 1, best + 1) if k not in steps and abs(k) <= reach]
