"""`trials_with`: the trials of a study that were trained with one config, whatever their seed."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from workbench.curves.trials import FREE_FIELDS, RecordLike

__all__ = ["equal", "own_trials", "plain_cell", "trials_with"]

_SEEDS = ("shared_seed", "per_host_seed")


def trials_with(record: RecordLike, fields: Mapping[str, Any], *, seeds: Collection[int] | None = None) -> list[int]:
    """Return the numbers of the trials that were trained with these config fields, in the order of their seeds.

    Args:
        record: a study.
        fields: of the config; those that are left out, and the seeds, may be anything.
        seeds: only these; None takes any.
    """
    if not len(record.trials):
        return []
    wanted = {name: value for name, value in fields.items() if name not in _SEEDS}
    rows = [row for row in record.trials.to_dict("records") if seeds is None or int(row["seed"]) in seeds]
    same = [row for row in rows if all(equal(plain_cell(row[n]), v) for n, v in wanted.items())]
    return [int(row["trial"]) for row in sorted(same, key=lambda row: int(row["seed"]))]


def own_trials(record: RecordLike) -> list[int]:
    """Return the numbers of the trials that a person would call theirs: the record's own config, under any seed, however evaluated."""
    fixed = {name: value for name, value in record.config.items() if name not in FREE_FIELDS - {"peak_lr"}}
    return trials_with(record, {name: value for name, value in fixed.items() if name in record.trials})


def plain_cell(value: Any) -> Any:
    """Return a cell of a frame as the config had it: pandas writes None as NaN."""
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and math.isnan(value) else value


def equal(one: Any, other: Any) -> bool:
    """Whether two config values are the same, numbers to rounding."""
    if isinstance(one, (int, float)) and isinstance(other, (int, float)):
        return math.isclose(one, other, rel_tol=1e-9)
    return bool(one == other)
