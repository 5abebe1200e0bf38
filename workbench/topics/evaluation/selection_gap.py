"""How far the best of many lies above the truth: fitting the validation set by choosing on it (P3.5).

Of k models that are equally good the best one on n examples looks better than it is by the expected maximum of k noisy draws.
Where the models differ in truth by a spread t, and in noise by s, the winner's gap is e(k) s^2 / sqrt(s^2 + t^2), with e(k) the
expected maximum of k standard normal draws, and its true gain e(k) t^2 / sqrt(s^2 + t^2). Rounds that build on each other are worse:
each small random change that looks better is kept, and the gap adds up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import stats

from workbench.curves.selected_runs import expected_maximum
from workbench.errors import ConfigError

__all__ = [
    "climbing_gap",
    "selection_gap",
    "selection_gaps",
    "simulate_climbing",
    "simulate_selection",
]

Floats = NDArray[np.float64]
FEWEST_SHARED = 1e-12
BEST, CLIMB = "best of equal models", "rounds that build on each other"


def selection_gap(n: float, trials: int, *, sd: float, spread: float = 0.0) -> float:
    """Return by how much the best of `trials` models looks better on `n` validation examples than it is.

    Args:
        n: examples of the validation set.
        trials: models that are compared, each once.
        sd: standard deviation, from example to example, of what sets a model apart from the others: sqrt(D / 2) for an
            accuracy, with D the disagreement of two of them; the standard deviation of a paired difference over sqrt(2).
        spread: standard deviation of the models' true values; 0 where they are equally good, which is the worst case.

    Source: P3.5.
    """
    if not n > 0 or not sd >= 0 or not spread >= 0:
        raise ConfigError(f"n={n!r} must be above 0, sd={sd!r} and spread={spread!r} at least 0.")
    noise = sd**2 / n
    both = noise + spread**2
    return expected_maximum(trials) * noise / math.sqrt(both) if both > 0 else 0.0


def simulate_selection(
    n: int,
    trials: int,
    *,
    accuracy: float = 0.9,
    disagreement: float = 0.05,
    spread: float = 0.0,
    held_out: int = 2000,
    repeats: int = 50,
    seed: int = 0,
) -> Floats:
    """Return accuracy on validation minus accuracy on held-out examples of the best of `trials` models, shape (repeats,).

    Every model is right or wrong on every example; nothing of the closed form is used.

    Args:
        n: examples of the validation set.
        trials: models, of which the one that is best on them is chosen.
        accuracy: their mean true accuracy.
        disagreement: share of the examples on which exactly one of two models is right.
        spread: standard deviation of their true accuracies.
        held_out: examples that no choice sees.
        repeats: simulations.
        seed: of the random numbers.

    Raises:
        ConfigError: models of this accuracy cannot disagree that often.

    Source: P3.5.
    """
    most = 2 * accuracy * (1 - accuracy)
    if not 0 < disagreement <= most:
        raise ConfigError(
            f"disagreement={disagreement!r} must be above 0 and at most {most:g} at accuracy={accuracy!r}."
        )
    rng = np.random.default_rng(seed)
    own = 1 - math.sqrt(max(1 - disagreement / most, 0.0))  # share of the examples on which a model is its own
    gaps = np.empty(repeats)
    for repeat in range(repeats):
        truths = np.clip(accuracy + spread / max(own, FEWEST_SHARED) * rng.standard_normal(trials), 0, 1)
        scores = []
        for examples in (n, held_out):
            shared = rng.random(examples) < accuracy
            right = rng.random((trials, examples), dtype=np.float32) < truths[:, None]
            is_own = rng.random((trials, examples), dtype=np.float32) < own
            scores.append(np.where(is_own, right, shared).mean(1))
        best = int(np.argmax(scores[0]))
        gaps[repeat] = scores[0][best] - scores[1][best]
    return gaps


def simulate_climbing(
    n: int,
    rounds: int,
    *,
    accuracy: float = 0.9,
    changed: float = 0.05,
    held_out: int = 2000,
    repeats: int = 20,
    seed: int = 0,
) -> Floats:
    """Return validation minus held-out accuracy after each of `rounds` that build on each other, shape (repeats, rounds + 1).

    A round draws the answers to a share of all inputs anew, with the same accuracy, and is kept where it looks better on the
    validation set: nothing is ever gained, and everything that is seen is fitted.

    Args:
        n: examples of the validation set.
        rounds: selection rounds.
        accuracy: true accuracy of every change.
        changed: share of the examples whose answer a round draws anew.
        held_out: examples that no choice sees.
        repeats: simulations.
        seed: of the random numbers.

    Source: P3.5.
    """
    rng = np.random.default_rng(seed)
    right = rng.random((repeats, n + held_out), dtype=np.float32) < accuracy
    gaps = np.empty((repeats, rounds + 1))
    gaps[:, 0] = right[:, :n].mean(1) - right[:, n:].mean(1)
    for k in range(rounds):
        drawn = rng.random(right.shape, dtype=np.float32) < accuracy
        changed_now = rng.random(right.shape, dtype=np.float32) < changed
        proposed = np.where(changed_now, drawn, right)
        better = proposed[:, :n].sum(1) > right[:, :n].sum(1)
        right = np.where(better[:, None], proposed, right)
        gaps[:, k + 1] = right[:, :n].mean(1) - right[:, n:].mean(1)
    return gaps


def climbing_gap(n: float, rounds: int, *, accuracy: float = 0.9, changed: float = 0.05) -> Floats:
    """Return the gap that `simulate_climbing` comes to in expectation, round by round, shape (rounds + 1,).

    At a gap g a round moves the validation accuracy by a normal draw with mean -c g and variance
    c (p (1 - p) + (p + g)(1 - p - g) + (1 - c) g^2) / n, c being the share that changes, and is kept where that is above half an example.

    Args:
        n: examples of the validation set.
        rounds: selection rounds.
        accuracy: p, of every change.
        changed: c.

    Source: P3.5.
    """
    gap = np.zeros(rounds + 1)
    for k in range(rounds):
        g = gap[k]
        seen = min(accuracy + g, 1.0)
        variance = changed * (accuracy * (1 - accuracy) + seen * (1 - seen) + (1 - changed) * g**2) / n
        sd, mean, least = math.sqrt(variance), -changed * g, 0.5 / n
        z = (mean - least) / sd
        kept = mean * stats.norm.cdf(z) + sd * stats.norm.pdf(z)  # E[x; x > least] of a normal draw
        gap[k + 1] = min(g + max(float(kept), 0.0), 1 - accuracy)
    return gap


def selection_gaps(
    sizes: Sequence[int] = (50, 100, 300, 1000),
    *,
    rounds: Sequence[int] = (10, 100),
    accuracy: float = 0.9,
    disagreement: float = 0.05,
    repeats: int = 50,
    seed: int = 0,
) -> pd.DataFrame:
    """Simulate what choosing on a validation set does to its honesty, against the closed forms (P3.5).

    Args:
        sizes: examples of the validation set.
        rounds: models of which the best is taken, and rounds that build on each other, each redrawing the answers to
            `disagreement` of the examples.
        accuracy: true accuracy of all of them.
        disagreement: share of the examples on which exactly one of two models is right.
        repeats: simulations of each.
        seed: of the random numbers.

    Returns:
        Columns how, rounds, examples, gap (validation minus held-out accuracy of what was chosen), se, expected (closed form).
    """
    rows: list[dict[str, Any]] = []
    longest = max(rounds)
    for n in sizes:
        climbed = simulate_climbing(n, longest, accuracy=accuracy, changed=disagreement, repeats=repeats, seed=seed)
        formula = climbing_gap(n, longest, accuracy=accuracy, changed=disagreement)
        for k in rounds:
            best = simulate_selection(n, k, accuracy=accuracy, disagreement=disagreement, repeats=repeats, seed=seed)
            expected = selection_gap(n, k, sd=math.sqrt(disagreement / 2))
            rows += [_gap_row(BEST, k, n, best, expected), _gap_row(CLIMB, k, n, climbed[:, k], float(formula[k]))]
    return pd.DataFrame(rows).sort_values(["how", "rounds", "examples"], ignore_index=True)


def _gap_row(how: str, rounds: int, n: int, gaps: Floats, expected: float) -> dict[str, Any]:
    se = float(gaps.std(ddof=1)) / math.sqrt(gaps.size) if gaps.size > 1 else math.nan
    return {"how": how, "rounds": rounds, "examples": n, "gap": float(gaps.mean()), "se": se, "expected": expected}
