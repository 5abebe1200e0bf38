"""How large an evaluation sample has to be, and how large it may be: both bounds, or that no size keeps both (P3.3, P3.4)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from workbench.curves.trials import RecordLike
from workbench.topics.evaluation.detectable import detectable_difference, examples_needed
from workbench.topics.evaluation.selection_gap import selection_gap

__all__ = ["SizeBounds", "evaluation_sizes", "how_models_differ", "largest_within", "seconds_of", "size_bounds"]

Facts = Mapping[str, Any]


class SizeBounds(NamedTuple):
    """What is asked of the size of an evaluation sample.

    Attributes:
        available: examples of the full set.
        largest: examples that the time budget allows, 0 where not even one batch fits; None without a budget.
        smallest: examples that show the smallest difference of interest; None where none was given.
        proposed: the size to take: the largest that is allowed. None where nothing can be evaluated in time.
        feasible: whether that size keeps both bounds.
        reason: why not, in numbers; None where it is feasible.
    """

    available: int
    largest: int | None
    smallest: int | None
    proposed: int | None
    feasible: bool
    reason: str | None


def seconds_of(n: float, timing: Facts) -> float:
    """Return the seconds that one evaluation of `n` examples takes: a line, which is too low for less than one batch.

    Args:
        n: examples.
        timing: start_s of an evaluation, and seconds_per_example behind it.
    """
    return float(timing["start_s"]) + n * float(timing["seconds_per_example"])


def largest_within(budget_s: float, timing: Facts, available: int) -> int:
    """Return how many examples can be evaluated in `budget_s`: at most all, and 0 where not even one batch can.

    Args:
        budget_s: seconds for one evaluation.
        timing: start_s, seconds_per_example and batch_size.
        available: examples of the full set.
    """
    if seconds_of(min(int(timing["batch_size"]), available), timing) > budget_s:
        return 0
    left = (budget_s - float(timing["start_s"])) / max(float(timing["seconds_per_example"]), 1e-12)
    return int(min(available, left + 1e-9))


def how_models_differ(facts: Facts) -> dict[str, Any]:
    """Return the argument of `detectable_difference` that the measured pair of models gives; {} where nothing is known.

    Args:
        facts: "evaluation_sample" of a study.
    """
    pair = facts.get("pair") or {}
    for name, key in (("disagreement", "disagreement"), ("sd", "difference_sd")):
        if pair.get(key) is not None:
            return {name: float(pair[key])}
    return {}


def size_bounds(facts: Facts, *, false_alarm: float = 0.05, power: float = 0.8) -> SizeBounds:
    """Return both bounds and the size to take.

    Args:
        facts: "evaluation_sample" of a study: examples, asked, timing, pair, num_classes.
        false_alarm: of the comparison of two models.
        power: of it.
    """
    available, asked = int(facts["examples"]), facts.get("asked") or {}
    budget, difference = asked.get("budget_s"), asked.get("smallest_difference")
    timing = facts.get("timing")
    largest = largest_within(budget, timing, available) if budget is not None and timing else None
    differ = how_models_differ(facts)
    smallest = None
    if difference is not None and differ:
        smallest = examples_needed(difference, **differ, **_noise(facts), false_alarm=false_alarm, power=power)
    allowed = available if largest is None else largest
    reasons = []
    if timing and largest == 0:
        batch = min(int(timing["batch_size"]), available)
        reasons.append(
            f"one batch of {batch} example{'' if batch == 1 else 's'} takes {seconds_of(batch, timing):.3g} s, and the budget is {budget:g} s"
        )
    elif smallest is not None and smallest > allowed:
        within = f"{budget:g} s allow {allowed} of them" if allowed < available else f"there are {available}"
        reasons.append(
            f"a difference of {difference:g} takes {smallest} example{'' if smallest == 1 else 's'}, and {within}"
        )
    return SizeBounds(
        available=available, largest=largest, smallest=smallest, proposed=allowed or None, feasible=not reasons,
        reason="; ".join(reasons) or None,
    )  # fmt: skip


def evaluation_sizes(
    record: RecordLike | Facts,
    sizes: Sequence[int] | None = None,
    *,
    comparisons: int = 100,
    false_alarm: float = 0.05,
    power: float = 0.8,
) -> pd.DataFrame:
    """Return for sizes of the sample what an evaluation costs and shows.

    Args:
        record: a study with "evaluation_sample" in its facts, or these facts.
        sizes: numbers of examples; None is a grid from 10 to ten times the full set.
        comparisons: models that are compared on the set, of which the best is taken (P3.5).
        false_alarm: how often two equal models are called different.
        power: how often a difference is found.

    Returns:
        Columns examples, seconds (of one evaluation), detectable (the smallest difference that shows, both models on the
        same examples), unpaired (each on its own; a metric of zeros and ones only), selection_gap (by how much the best of
        `comparisons` equal models looks better than it is), available (whether the full set is that large) and affordable
        (whether the budget allows it, however large the set is). Unknown values are NaN.

    Source: P3.3, P3.4, P3.5.
    """
    facts: Facts = record if isinstance(record, Mapping) else record.facts.get("evaluation_sample") or {}
    if not facts:
        return pd.DataFrame(columns=_COLUMNS)
    available = int(facts["examples"])
    grid = sizes or sorted({*(round(v) for v in np.geomspace(min(10, available), 10 * available, 31)), available})
    bounds = size_bounds(facts, false_alarm=false_alarm, power=power)
    level: dict[str, Any] = {"false_alarm": false_alarm, "power": power}
    return pd.DataFrame([_row(n, facts, bounds, comparisons, level) for n in grid], columns=_COLUMNS)


_COLUMNS = ["examples", "seconds", "detectable", "unpaired", "selection_gap", "available", "affordable"]


def _row(n: int, facts: Facts, bounds: SizeBounds, comparisons: int, level: dict[str, Any]) -> dict[str, Any]:
    differ, timing, pair = how_models_differ(facts), facts.get("timing"), facts.get("pair") or {}
    own, budget = differ.get("sd", math.nan) / math.sqrt(2), (facts.get("asked") or {}).get("budget_s")
    if (
        "disagreement" in differ
    ):  # two models that agree on all examples do so by chance: as if they differed on half of one
        own = math.sqrt(max(differ["disagreement"], 0.5 / bounds.available) / 2)
    values = pair.get("values") or [None]
    alone = values[0] if pair.get("disagreement") is not None else None
    return {
        "examples": n,
        "seconds": seconds_of(n, timing) if timing else math.nan,
        "detectable": detectable_difference(n, **differ, **_noise(facts), **level) if differ else math.nan,
        "unpaired": math.nan if alone is None else detectable_difference(n, accuracy=alone, **_noise(facts), **level),
        "selection_gap": math.nan if math.isnan(own) else selection_gap(n, comparisons, sd=own),
        "available": n <= bounds.available,
        "affordable": budget is None or not timing or n <= largest_within(float(budget), timing, max(n, bounds.available)),
    }  # fmt: skip


def _noise(facts: Facts) -> dict[str, Any]:
    """Return label noise and classes where the metric is one of zeros and ones, {} elsewhere."""
    noise = float((facts.get("asked") or {}).get("label_noise") or 0.0)
    if not noise or (facts.get("pair") or {}).get("disagreement") is None:
        return {}
    return {"label_noise": noise, "classes": int(facts.get("num_classes") or 2)}
