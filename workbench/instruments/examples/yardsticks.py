"""What a linear model and nearest neighbours learn from the data (F1.1), and how far two splits are apart (P3.2), without training."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import linalg, optimize, sparse, stats

from workbench.curves.class_counts import class_test
from workbench.instruments.examples.rows import Floats, Sample

MOST_ROWS = 1000
"""That either is fitted to: a correlation of 0.13 stands out from chance by four deviations (rule of thumb)."""
FEWEST_ROWS, MOST_CLASSES, NEIGHBOURS = 40, 100, 10
PENALTIES = (0.1, 3.0, 100.0)  # of the linear model, over the mean eigenvalue of the Gram matrix (rule of thumb)
# tokens that are told apart, by the yardsticks and between splits; larger ids share a bucket
COUNTED, BUCKETS = 1024, 4096
SHOWN = 10
REDRAWN = 100  # splits of the same examples that are drawn anew, for how far token frequencies differ by chance


def measure(
    train: Sample, other: Sample | None = None, *, stored: Floats | None = None, most: int = MOST_ROWS
) -> dict[str, Any]:
    """Return JSON facts on what can be told of the targets from the inputs; text is not looked at, tokens are counted.

    Ridge regression on the targets, one column a class, and the mean of the 10 nearest neighbours; each row is predicted by all
    others, the linear model in closed form.

    Returns:
        "rows", "columns", "classes" (how many; None for numbers), "z" (of each yardstick: the best correlation between what is
        predicted and what is, over columns and penalties, in deviations of chance) and "tests" (how many of these), "score" (of
        each: accuracy, or correlation), "ranks" (how many labels stand at which place of the linear model's order of classes),
        "chance" (share of the most common class, or 0), "strangers" (see `_strangers`, of one number), "next" and "before" (the larger z where each row is given the target of the
        row after it, or before), "carried" (of the better one: "rows" and "score" on the other split, and "renumbered", the score
        where its classes are matched anew), "own" (of the other split: what this function finds in it alone, where little was
        carried over). "reason" where it does not apply, and "constant" where the inputs never vary.
    """
    whole = np.arange(len(train.places)) if train.targets is None else np.flatnonzero(np.isfinite(train.targets).all(1))
    kept = np.sort(np.random.default_rng(0).permutation(whole)[:most])
    if train.inputs is None or train.targets is None or len(kept) < FEWEST_ROWS:
        few = "examples have no targets of one size" if train.targets is None else f"{len(kept)} examples are too few"
        return {"reason": "the inputs are text, or of different sizes" if train.inputs is None else few}
    targets, classes = train.targets[kept], np.unique(train.targets[kept, 0]) if train.classes else None
    if classes is None and not (targets.std(0) > 0).any():
        return {"reason": "the targets never vary"}
    if classes is not None and (targets.shape[1] > 1 or len(classes) > min(MOST_CLASSES, len(kept) / 4)):
        return {"reason": "targets are neither one of several classes nor numbers"}
    if classes is not None and len(classes) < 2:
        return {"reason": "all examples are of one class"}
    columns = targets[:, :MOST_CLASSES] if classes is None else (targets == classes).astype(np.float64)
    raw = _features(train)[kept]
    centre, spread = raw.mean(0), raw.std(0)
    varies = spread > 1e-12 * np.maximum(1.0, np.abs(centre))
    if not varies.any():
        return {"reason": "the inputs never vary", "constant": True, "rows": len(kept)}
    features = (raw - centre)[:, varies] / spread[varies]
    gram = features @ features.T / features.shape[1]
    sticks = _yardsticks(gram)
    mean = columns.mean(0)
    found = [stick @ (columns - mean) for stick in sticks]
    z = [_z(one, columns) for one in found]
    linear, best = int(np.argmax(z[:-1])), int(np.argmax(z))

    def score(predicted: Floats) -> float:
        if classes is None:
            return float(_correlations(predicted, columns).mean())
        return float(((predicted + mean).argmax(1) == columns.argmax(1)).mean())

    known: dict[str, Any] = {
        "rows": len(kept), "columns": features.shape[1], "classes": None if classes is None else len(classes),
        "z": {"linear": z[linear], "neighbours": z[-1]}, "tests": len(z) * columns.shape[1],
        "score": {"linear": score(found[linear]), "neighbours": score(found[-1])}, "ranks": None,
        "chance": 0.0 if classes is None else float(mean.max()),
        "strangers": None if classes is not None or columns.shape[1] > 1 else _strangers(features, columns[:, 0]),
    }  # fmt: skip
    if classes is not None:
        scores = found[linear] + mean
        own = (scores * columns).sum(1, keepdims=True)
        known["ranks"] = np.bincount((scores > own).sum(1), minlength=len(classes)).tolist()
    if stored is not None and targets.shape[1] == 1:
        for name, by in (("next", 1), ("before", -1)):
            known[name] = _shifted(sticks, stored, train.places[kept] + by, classes)
    if other is None or other.targets is None or other.inputs is None:
        return known
    if train.classes != other.classes or train.inputs.shape[1] != other.inputs.shape[1]:
        return known
    theirs = np.flatnonzero(np.isfinite(other.targets).all(1))[:most]
    labels, rows = other.targets[theirs], (_features(other)[theirs] - centre)[:, varies] / spread[varies]
    known["carried"] = None
    if labels.shape[1] == (columns.shape[1] if classes is None else 1) and len(labels) > 1:
        predicted = _predicted(best, gram, rows @ features.T / features.shape[1], columns - mean) + mean
        known["carried"] = {"rows": len(rows), **_carried(predicted, labels, classes)}
        learned = known["score"]["linear" if best == linear else "neighbours"] - known["chance"]
        if known["carried"]["score"] - known["chance"] < learned / 2:
            known["own"] = measure(other, most=most)
    return known


def _strangers(features: Floats, targets: Floats, *, tight: float = 0.9, far: float = 4.0, fewest: int = 60) -> dict[str, float] | None:  # fmt: skip
    """Return which "share" of the targets looks like those of other rows; None where they do not.

    A linear model fits the third of the rows that it fits best (least trimmed squares, Rousseeuw 1984) with a correlation of `tight`.
    The rows further than `far` deviations from it have inputs and targets that spread as all do, and neither that model nor one of their own
    tells their targets: noise, however heavy, adds to what the inputs say, and another law holds for other inputs (rules of thumb).
    """
    x, kept = np.concatenate([features, np.ones((len(features), 1))], 1), np.arange(len(targets))
    if len(targets) < 9 * x.shape[1]:  # three rows a column are to fit
        return None
    for _ in range(20):
        fit = linalg.lstsq(x[kept], targets[kept])[0]
        away = np.abs(targets - x @ fit)
        kept = np.argsort(away)[: len(away) // 3]
    strange = away > far * np.median(away[kept]) / stats.norm.ppf(7 / 12)
    own, rest = np.flatnonzero(~strange), np.flatnonzero(strange)
    if len(rest) < max(fewest, 3 * x.shape[1]) or _correlations((x[own] @ fit)[:, None], targets[own, None])[0] < tight:
        return None
    if not targets[rest].std() > 0:
        return None
    pairs = [(targets[rest], targets[own]), *zip(features[rest].T, features[own].T, strict=True)]
    drawn = min(stats.ks_2samp(*pair).pvalue for pair in pairs) * len(pairs) > 1e-3  # from all rows alike
    centred = features[rest] - features[rest].mean(0)
    sticks = _yardsticks(centred @ centred.T / centred.shape[1])
    column = targets[rest, None] - targets[rest].mean()
    ranks = [stats.rankdata(each)[:, None] for each in (x[rest] @ fit, targets[rest])]  # for noise of any weight
    learned = _z(*ranks) > 2.3 or max(_z(stick @ column, column) for stick in sticks) > 3.0
    return {"share": len(rest) / len(targets)} if drawn and not learned else None


def _features(sample: Sample) -> Floats:
    """Return the inputs as columns: numbers as they are, tokens as how often each is there."""
    assert sample.inputs is not None
    if not sample.ids:
        return np.nan_to_num(sample.inputs, posinf=0.0, neginf=0.0)
    tokens = sample.inputs.astype(np.int64) % COUNTED
    counts = np.zeros((len(tokens), COUNTED))
    np.add.at(counts, (np.repeat(np.arange(len(tokens)), tokens.shape[1]), tokens.ravel()), 1.0)
    return counts


def _yardsticks(gram: Floats) -> list[Floats]:
    """Return the matrices that predict each row from the centred targets of all others: ridge for each penalty, then neighbours.

    Args:
        gram: inner products of the standardised rows, shape (rows, rows).
    """
    values, vectors = linalg.eigh(gram)
    values, one, found = np.maximum(values, 0.0), np.eye(len(gram)), []
    for penalty in PENALTIES:
        hat = (vectors * (values / (values + penalty * values.mean()))) @ vectors.T
        leverage = np.minimum(np.diagonal(hat) + 1 / len(gram), 1 - 1e-9)
        found.append(one - (one - hat) / (1 - leverage)[:, None])
    apart = np.diagonal(gram) - 2 * gram
    np.fill_diagonal(apart, np.inf)
    return [*found, _nearest(apart)]


def _predicted(stick: int, gram: Floats, across: Floats, targets: Floats) -> Floats:
    """Return what a yardstick predicts of other rows, whose inner products with the rows are `across`, shape (others, rows)."""
    if stick == len(PENALTIES):
        return np.asarray(_nearest(np.diagonal(gram) - 2 * across) @ targets)
    penalty = PENALTIES[stick] * np.trace(gram) / len(gram)
    return np.asarray(across @ linalg.solve(gram + penalty * np.eye(len(gram)), targets, assume_a="pos"))


def _nearest(distance: Floats) -> Floats:
    """Return the matrix that takes the mean of the nearest columns of each row."""
    few = min(NEIGHBOURS, distance.shape[1] - 1)
    weights = np.zeros_like(distance)
    np.put_along_axis(weights, np.argpartition(distance, few - 1, axis=1)[:, :few], 1 / few, axis=1)
    return weights


def _correlations(predicted: Floats, targets: Floats) -> Floats:
    """Return the correlation of each column; 0 where one of the two never varies."""
    a, b = predicted - predicted.mean(0), targets - targets.mean(0)
    size = np.sqrt((a**2).sum(0) * (b**2).sum(0))
    return np.asarray(np.divide((a * b).sum(0), size, out=np.zeros_like(size), where=size > 1e-12))


def _z(predicted: Floats, targets: Floats) -> float:
    return float(_correlations(predicted, targets).max() * np.sqrt(len(targets)))


def _shifted(sticks: list[Floats], stored: Floats, places: NDArray[np.int64], classes: Floats | None) -> float | None:
    """Return the best z of targets that stand elsewhere; rows whose target is unknown count as the mean."""
    inside = (places >= 0) & (places < len(stored))
    values = np.where(inside, stored[np.clip(places, 0, len(stored) - 1)], np.nan)
    known = np.isfinite(values)
    if known.sum() < len(places) / 2:
        return None
    columns = values[:, None] if classes is None else (values[:, None] == classes).astype(np.float64)
    columns = np.where(known[:, None], columns - columns[known].mean(0), 0.0)
    return max(_z(stick @ columns, columns) for stick in sticks)


def _carried(predicted: Floats, targets: Floats, classes: Floats | None) -> dict[str, float]:
    if classes is None:
        return {"score": float(_correlations(predicted, targets).mean())}
    labels, said = targets[:, 0], classes[predicted.argmax(1)]
    return {"score": float((said == labels).mean()), "renumbered": renumbered_accuracy(said, labels)}


def renumbered_accuracy(said: NDArray[Any], true: NDArray[Any]) -> float:
    """Return the accuracy of predictions whose classes are matched anew with those of the targets."""
    table = stats.contingency.crosstab(said, true).count
    return float(table[optimize.linear_sum_assignment(table, maximize=True)].sum() / len(true))


def input_shift(train: Sample, other: Sample) -> dict[str, Any]:
    """Return JSON facts on how far the inputs of two splits are apart.

    Numbers feature by feature, and by what an image or a sequence has along its axes, by the Kolmogorov-Smirnov distance:
    0 is the same distribution, 1 none in common, whatever the unit. Tokens by their frequencies.

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
    a, b, names = train.inputs, other.inputs, [f"feature {k}" for k in train.columns]
    if train.outline.shape[1] == other.outline.shape[1]:
        a, b = (np.concatenate(parts, 1) for parts in ((a, train.outline), (b, other.outline)))
        names += train.outline_names
    return {"rows": rows} | _number_tests(a, b, names)


def target_shift(train: Sample, other: Sample) -> dict[str, Any]:
    """Return JSON facts on how far the targets of two splits are apart: shares of classes, or numbers as `input_shift` has them.

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
    whole = [
        np.where(np.isnan(rows), np.inf, rows) for rows in (a, b)
    ]  # what is missing counts as larger than all others
    distance, serial = stats.ks_2samp(*whole, method="asymp").statistic, np.maximum(_serial(a), _serial(b))
    rows = len(a) * len(b) / (len(a) + len(b))
    p_rows = stats.kstwobign.sf(distance * np.sqrt(rows))
    independent = rows * (1 - serial) / (1 + serial)  # as many as a first-order autoregression has
    p = stats.kstwobign.sf(distance * np.sqrt(independent))

    def test(k: int) -> dict[str, Any]:
        known = {"name": names[k], "distance": float(distance[k]), "p": float(p[k]), "p_rows": float(p_rows[k])}
        return known | {"train": _moments(a[:, k]), "other": _moments(b[:, k])}

    first = np.lexsort((-distance, p))[:SHOWN]
    return {"tests": len(distance), "worst": [test(int(k)) for k in first], "farthest": test(int(distance.argmax()))}


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
    beyond = found - float(drawn.mean())
    p = float(stats.norm.sf(beyond / max(drawn.std(), 1e-12)))
    unknown = {"train": [None, None], "other": [None, None]}  # numbers of tokens have no mean
    return {"name": "the frequency of tokens", "distance": max(0.0, beyond), "p": p, "p_rows": p, **unknown}


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
