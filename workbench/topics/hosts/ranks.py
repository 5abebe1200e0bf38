"""What the ranks of a job wrote, side by side: passes over data, parameters, gradients before and after clipping; and the codes of `hosts`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from workbench.findings.finding import Codes

CODES = Codes({
    "hosts.init_seed": "P7.5", "hosts.data_seed": "P7.6", "hosts.set_epoch": "P7.6", "hosts.sharding": "P7.4", "hosts.writers": "P7.2",
    "hosts.checkpoint_writers": "P7.2", "hosts.evaluation": "P7.1", "hosts.buffers": "P7.3", "hosts.clip": "P7.1",
    "hosts.straggler": "P7.1", "hosts.not_wrapped": "P7.1",
})  # fmt: skip
Rank = Mapping[str, Any]
Ranks = Sequence[Rank]
"""The facts of every rank."""


def named(ranks: Iterable[int]) -> str:
    """Return "rank 1", "ranks 0 and 2", "ranks 0, 1 and 3"."""
    words = [str(rank) for rank in sorted(ranks)]
    if len(words) == 1:
        return f"rank {words[0]}"
    return f"ranks {', '.join(words[:-1])} and {words[-1]}"


def training_passes(rank: Rank) -> list[Rank]:
    """Return the passes over loaders in which updates were made."""
    return [p for p in rank["passes"] if p["grad"] and p["steps"][1] > p["steps"][0]]


def evaluation_passes(rank: Rank) -> list[Rank]:
    """Return the passes over loaders in which nothing was trained."""
    return [p for p in rank["passes"] if p["grad"] is False or (p["exhausted"] and p["steps"][1] == p["steps"][0])]


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


def values_of(ranks: Ranks, key: tuple[int, int], field: str, kind: str = "gradients") -> list[str | None]:
    """Return a field of an update's gradient, or of its parameters, by rank; None where it was not seen."""
    step, optimizer = key
    rows = (row_of(r[kind], optimizer, step) for r in ranks)
    return [row.get(field) for row in rows if row is not None]


def same(ranks: Ranks, key: tuple[int, int], field: str) -> bool:
    """Tell whether something was seen of an update's gradient on all ranks, and was the same."""
    values = values_of(ranks, key, field)
    return None not in values and len(set(values)) == 1


def _differ(ranks: Ranks, key: tuple[int, int], *fields: str) -> bool:
    return all(len(set(values_of(ranks, key, field))) > 1 for field in fields)


def local_gradients(ranks: Ranks) -> list[int]:
    """Return the updates whose gradients differ between ranks, before any clipping and after it."""
    keys = seen_by_all(ranks, "gradients")
    return [k[0] for k in keys if _differ(ranks, k, "before_clip", "at_step") and not same(ranks, k, "after_backward")]


def changed_apart(ranks: Ranks) -> int | None:
    """Return the first update whose gradient was the same after backward and differs when it is used, and not by torch's clipping."""
    keys = seen_by_all(ranks, "gradients")
    apart = (k[0] for k in keys if _differ(ranks, k, "before_clip", "at_step") and same(ranks, k, "after_backward"))
    return next(apart, None)


def clipped_before_averaging(ranks: Ranks) -> int | None:
    """Return the first update whose gradients differed when they were clipped, and not any more when they were used."""
    keys = seen_by_all(ranks, "gradients")
    early = (k[0] for k in keys if _differ(ranks, k, "before_clip") and not _differ(ranks, k, "at_step"))
    return next(early, None)


def drift_of(ranks: Ranks) -> int | None:
    """Return the first update before which parameters differ for no reason that has a code of its own."""
    clips = clips_of(ranks).values()
    counts, limits = {len(found) for found in clips}, {str(sorted({str(c["limit"]) for c in found})) for found in clips}
    if len(counts) > 1 or len(limits) > 1 or changed_apart(ranks) is not None:
        return None
    keys = seen_by_all(ranks, "parameters")
    first = next(
        (step for step, number in keys if len(set(values_of(ranks, (step, number), "hash", "parameters"))) > 1), 0
    )
    return first if first > 0 else None
