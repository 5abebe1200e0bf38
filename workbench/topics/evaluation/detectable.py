"""`detectable_difference`: which improvement of a model a set of n examples can show, label noise included (P3.4).

Two models on the same examples (paired) differ where exactly one of them is right: the share of those examples is their
disagreement D. With a the normal quantile of 1 - false_alarm / 2 and b that of the power, McNemar's test sees a difference d in
accuracy where sqrt(n) d = a sqrt(D) + b sqrt(D - d^2) (Connor 1987, Biometrics 43). Labels that are wrong with probability e,
spread evenly over the other classes of K, shrink every difference in accuracy to the share 1 - e K / (K - 1) of itself, while the noise stays.
"""

from __future__ import annotations

import math

from scipy import stats

from workbench.errors import ConfigError

__all__ = ["detectable_difference", "examples_needed", "noise_share"]


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
    """Return the smallest true difference that a test on `n` examples finds with the given power.

    Give one of `disagreement` (two models on the same examples, a metric of zeros and ones), `accuracy` (each model on
    examples of its own) and `sd` (the same examples, any metric).

    Args:
        n: examples in the set.
        disagreement: share of the examples on which exactly one of the two models is right, by the labels that there are.
        accuracy: of the models, by the labels that there are.
        sd: standard deviation of the difference between the two models from example to example, in the metric's unit.
        label_noise: share of wrong labels, spread evenly over the other classes; for a metric of zeros and ones.
        classes: how many there are.
        false_alarm: how often equal models are called different, two-sided (rule of thumb: 5 %, as is common).
        power: how often the difference is found (rule of thumb: 80 %, as is common).

    Returns:
        The difference by clean labels, in the metric's unit; inf where no difference that is possible can be found. Models
        that differ by d disagree on d of the examples at least, so about 8 examples have to change in any case.

    Raises:
        ConfigError: an argument is out of its range.

    Source: P3.4.
    """
    kept = _checked(disagreement, accuracy, sd, label_noise, classes)
    a, b = _quantiles(false_alarm, power)
    if not n > 0:
        raise ConfigError(f"n={n!r} examples show no difference: give at least 1.")
    if sd is not None:
        return (a + b) * sd / math.sqrt(n)
    if disagreement is not None:
        found = _paired(n, disagreement, a, b)
    else:
        assert accuracy is not None
        found = (a + b) * math.sqrt(2 * accuracy * (1 - accuracy) / n)
    true = max(found, _one_way(n, a, b)) / kept
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
    """Return how many examples show a true `difference`: the inverse of `detectable_difference`, rounded up.

    Args:
        difference: by clean labels, in the metric's unit, above 0.
        disagreement: see `detectable_difference`; at least the difference that is seen counts.
        accuracy: see there.
        sd: see there.
        label_noise: see there.
        classes: see there.
        false_alarm: see there.
        power: see there.

    Raises:
        ConfigError: an argument is out of its range.

    Source: P3.4.
    """
    kept = _checked(disagreement, accuracy, sd, label_noise, classes)
    a, b = _quantiles(false_alarm, power)
    if not 0 < difference < math.inf or (sd is None and difference > 1):
        raise ConfigError(f"difference={difference!r} must be above 0, and at most 1 for a share of the examples.")
    if sd is not None:
        return max(1, math.ceil(((a + b) * sd / difference) ** 2 - 1e-9))
    seen = difference * kept
    one_way = ((a * math.sqrt(seen) + b * math.sqrt(seen - seen**2)) / seen) ** 2
    if disagreement is not None:
        share = max(disagreement, seen)
        exact = ((a * math.sqrt(share) + b * math.sqrt(share - seen**2)) / seen) ** 2
    else:
        assert accuracy is not None
        exact = (a + b) ** 2 * 2 * accuracy * (1 - accuracy) / seen**2
    return math.ceil(max(exact, one_way) - 1e-9)


def noise_share(label_noise: float, classes: int) -> float:
    """Return which share of a difference in accuracy is left by labels that are wrong with this probability.

    Args:
        label_noise: share of wrong labels.
        classes: the other ones of which are all as likely.
    """
    return 1 - label_noise * classes / (classes - 1)


def _paired(n: float, disagreement: float, a: float, b: float) -> float:
    left = n + b**2 - a**2
    return math.sqrt(disagreement) * (a * math.sqrt(n) + b * math.sqrt(left)) / (n + b**2) if left >= 0 else math.inf


def _one_way(n: float, a: float, b: float) -> float:
    """Return the difference that is found where every example that changes changes for the better."""
    left = n * (n - a**2 + b**2)
    kept = (math.sqrt(left) - a * b) / (n + b**2) if left >= 0 else -1.0
    return 1 - kept**2 if kept >= 0 else math.inf


def _quantiles(false_alarm: float, power: float) -> tuple[float, float]:
    if not 0 < false_alarm < 1 or not 0.5 <= power < 1:
        raise ConfigError(
            f"false_alarm={false_alarm!r} must lie between 0 and 1, and power={power!r} be at least 0.5 and below 1."
        )
    return float(stats.norm.isf(false_alarm / 2)), float(stats.norm.ppf(power))


def _checked(
    disagreement: float | None, accuracy: float | None, sd: float | None, label_noise: float, classes: int
) -> float:
    given = {"disagreement": disagreement, "accuracy": accuracy, "sd": sd}
    known = {name: value for name, value in given.items() if value is not None}
    if len(known) != 1:
        raise ConfigError(f"give one of disagreement, accuracy and sd, not {', '.join(known) or 'none'}.")
    ((name, value),) = known.items()
    top = math.inf if name == "sd" else 1.0
    if not 0 <= value <= top:
        raise ConfigError(f"{name}={value!r} must be finite and at least 0{'' if name == 'sd' else ', and at most 1'}.")
    if isinstance(classes, bool) or classes < 2:
        raise ConfigError(f"classes={classes!r} must be at least 2.")
    kept = noise_share(label_noise, classes)
    if not 0 <= label_noise < 1 or kept <= 1e-12:
        raise ConfigError(
            f"label_noise={label_noise!r} must be at least 0 and below {1 - 1 / classes:g}: with that many wrong labels among "
            f"{classes} classes the labels say nothing."
        )
    if sd is not None and label_noise > 0:
        raise ConfigError(
            "label_noise is for a metric of zeros and ones: sd is measured on labels that have their noise already."
        )
    return kept
