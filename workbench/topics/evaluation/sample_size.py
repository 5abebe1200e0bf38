"""What an evaluation set of n examples can show, how far choosing on it flatters, and how large it may be (P3.3, P3.4, P3.5).

Two models on the same examples (paired) differ where exactly one of them is right: the share of those examples is their
disagreement D. With a the normal quantile of 1 - false_alarm / 2 and b that of the power, McNemar's test sees a difference d in
accuracy where sqrt(n) d = a sqrt(D) + b sqrt(D - d^2) (Connor 1987, Biometrics 43). Labels that are wrong with probability e,
spread evenly over the other classes of K, shrink every difference in accuracy to the share 1 - e K / (K - 1) of itself, while the noise stays.

Of k models that are equally good the best one on n examples looks better than it is by the expected maximum of k noisy draws.
Where the models differ in truth by a spread t, and in noise by s, the winner's gap is e(k) s^2 / sqrt(s^2 + t^2), with e(k) the
expected maximum of k standard normal draws. Rounds that build on each other are worse: each small random change that looks better is
kept, and the gap adds up.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy import stats

from workbench.curves.selection import expected_maximum
from workbench.curves.trial_curves import RecordLike
from workbench.errors import ConfigError

Facts = Mapping[str, Any]


def detectable_difference(
    n: float,
    *,
    disagreement: float | None = None,
    accuracy: float | None = None,
    sd: float | None = None,
    label_noise: float = 0.0,
    classes: int = 2,
    false_alarm: float = 0.05,
    power: float = 0.8,
) -> float:
    """Return the smallest true difference that a test on `n` examples finds with the given power, in the metric's unit (P3.4).

    Give one of `disagreement`, `accuracy` and `sd`. The difference is by clean labels; inf where no difference that is possible can be
    found: models that differ by d disagree on d of the examples at least, so about 8 examples have to change in any case.

    Args:
        disagreement: share of the examples on which exactly one of two models is right, by the labels that there are.
        accuracy: of the models, each on examples of its own.
        sd: standard deviation of the difference between the two models from example to example, in the unit of any metric.
        label_noise: share of wrong labels, spread evenly over the other of `classes` classes; for a metric of zeros and ones.
        false_alarm: how often equal models are called different, two-sided (rule of thumb: 5 %, as is common).
        power: how often the difference is found (rule of thumb: 80 %, as is common).

    Raises:
        ConfigError: an argument is out of its range.
    """
    kept, a, b = _check_level(disagreement, accuracy, sd, (label_noise, classes), (false_alarm, power))
    if not n > 0:
        raise ConfigError(f"n={n!r} examples show no difference: give at least 1.")
    if sd is not None:
        return (a + b) * sd / math.sqrt(n)
    left = n + b**2 - a**2
    if disagreement is None:
        assert accuracy is not None
        found = (a + b) * math.sqrt(2 * accuracy * (1 - accuracy) / n)
    elif left >= 0:
        found = math.sqrt(disagreement) * (a * math.sqrt(n) + b * math.sqrt(left)) / (n + b**2)
    else:
        found = math.inf
    left = n * (n - a**2 + b**2)  # every example that changes changes for the better
    same = (math.sqrt(left) - a * b) / (n + b**2) if left >= 0 else -1.0
    true = max(found, 1 - same**2 if same >= 0 else math.inf) / kept
    return true if true <= 1 else math.inf


def examples_needed(
    difference: float,
    *,
    disagreement: float | None = None,
    accuracy: float | None = None,
    sd: float | None = None,
    label_noise: float = 0.0,
    classes: int = 2,
    false_alarm: float = 0.05,
    power: float = 0.8,
) -> int:
    """Return how many examples show a true `difference`: the inverse of `detectable_difference`, rounded up (P3.4).

    The arguments and errors are those of `detectable_difference`; `difference` is by clean labels, in the metric's unit, above 0.
    """
    if not 0 < difference < math.inf or (sd is None and difference > 1):
        raise ConfigError(f"difference={difference!r} must be above 0, and at most 1 for a share of the examples.")
    show = partial(
        detectable_difference, disagreement=disagreement, accuracy=accuracy, sd=sd, label_noise=label_noise, classes=classes,
        false_alarm=false_alarm, power=power,
    )  # fmt: skip
    return bisect_left(range(1, 2**60), -difference * (1 + 1e-12), key=lambda n: -show(n)) + 1


def _check_level(
    disagreement: float | None, accuracy: float | None, sd: float | None, labels: tuple[float, int], level: tuple[float, float]
) -> tuple[float, float, float]:  # fmt: skip
    """Return which share of a difference in accuracy wrong labels leave, and the quantiles of false alarm and power."""
    (label_noise, classes), (false_alarm, power) = labels, level
    given = {"disagreement": disagreement, "accuracy": accuracy, "sd": sd}
    known = {name: value for name, value in given.items() if value is not None}
    if len(known) != 1:
        raise ConfigError(f"give one of disagreement, accuracy and sd, not {', '.join(known) or 'none'}.")
    ((name, value),) = known.items()
    if not 0 <= value <= (math.inf if name == "sd" else 1.0):
        raise ConfigError(f"{name}={value!r} must be finite and at least 0{'' if name == 'sd' else ', and at most 1'}.")
    if isinstance(classes, bool) or classes < 2:
        raise ConfigError(f"classes={classes!r} must be at least 2.")
    kept = 1 - label_noise * classes / (classes - 1)
    if not 0 <= label_noise < 1 or kept <= 1e-12:
        raise ConfigError(
            f"label_noise={label_noise!r} must be at least 0 and below {1 - 1 / classes:g}: with that many wrong labels among "
            f"{classes} classes the labels say nothing."
        )
    if sd is not None and label_noise > 0:
        raise ConfigError(
            "label_noise is for a metric of zeros and ones: sd is measured on labels that have their noise already."
        )
    if not 0 < false_alarm < 1 or not 0.5 <= power < 1:
        bounds = f"false_alarm={false_alarm!r} must lie between 0 and 1"
        raise ConfigError(f"{bounds}, and power={power!r} be at least 0.5 and below 1.")
    return kept, float(stats.norm.isf(false_alarm / 2)), float(stats.norm.ppf(power))


def selection_gap(n: float, trials: int, *, sd: float, spread: float = 0.0) -> float:
    """Return by how much the best of `trials` models looks better on `n` validation examples than it is (P3.5).

    Args:
        sd: standard deviation, from example to example, of what sets a model apart from the others: sqrt(D / 2) for an
            accuracy, with D the disagreement of two of them; the standard deviation of a paired difference over sqrt(2).
        spread: standard deviation of the models' true values; 0 where they are equally good, which is the worst case.
    """
    if not n > 0 or not sd >= 0 or not spread >= 0:
        raise ConfigError(f"n={n!r} must be above 0, sd={sd!r} and spread={spread!r} at least 0.")
    noise = sd**2 / n
    both = noise + spread**2
    return expected_maximum(trials) * noise / math.sqrt(both) if both > 0 else 0.0


class SizeBounds(NamedTuple):
    """What is asked of the size of an evaluation sample."""

    available: int  # examples of the full set
    largest: int | None  # that the time budget allows, 0 where not even one batch fits; None without a budget
    smallest: int | None  # that show the smallest difference of interest; None where none was given
    proposed: int | None  # to take: the largest that is allowed. None where nothing can be evaluated in time
    feasible: bool  # whether that size keeps both bounds
    reason: str | None  # why not, in numbers; None where it is feasible


def _evaluation_seconds(n: float, timing: Facts) -> float:
    """Return the seconds that one evaluation of `n` examples takes: a line, which is too low for less than one batch."""
    return float(timing["start_s"]) + n * float(timing["seconds_per_example"])


def _largest_within(budget_s: float, timing: Facts, available: int) -> int:
    """Return how many examples can be evaluated in `budget_s`: at most all, and 0 where not even one batch can."""
    if _evaluation_seconds(min(int(timing["batch_size"]), available), timing) > budget_s:
        return 0
    left = (budget_s - float(timing["start_s"])) / max(float(timing["seconds_per_example"]), 1e-12)
    return int(min(available, left + 1e-9))


def how_models_differ(facts: Facts) -> dict[str, Any]:
    """Return the argument of `detectable_difference` that the measured pair of models gives; {} where nothing is known."""
    pair = facts.get("pair") or {}
    for name, key in (("disagreement", "disagreement"), ("sd", "difference_sd")):
        if pair.get(key) is not None:
            return {name: float(pair[key])}
    return {}


def size_bounds(facts: Facts, *, false_alarm: float = 0.05, power: float = 0.8) -> SizeBounds:
    """Return both bounds and the size to take, by the "evaluation_sample" of a study: examples, asked, timing, pair, num_classes."""
    available, asked, timing = int(facts["examples"]), facts.get("asked") or {}, facts.get("timing")
    budget, difference = asked.get("budget_s"), asked.get("smallest_difference")
    largest = _largest_within(budget, timing, available) if budget is not None and timing else None
    differ, smallest = how_models_differ(facts), None
    if difference is not None and differ:
        smallest = examples_needed(difference, **differ, **_noise(facts), false_alarm=false_alarm, power=power)
    allowed, reason = available if largest is None else largest, None
    if timing and largest == 0:
        batch = min(int(timing["batch_size"]), available)
        takes = (
            f"one batch of {batch} example{'' if batch == 1 else 's'} takes {_evaluation_seconds(batch, timing):.3g} s"
        )
        reason = f"{takes}, and the budget is {budget:g} s"
    elif smallest is not None and smallest > allowed:
        within = f"{budget:g} s allow {allowed} of them" if allowed < available else f"there are {available}"
        reason = f"a difference of {difference:g} takes {smallest} example{'' if smallest == 1 else 's'}, and {within}"
    return SizeBounds(available, largest, smallest, allowed or None, reason is None, reason)


_COLUMNS = ["examples", "seconds", "detectable", "unpaired", "selection_gap", "available", "affordable"]


def evaluation_sizes(
    record: RecordLike | Facts,
    sizes: Sequence[int] | None = None,
    *,
    comparisons: int = 100,
    false_alarm: float = 0.05,
    power: float = 0.8,
) -> pd.DataFrame:
    """Return for sizes of the sample what an evaluation costs and shows (P3.3, P3.4, P3.5).

    Args:
        record: a study with "evaluation_sample" in its facts, or these facts.
        sizes: numbers of examples; None is a grid from 10 to ten times the full set.
        comparisons: models that are compared on the set, of which the best is taken (P3.5).

    Returns:
        Columns examples, seconds (of one evaluation), detectable (the smallest difference that shows, both models on the
        same examples), unpaired (each on its own; a metric of zeros and ones only), selection_gap (by how much the best of
        `comparisons` equal models looks better than it is), available (whether the full set is that large) and affordable
        (whether the budget allows it, however large the set is). Unknown values are NaN.
    """
    facts: Facts = record if isinstance(record, Mapping) else record.facts.get("evaluation_sample") or {}
    if not facts:
        return pd.DataFrame(columns=_COLUMNS)
    available, timing, pair = int(facts["examples"]), facts.get("timing"), facts.get("pair") or {}
    budget = (facts.get("asked") or {}).get("budget_s")
    grid = sizes or sorted({*(round(v) for v in np.geomspace(min(10, available), 10 * available, 31)), available})
    level: dict[str, Any] = {"false_alarm": false_alarm, "power": power, **_noise(facts)}
    differ = how_models_differ(facts)
    own = differ.get("sd", math.nan) / math.sqrt(2)
    if (
        "disagreement" in differ
    ):  # models that agree on all examples do so by chance: as if they differed on half of one
        own = math.sqrt(max(differ["disagreement"], 0.5 / available) / 2)
    alone = (pair.get("values") or [None])[0] if pair.get("disagreement") is not None else None
    rows = [
        {
            "examples": n, "seconds": _evaluation_seconds(n, timing) if timing else math.nan,
            "detectable": detectable_difference(n, **differ, **level) if differ else math.nan,
            "unpaired": math.nan if alone is None else detectable_difference(n, accuracy=alone, **level),
            "selection_gap": math.nan if math.isnan(own) else selection_gap(n, comparisons, sd=own), "available": n <= available,
            "affordable": budget is None or not timing or n <= _largest_within(float(budget), timing, max(n, available)),
        }
        for n in grid
    ]  # fmt: skip
    return pd.DataFrame(rows, columns=_COLUMNS)


def _noise(facts: Facts) -> dict[str, Any]:
    """Return label noise and classes where the metric is one of zeros and ones, {} elsewhere."""
    noise = float((facts.get("asked") or {}).get("label_noise") or 0.0)
    if not noise or (facts.get("pair") or {}).get("disagreement") is None:
        return {}
    return {"label_noise": noise, "classes": int(facts.get("num_classes") or 2)}
