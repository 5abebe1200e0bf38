"""`measure`: what a linear model and nearest neighbours learn from the data, the yardsticks that need no training (F1.1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import linalg, optimize

from workbench.topics.data.sample import Sample

__all__ = ["measure"]

MOST_ROWS = 1000
"""Rows that either is fitted to: a correlation of 0.13 stands out from chance by four deviations (rule of thumb)."""
FEWEST_ROWS = 40
MOST_CLASSES = 100
NEIGHBOURS = 10
PENALTIES = (0.1, 3.0, 100.0)
"""Of the linear model, over the mean eigenvalue of the Gram matrix (rule of thumb)."""
BUCKETS = 1024
"""Tokens that are counted apart; larger ids share a bucket."""

Floats = NDArray[np.float64]


class _Yardstick(NamedTuple):
    """A model that is linear in the targets.

    Attributes:
        left_out: predictions of each row by all others, from targets of mean 0, shape (rows, columns).
        new: predictions of other rows, from their Gram matrix with these rows, shape (others, rows), its squares, and the targets.
    """

    left_out: Callable[[Floats], Floats]
    new: Callable[[Floats, Floats], Floats]


class _Targets(NamedTuple):
    """Targets as columns: one for each class, or the numbers themselves."""

    columns: Floats
    classes: Floats | None


def measure(train: Sample, other: Sample | None = None, *, stored: Floats | None = None) -> dict[str, Any]:
    """Return JSON facts on what can be told of the targets from the inputs; text is not looked at, tokens are counted.

    Ridge regression on the targets, one column a class, and the mean of the 10 nearest neighbours; each row is predicted by all
    others, the linear model in closed form.

    Args:
        train: random training examples.
        other: of the split that is held against it; None leaves that out.
        stored: targets of the examples in the order in which they are stored, NaN where unknown; `train.places` are places in it.

    Returns:
        "rows", "columns", "classes" (how many; None for numbers), "z" (of each yardstick: the best correlation between what is
        predicted and what is, over columns and penalties, in deviations of chance) and "tests" (how many of these), "score" (of
        each: accuracy, or correlation), "ranks" (how many labels stand at which place of the linear model's order of classes), "chance" (share of the most common class, or 0), "next" and "before" (the larger z where
        each row is given the target of the row after it, or before), "carried" (of the better one: "rows" and "score" on the other
        split, and "renumbered", the score where its classes are matched anew), "own" (of the other split: what this function
        finds in it alone, where little was carried over).
        "reason" where it does not apply, and "constant" where the inputs never vary.
    """
    rng = np.random.default_rng(0)
    whole = np.arange(len(train.places)) if train.targets is None else np.flatnonzero(np.isfinite(train.targets).all(1))
    kept = np.sort(rng.permutation(whole)[:MOST_ROWS])
    ready = _targets(train, kept)
    if isinstance(ready, str):
        return {"reason": ready}
    raw = _features(train)[kept]
    centre, spread = raw.mean(0), raw.std(0)
    varies = spread > 1e-12 * np.maximum(1.0, np.abs(centre))
    if not varies.any():
        return {"reason": "the inputs never vary", "constant": True, "rows": len(kept)}
    features = (raw - centre)[:, varies] / spread[varies]
    sticks = _yardsticks(features @ features.T / features.shape[1])
    found = [stick.left_out(_centred(ready.columns)) for stick in sticks]
    z = [_z(one, ready.columns) for one in found]
    linear, best = int(np.argmax(z[:-1])), int(np.argmax(z))
    known: dict[str, Any] = {
        "rows": len(kept),
        "columns": features.shape[1],
        "classes": None if ready.classes is None else len(ready.classes),
        "z": {"linear": z[linear], "neighbours": z[-1]},
        "tests": len(z) * ready.columns.shape[1],
        "score": {name: _score(found[k], ready.columns, ready) for name, k in (("linear", linear), ("neighbours", -1))},
        "ranks": None if ready.classes is None else _ranks(found[linear], ready.columns),
        "chance": 0.0 if ready.classes is None else float(ready.columns.mean(0).max()),
    }
    if stored is not None and train.targets is not None and train.targets.shape[1] == 1:
        known |= {
            name: _shifted(sticks, stored, train.places[kept] + by, ready) for name, by in (("next", 1), ("before", -1))
        }
    if other is not None and _alike(train, other):
        assert other.targets is not None
        theirs = np.flatnonzero(np.isfinite(other.targets).all(1))[:MOST_ROWS]
        rows = (_features(other)[theirs] - centre)[:, varies] / spread[varies]
        known["carried"] = carried = _carried(sticks[best], features, rows, other.targets[theirs], ready)
        learned = known["score"]["linear" if best == linear else "neighbours"] - known["chance"]
        if carried is not None and carried["score"] - known["chance"] < learned / 2:
            known["own"] = measure(other)
    return known


def _alike(train: Sample, other: Sample) -> bool:
    if train.inputs is None or other.inputs is None or other.targets is None:
        return False
    return train.inputs.shape[1] == other.inputs.shape[1] and train.classes == other.classes


def _targets(sample: Sample, kept: NDArray[np.int64]) -> _Targets | str:
    if sample.inputs is None:
        return "the inputs are text, or of different sizes"
    if sample.targets is None:
        return "examples have no targets of one size"
    if len(kept) < FEWEST_ROWS:
        return f"{len(kept)} examples are too few"
    targets = sample.targets[kept]
    if not sample.classes:
        varies = (targets.std(0) > 0).any()
        return _Targets(targets[:, :MOST_CLASSES], None) if varies else "the targets never vary"
    values = np.unique(targets[:, 0])
    if targets.shape[1] > 1 or len(values) > MOST_CLASSES or len(values) > len(kept) / 4:
        return "targets are neither one of several classes nor numbers"
    if len(values) < 2:
        return "all examples are of one class"
    return _Targets((targets == values).astype(np.float64), values)


def _features(sample: Sample) -> Floats:
    """Return the inputs as columns: numbers as they are, tokens as how often each is there."""
    assert sample.inputs is not None
    if not sample.ids:
        return np.nan_to_num(sample.inputs, posinf=0.0, neginf=0.0)
    tokens = sample.inputs.astype(np.int64) % BUCKETS
    counts = np.zeros((len(tokens), BUCKETS))
    np.add.at(counts, (np.repeat(np.arange(len(tokens)), tokens.shape[1]), tokens.ravel()), 1.0)
    return counts


def _centred(columns: Floats) -> Floats:
    return np.asarray(columns - columns.mean(0))


def _yardsticks(gram: Floats) -> list[_Yardstick]:
    """Return the linear model for each penalty, and the neighbours, from the inner products of standardised rows."""
    values, vectors = linalg.eigh(gram)
    values = np.maximum(values, 0.0)
    return [*(_ridge(values, vectors, penalty * float(values.mean())) for penalty in PENALTIES), _neighbours(gram)]


def _ridge(values: Floats, vectors: Floats, penalty: float) -> _Yardstick:
    shrunk = values / (values + penalty)
    leverage = np.minimum((vectors**2) @ shrunk + 1 / len(vectors), 1 - 1e-9)

    def left_out(targets: Floats) -> Floats:
        fitted = vectors @ (shrunk[:, None] * (vectors.T @ targets))
        return np.asarray(targets - (targets - fitted) / (1 - leverage)[:, None])

    def new(gram: Floats, targets: Floats) -> Floats:
        return np.asarray(gram @ (vectors @ ((vectors.T @ targets) / (values + penalty)[:, None])))

    return _Yardstick(left_out, new)


def _neighbours(gram: Floats) -> _Yardstick:
    lengths = np.diagonal(gram)
    few = min(NEIGHBOURS, len(gram) - 1)

    def nearest(distance: Floats) -> NDArray[np.int64]:
        return np.argpartition(distance, few - 1, axis=1)[:, :few]

    def left_out(targets: Floats) -> Floats:
        apart = lengths - 2 * gram
        np.fill_diagonal(apart, np.inf)
        return np.asarray(targets[nearest(apart)].mean(1))

    def new(gram: Floats, targets: Floats) -> Floats:
        return np.asarray(targets[nearest(lengths - 2 * gram)].mean(1))

    return _Yardstick(left_out, new)


def _correlations(predicted: Floats, targets: Floats) -> Floats:
    """Return the correlation of each column; 0 where one of the two never varies."""
    a, b = _centred(predicted), _centred(targets)
    size = np.sqrt((a**2).sum(0) * (b**2).sum(0))
    return np.asarray(np.divide((a * b).sum(0), size, out=np.zeros_like(size), where=size > 1e-12))


def _z(predicted: Floats, targets: Floats) -> float:
    return float(_correlations(predicted, targets).max() * np.sqrt(len(targets)))


def _score(predicted: Floats, targets: Floats, ready: _Targets) -> float:
    if ready.classes is None:
        return float(_correlations(predicted, targets).mean())
    shares = ready.columns.mean(0)
    return float(((predicted + shares).argmax(1) == targets.argmax(1)).mean())


def _ranks(predicted: Floats, columns: Floats) -> list[int]:
    scores = predicted + columns.mean(0)
    own = (scores * columns).sum(1, keepdims=True)
    return [int(n) for n in np.bincount((scores > own).sum(1), minlength=columns.shape[1])]


def _shifted(sticks: list[_Yardstick], stored: Floats, places: NDArray[np.int64], ready: _Targets) -> float | None:
    """Return the best z of targets that stand elsewhere; rows whose target is unknown count as the mean."""
    inside = (places >= 0) & (places < len(stored))
    values = np.where(inside, stored[np.clip(places, 0, len(stored) - 1)], np.nan)
    known = np.isfinite(values)
    if known.sum() < len(places) / 2:
        return None
    columns = values[:, None] if ready.classes is None else (values[:, None] == ready.classes).astype(np.float64)
    columns = np.where(known[:, None], columns - columns[known].mean(0), 0.0)
    return max(_z(stick.left_out(columns), columns) for stick in sticks)


def _carried(
    stick: _Yardstick, features: Floats, theirs: Floats, targets: Floats, ready: _Targets
) -> dict[str, Any] | None:
    """Return how well a yardstick that was fitted to training examples does on the other split."""
    if targets.shape[1] != (1 if ready.classes is not None else ready.columns.shape[1]) or len(targets) < 2:
        return None
    predicted = stick.new(theirs @ features.T / features.shape[1], _centred(ready.columns)) + ready.columns.mean(0)
    known: dict[str, Any] = {"rows": len(theirs)}
    if ready.classes is None:
        return known | {"score": float(_correlations(predicted, targets).mean())}
    labels, said = targets[:, 0], predicted.argmax(1)
    values = np.unique(labels)
    table = np.array([[((said == k) & (labels == c)).sum() for c in values] for k in range(len(ready.classes))])
    matched = optimize.linear_sum_assignment(-table)
    score = float((ready.classes[said] == labels).mean())
    return known | {"score": score, "renumbered": float(table[matched].sum() / len(labels))}
