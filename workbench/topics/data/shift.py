"""`input_shift` and `target_shift`: are the examples of a split distributed as those that are trained on (P3.2)?"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse, stats

from workbench.topics.data.sample import Sample
from workbench.topics.evaluation.skew import class_test

__all__ = ["input_shift", "target_shift"]

SHOWN = 10
BUCKETS = 4096
"""Tokens that are told apart; larger ids share a bucket."""
REDRAWN = 100
"""Splits of the same examples that are drawn anew, for how far token frequencies differ by chance."""

Floats = NDArray[np.float64]


def input_shift(train: Sample, other: Sample) -> dict[str, Any]:
    """Return JSON facts on how far the inputs of two splits are apart.

    Numbers feature by feature, and by what an image or a sequence has along its axes, by the Kolmogorov-Smirnov distance:
    0 is the same distribution, 1 none in common, whatever the unit. Tokens by their frequencies.

    Args:
        train: examples that are trained on.
        other: examples of another split.

    Returns:
        "rows" (of each), "tests" (how many), "worst" (the first ones by p: name, distance, p, mean and deviation in each split) and
        "farthest" (that of the largest distance), or "reason" where nothing can be compared. Rows that resemble the row before them,
        as overlapping windows do, count less in "p"; in "p_rows" each counts.
    """
    rows = [len(train.places), len(other.places)]
    if train.inputs is None or other.inputs is None:
        return {"rows": rows, "reason": "the inputs are text, or of different sizes"}
    if train.inputs.shape[1] != other.inputs.shape[1]:
        return {"rows": rows, "reason": "an example has another size in each split"}
    if min(rows) < 2:
        return {"rows": rows, "reason": "there are too few examples"}
    if train.ids and other.ids:
        found = _token_test(train.inputs, other.inputs)
        return {"rows": rows, "tests": 1, "worst": [found], "farthest": found}
    features = [f"feature {k}" for k in train.columns]
    names = [*features, *train.outline_names]
    a, b = (np.concatenate([s.inputs, s.outline], 1) for s in (train, other) if s.inputs is not None)
    if a.shape[1] != b.shape[1]:
        a, b, names = train.inputs, other.inputs, features
    return {"rows": rows} | _number_tests(a, b, names)


def target_shift(train: Sample, other: Sample) -> dict[str, Any]:
    """Return JSON facts on how far the targets of two splits are apart: shares of classes, or numbers as `input_shift` has them.

    Args:
        train: examples that are trained on.
        other: examples of another split.

    Returns:
        For classes "kind", "rows" (of each), "p", "distance" (half the sum of the differences between shares), "counts" (in each,
        the most common ones), "missing" (classes that one split lacks, and the share they have in the other); for numbers as
        `input_shift`; "reason" where nothing can be compared.
    """
    if train.targets is None or other.targets is None or min(len(train.targets), len(other.targets)) < 2:
        return {"reason": "examples have no targets of one size"}
    if train.targets.shape[1] != other.targets.shape[1] or train.classes != other.classes:
        return {"reason": "targets have another size or type in each split"}
    rows = [len(train.targets), len(other.targets)]
    if train.classes:
        labels = train.targets[:, 0].astype(np.int64), other.targets[:, 0].astype(np.int64)
        if train.targets.shape[1] > 1 or len(np.unique(labels[0])) > max(2, rows[0] / 2):
            return {"reason": "targets are neither one class nor numbers"}
        return {"kind": "classes", "rows": rows} | _class_test(*labels)
    several = train.targets.shape[1] > 1
    names = [f"target {k}" for k in range(train.targets.shape[1])] if several else ["the target"]
    return {"kind": "numbers", "rows": rows} | _number_tests(train.targets, other.targets, names)


def _number_tests(a: Floats, b: Floats, names: list[str]) -> dict[str, Any]:
    distance = _kolmogorov_smirnov(a, b)
    rows, serial = len(a) * len(b) / (len(a) + len(b)), np.maximum(_serial(a), _serial(b))
    counts = {"p": rows * (1 - serial) / (1 + serial), "p_rows": rows}  # as many as a first-order autoregression has
    p = {name: stats.kstwobign.sf(distance * np.sqrt(count)) for name, count in counts.items()}

    def test(k: int) -> dict[str, Any]:
        known = {"name": names[k], "distance": float(distance[k]), **{name: float(each[k]) for name, each in p.items()}}
        return known | {"train": _moments(a[:, k]), "other": _moments(b[:, k])}

    first = np.lexsort((-distance, p["p"]))[:SHOWN]
    return {"tests": len(distance), "worst": [test(int(k)) for k in first], "farthest": test(int(distance.argmax()))}


def _kolmogorov_smirnov(a: Floats, b: Floats) -> Floats:
    """Return the distance of each column; values that are missing count as larger than all others."""
    n, m = len(a), len(b)
    both = np.concatenate([a, b])
    both[np.isnan(both)] = np.inf
    order = np.argsort(both, axis=0, kind="stable")
    ordered = np.take_along_axis(both, order, axis=0)
    apart = np.cumsum(np.where(order < n, 1 / n, -1 / m), axis=0)
    last = np.concatenate([ordered[1:] != ordered[:-1], np.ones((1, both.shape[1]), bool)])
    return np.asarray(np.abs(np.where(last, apart, 0.0)).max(0))


def _serial(rows: Floats) -> Floats:
    """Return the correlation of each column from one row to the next, beyond what chance makes of it."""
    centred = np.nan_to_num(rows - np.nanmean(np.where(np.isfinite(rows), rows, 0.0), axis=0), posinf=0.0, neginf=0.0)
    size = (centred**2).sum(0)
    serial = np.divide((centred[1:] * centred[:-1]).sum(0), size, out=np.zeros_like(size), where=size > 0)
    return np.asarray(np.clip(serial - 2 / np.sqrt(len(rows)), 0.0, 0.99))


def _moments(values: Floats) -> list[float]:
    finite = values[np.isfinite(values)]
    return [float(finite.mean()), float(finite.std())] if finite.size else [np.nan, np.nan]


def _token_test(a: Floats, b: Floats) -> dict[str, Any]:
    """Return by how much token frequencies differ more than between random halves of the same sizes; examples stay whole."""
    rows = np.concatenate([a, b]).astype(np.int64) % BUCKETS
    n, total = len(a), len(a) + len(b)
    counts = sparse.csr_matrix((np.ones(rows.size), (np.repeat(np.arange(total), rows.shape[1]), rows.ravel())))

    def apart(first: NDArray[Any]) -> Floats:
        ones = np.asarray(first @ counts)
        rest = np.asarray(counts.sum(0)) - ones
        return np.asarray(np.abs(ones / ones.sum(1, keepdims=True) - rest / rest.sum(1, keepdims=True)).sum(1) / 2)

    mask = np.arange(total) < n
    rng = np.random.default_rng(0)
    drawn = apart(np.stack([rng.permutation(mask) for _ in range(REDRAWN)]).astype(np.float64))
    found = float(apart(mask[None].astype(np.float64))[0])
    z = (found - drawn.mean()) / max(drawn.std(), 1e-12)
    distance = max(0.0, found - float(drawn.mean()))
    p = float(stats.norm.sf(z))
    moments = {"train": _moments(a.ravel()), "other": _moments(b.ravel())}
    return {"name": "the frequency of tokens", "distance": distance, "p": p, "p_rows": p, **moments}


def _class_test(labels: NDArray[Any], others: NDArray[Any]) -> dict[str, Any]:
    both = np.concatenate([others, labels])
    mask = np.arange(len(both)) < len(others)
    values, codes = np.unique(both, return_inverse=True)
    counts = [np.bincount(codes[part], minlength=len(values)) for part in (~mask, mask)]
    shares = [c / c.sum() for c in counts]
    common = np.argsort(-(counts[0] + counts[1]), kind="stable")[:50]
    missing = {
        name: {"classes": values[here == 0][:20].tolist(), "share": float(there[here == 0].sum())}
        for name, here, there in (("train", shares[0], shares[1]), ("other", shares[1], shares[0]))
    }
    return {
        "p": float(class_test(mask, both)["p"]),
        "distance": float(np.abs(shares[0] - shares[1]).sum() / 2),
        "counts": {str(values[k]): [int(counts[0][k]), int(counts[1][k])] for k in common},
        "missing": missing,
    }
