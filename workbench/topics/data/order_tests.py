"""Is an order random: of indices, of labels, of two epochs against each other; each test with its p, exact or asymptotic."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import chi2, norm, poisson, rankdata

__all__ = ["epoch_agreement", "index_order", "label_order"]

BLOCKS = 20
BUFFER_DELAY = 2 / np.e
"""Mean distance from its place of an item that waits in a shuffle buffer of size 1: the waiting time is exponential."""


def index_order(indices: NDArray[np.int64]) -> dict[str, Any]:
    """Return how random an order of indices is, against all orders being as likely.

    Args:
        indices: in the order in which they are read, shape (examples,); drawn with or without replacement.

    Returns:
        "displacement": mean distance of an example from its place in storage, over that of a random order, n / 3 (Spearman's
        footrule, normal for large n: Diaconis and Graham 1977), "displacement_p" (as small); "successions": how often the next
        stored example follows, about 1 in a random order of n, Poisson, "successions_p" (as many); "examples"; "buffer": size
        of the shuffle buffer that would give this displacement.
    """
    n = len(indices)
    places = rankdata(indices)
    distance = np.abs(places - np.arange(1, n + 1))
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
    """Return how random an order of labels is, against all orders of the same labels being as likely.

    Args:
        labels: in the order in which they are read, shape (examples,); classes, or numbers that seldom repeat.

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
    equal = float((codes[1:] == codes[:-1]).sum())
    expected, deviation = _joins(counts)
    most = n - len(values)
    return {
        "examples": n,
        "neighbours": (equal - expected) / max(most - expected, 1e-9) if most > expected else 0.0,
        "neighbours_p": float(norm.sf((equal - 0.5 - expected) / deviation)) if deviation > 0 else 1.0,
        "drift_p": _drift(codes, counts),
    }


def epoch_agreement(first: NDArray[Any], second: NDArray[Any]) -> dict[str, Any]:
    """Return how alike two epochs order the same items, against independent orders.

    Args:
        first: what identifies each item (its index, or a hash), in order, shape (examples,).
        second: of the next epoch.

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
    return {"same": same, "displacement": found["displacement"], "displacement_p": found["displacement_p"]}


def _joins(counts: NDArray[np.float64]) -> tuple[float, float]:
    """Return mean and deviation of the number of neighbours of one class over all orders (Mood 1940, on runs)."""
    n = counts.sum()
    squares, cubes = (counts**2).sum(), (counts**3).sum()
    mean = (squares - n) / n
    variance = (squares * (squares + n * (n + 1)) - 2 * n * cubes - n**3) / (n**2 * (n - 1))
    return float(mean), float(np.sqrt(max(variance, 0.0)))


def _drift(codes: NDArray[np.int64], counts: NDArray[np.float64]) -> float | None:
    """Return the chance of classes as unevenly spread over blocks of the order; None where a cell expects too few."""
    n = len(codes)
    blocks = int(min(BLOCKS, n * counts.min() / n / 5))
    if blocks < 2:
        blocks = min(BLOCKS, n // 50)
        if blocks < 2:
            return None
    block = np.arange(n) * blocks // n
    table = np.zeros((blocks, len(counts)))
    np.add.at(table, (block, codes), 1.0)
    kept = counts / blocks >= 5
    if kept.sum() < 2:
        return None
    table = table[:, kept]
    expected = np.outer(table.sum(1), table.sum(0)) / table.sum()
    return float(chi2.sf(((table - expected) ** 2 / expected).sum(), (blocks - 1) * (kept.sum() - 1)))
