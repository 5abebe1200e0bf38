"""How random an order of indices, labels or rows is."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import chi2_contingency, norm, poisson, rankdata

BLOCKS = 20
# mean distance from its place of an item in a shuffle buffer of size 1: the waiting time is exponential
BUFFER_DELAY = 2 / np.e


def index_order(indices: NDArray[np.int64]) -> dict[str, Any]:
    """Return how random an order of `indices` is, shape (examples,), against all orders being as likely.

    Returns:
        "displacement": mean distance of an example from its place in storage, over that of a random order, n / 3 (Spearman's
        footrule, normal for large n: Diaconis and Graham 1977), "displacement_p" (as small); "successions": how often the next
        stored example follows, about 1 in a random order of n, Poisson, "successions_p" (as many); "examples"; "buffer": size
        of the shuffle buffer that would give this displacement.
    """
    n = len(indices)
    distance = np.abs(rankdata(indices) - np.arange(1, n + 1))
    mean, deviation = (n * n - 1) / 3, np.sqrt((n + 1) * (2 * n * n + 7) / 45)
    follows = int((np.diff(indices) == 1).sum())
    return {
        "examples": n,
        "displacement": float(distance.sum() / mean) if n > 1 else 1.0,
        "displacement_p": float(norm.cdf((distance.sum() - mean) / deviation)),
        "successions": follows,
        "successions_p": float(poisson.sf(follows - 1, 1.0)),
        "buffer": float(distance.mean() / BUFFER_DELAY),
    }


def label_order(labels: NDArray[Any]) -> dict[str, Any]:
    """Return how random an order of `labels` is, shape (examples,), classes or numbers, against all orders of the same labels.

    Returns:
        "neighbours": by how much more often than by chance two in a row are of one class, 1 when sorted (for numbers: their
        correlation from one to the next), "neighbours_p"; "drift_p": chance of classes that are as unevenly spread over
        20 blocks (chi-squared; None for numbers), "examples".
    """
    labels = labels[np.isfinite(labels)] if labels.dtype.kind == "f" else labels
    n = len(labels)
    values, codes = np.unique(labels, return_inverse=True)
    if n < 2 or len(values) < 2:
        return {"examples": n, "neighbours": 0.0, "neighbours_p": 1.0, "drift_p": None}
    if len(values) > n / 2 and np.issubdtype(labels.dtype, np.number):
        centred = labels.astype(np.float64) - labels.astype(np.float64).mean()
        serial = float(centred[1:] @ centred[:-1] / (centred @ centred))
        p = float(norm.sf((serial + 1 / (n - 1)) * np.sqrt(n)))
        return {"examples": n, "neighbours": serial, "neighbours_p": p, "drift_p": None}
    counts = np.bincount(codes).astype(np.float64)
    equal, most = float((codes[1:] == codes[:-1]).sum()), n - len(values)
    squares, cubes = (counts**2).sum(), (counts**3).sum()
    expected = (squares - n) / n  # mean and variance over all orders: Mood 1940, on runs
    variance = (squares * (squares + n * (n + 1)) - 2 * n * cubes - n**3) / (n**2 * (n - 1))
    return {
        "examples": n,
        "neighbours": float((equal - expected) / max(most - expected, 1e-9)) if most > expected else 0.0,
        "neighbours_p": float(norm.sf((equal - 0.5 - expected) / np.sqrt(variance))) if variance > 0 else 1.0,
        "drift_p": _drift(codes, counts),
    }


def _drift(codes: NDArray[np.int64], counts: NDArray[np.float64]) -> float | None:
    """Return the chance of classes as unevenly spread over blocks of the order; None where a cell expects too few."""
    blocks = int(min(BLOCKS, counts.min() / 5))
    blocks = blocks if blocks >= 2 else min(BLOCKS, len(codes) // 50)
    kept = counts >= 5 * blocks
    if blocks < 2 or kept.sum() < 2:
        return None
    table = np.zeros((blocks, len(counts)))
    np.add.at(table, (np.arange(len(codes)) * blocks // len(codes), codes), 1.0)
    table = table[:, kept]
    return float(chi2_contingency(table[table.any(1)], correction=False).pvalue)


def epoch_agreement(first: NDArray[Any], second: NDArray[Any]) -> dict[str, Any]:
    """Return how alike two epochs order the same items (their indices, or hashes), against independent orders.

    Returns:
        "same": the two are equal; "displacement" and "displacement_p" as in `index_order`, of the second against the first;
        None where they share too few items.
    """
    same = len(first) == len(second) and bool((first == second).all())
    place = {value: k for k, value in enumerate(first.tolist())}
    shared = np.array([place[value] for value in second.tolist() if value in place], dtype=np.int64)
    if len(shared) < 10 or len(place) < len(first) / 2:
        return {"same": same, "displacement": None, "displacement_p": None}
    found = index_order(shared)
    return {"same": same} | {name: found[name] for name in ("displacement", "displacement_p")}
