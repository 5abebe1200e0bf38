"""Which two models a diagnosis compares on the validation set: baseline and candidate, or two seeds of the baseline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from workbench.curves.same_config import trials_with
from workbench.curves.trials import RecordLike
from workbench.record.roles import Role
from workbench.topics.recommendation.diagnose import config_of

__all__ = ["Compared", "compared_pairs"]


class Compared(NamedTuple):
    """Pairs of trials, one a seed.

    Attributes:
        what: how they differ, in words.
        pairs: (trial, other trial); the other is None where there is nothing to compare with.
    """

    what: str
    pairs: list[tuple[int, int | None]]


def compared_pairs(record: RecordLike, found: Mapping[str, Any]) -> Compared:
    """Return the pairs of trials whose difference on the validation set decides what is recommended.

    Baseline and best candidate under the same seeds, fresh ones where the candidate was proved; without a candidate the
    baseline under two seeds, or else beside the next best learning rate of its sweep.

    Args:
        record: a study with a baseline.
        found: what `screen` said of it.
    """
    fields = record.config
    ours = _by_seed(record, trials_with(record, fields))
    if not ours:
        return Compared("nothing", [])
    own = int(fields["shared_seed"])
    first = ours.get(own, next(iter(ours.values())))
    if found["candidate"] is not None:
        theirs = _by_seed(record, trials_with(record, config_of(record, found["recommended"]["trials"][0])))
        shared = sorted(ours.keys() & theirs.keys())
        fresh = [seed for seed in shared if seed != own]
        pairs: list[tuple[int, int | None]] = [(ours[seed], theirs[seed]) for seed in fresh or shared]
        if pairs:
            return Compared(f"baseline and {found['candidate']}", pairs)
    others = [trial for trial in ours.values() if trial != first]
    if others:
        return Compared("the baseline under two seeds", [(first, others[0])])
    return Compared("the baseline and the next best lr of its sweep", [(first, _next_best(record, first))])


def _next_best(record: RecordLike, first: int) -> int | None:
    """Return the trial of the sweep, as long as the baseline's, whose selected checkpoint is best; None without one."""
    trials = record.trials
    rows = trials[(trials["stage"] == Role.LR_SWEEP) & (trials["total_steps"] == record.config["total_steps"])]
    rows = rows[rows["trial"] != first].dropna(subset=["best_value"])
    if rows.empty:
        return None
    rows = rows.sort_values("best_value", ascending=record.config["select_mode"] == "min")
    return int(rows["trial"].iloc[0])


def _by_seed(record: RecordLike, numbers: list[int]) -> dict[int, int]:
    seeds = dict(zip(record.trials["trial"].tolist(), record.trials["seed"].tolist(), strict=True))
    return dict(sorted((int(seeds[number]), int(number)) for number in reversed(numbers)))
