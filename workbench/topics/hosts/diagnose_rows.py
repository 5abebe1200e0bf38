"""What the hosts wrote of the same updates, side by side: parameters, gradients before and after clipping."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from workbench.topics.hosts.diagnose_area import training_passes

__all__ = [
    "changed_apart",
    "clipped_before_averaging",
    "clips_of",
    "differ",
    "drift_of",
    "local_gradients",
    "row_of",
    "same",
    "seen_by_all",
    "sharded",
    "values_of",
]

Ranks = Sequence[Mapping[str, Any]]


def row_of(rows: Sequence[Mapping[str, Any]], optimizer: int, step: int) -> Mapping[str, Any] | None:
    """Return what was seen before an update of an optimizer."""
    return next((row for row in rows if row["optimizer"] == optimizer and row["step"] == step), None)


def sharded(ranks: Ranks) -> bool:
    """Tell whether each host holds a part of the parameters by design."""
    return any(w.get("sharded") for r in ranks for w in r["wrappers"]) or any(
        p["sharded"] for r in ranks for p in r["parameters"]
    )


def _together(ranks: Ranks) -> float:
    """Return the step from which update k of one host is not that of the others: with uneven inputs, where the first data end."""
    if len({r["steps"] for r in ranks}) < 2:
        return math.inf
    ends = [p["steps"][1] for r in ranks for p in training_passes(r)[:1]]
    return max(1, min(*ends, *(r["steps"] for r in ranks))) if ends else 1


def seen_by_all(ranks: Ranks, kind: str) -> list[tuple[int, int]]:
    """Return step and optimizer of the updates of which every host wrote something, in "parameters" or "gradients"."""
    last = _together(ranks)
    keys = [{(row["step"], row["optimizer"]) for row in r[kind] if row["step"] < last} for r in ranks]
    return sorted(set.intersection(*keys)) if keys else []


def clips_of(ranks: Ranks) -> dict[int, list[Mapping[str, Any]]]:
    """Return what each host clips; a norm that nothing exceeds only measures."""
    last = _together(ranks)
    return {
        r["rank"]: [c for c in r["clips"] if c["limit"] not in ("inf", math.inf) and c["step"] < last] for r in ranks
    }


def differ(ranks: Ranks, kind: str, key: tuple[int, int], field: str) -> bool:
    """Tell whether a field is not the same on all hosts."""
    step, optimizer = key
    rows = (row_of(r[kind], optimizer, step) for r in ranks)
    return len({row[field] for row in rows if row is not None}) > 1


def local_gradients(ranks: Ranks) -> list[int]:
    """Return the updates whose gradients differ between hosts, before any clipping and after it."""
    return [
        key[0] for key in seen_by_all(ranks, "gradients")
        if all(differ(ranks, "gradients", key, field) for field in ("before_clip", "at_step"))
        and not same(ranks, key, "after_backward")
    ]  # fmt: skip


def same(ranks: Ranks, key: tuple[int, int], field: str) -> bool:
    """Tell whether something was seen of an update's gradient on all hosts, and was the same."""
    values = values_of(ranks, key, field)
    return None not in values and len(set(values)) == 1


def values_of(ranks: Ranks, key: tuple[int, int], field: str) -> list[str | None]:
    """Return a field of an update's gradient, by host; None where it was not seen."""
    step, optimizer = key
    rows = (row_of(r["gradients"], optimizer, step) for r in ranks)
    return [row.get(field) for row in rows if row is not None]


def changed_apart(ranks: Ranks) -> int | None:
    """Return the first update whose gradient was the same after backward and differs when it is used, and not by torch's clipping."""
    for key in seen_by_all(ranks, "gradients"):
        apart = all(differ(ranks, "gradients", key, field) for field in ("before_clip", "at_step"))
        if apart and same(ranks, key, "after_backward"):
            return key[0]
    return None


def clipped_before_averaging(ranks: Ranks) -> int | None:
    """Return the first update whose gradients differed when they were clipped, and not any more when they were used."""
    for key in seen_by_all(ranks, "gradients"):
        if differ(ranks, "gradients", key, "before_clip") and not differ(ranks, "gradients", key, "at_step"):
            return key[0]
    return None


def drift_of(ranks: Ranks) -> int | None:
    """Return the first update before which parameters differ for no reason that has a code of its own."""
    clips = clips_of(ranks).values()
    if (
        len({len(found) for found in clips}) > 1
        or len({str(sorted({str(c["limit"]) for c in found})) for found in clips}) > 1
    ):
        return None
    if changed_apart(ranks) is not None:
        return None
    steps = [key for key in seen_by_all(ranks, "parameters") if differ(ranks, "parameters", key, "hash")]
    return steps[0][0] if steps and steps[0][0] > 0 else None
