"""`draw_sample`: a part of a dataset for periodic evaluation, at random or stratified, with a name that says which (P3.1)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, Subset

from workbench.errors import DataError, UsageError, nearest
from workbench.workloads.base import Workload

__all__ = ["EvaluationSample", "How", "check_drawable", "draw_sample", "sample_id", "sampled_workload"]

How = Literal["stratified", "random"]


@dataclass(frozen=True, kw_only=True)
class EvaluationSample:
    """A part of a dataset under a name.

    Attributes:
        data: the part, a torch `Subset`; its attribute `sample_id` is the name as well.
        id: twelve hexadecimal digits of a hash of the indices: two samples with the same name are the same examples.
        size: examples in it.
        how: "stratified" or "random".
        seed: that drew it.
    """

    data: Subset[Any]
    id: str
    size: int
    how: str
    seed: int

    @property
    def indices(self) -> list[int]:
        """Where its examples stand in the full set, in increasing order."""
        return list(self.data.indices)

    def __repr__(self) -> str:
        """Return id, size and how it was drawn."""
        return f"EvaluationSample({self.id!r}, {self.size} examples, {self.how}, seed {self.seed})"


def draw_sample(
    data: Any, size: int, *, how: How = "random", labels: Sequence[int] | NDArray[Any] | None = None, seed: int = 0
) -> EvaluationSample:
    """Return `size` examples of a dataset, drawn without replacement; the same arguments give the same ones.

    Args:
        data: the full set, map-style.
        size: examples to draw, from 1 to all.
        how: "random", or "stratified": each class of `labels` in its share of the full set, to one example, and at least one
            of each class where `size` permits.
        labels: class of every example, shape (examples,), for "stratified".
        seed: decides which examples.

    Raises:
        UsageError: `size` is out of its range, `how` is unknown, or "stratified" has no labels.
        DataError: the dataset has no index to draw by, or `labels` do not fit it.
    """
    check_drawable(data)
    total = len(data)
    if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or not 1 <= size <= total:
        raise UsageError(f"size={size!r} must be an integer from 1 to {total}, the examples of the full set.")
    if how not in get_args(How):
        raise UsageError(f"how={how!r} is no way to draw a sample.{nearest(how, get_args(How))}")
    rng = np.random.default_rng(seed)
    if how == "random":
        chosen = rng.choice(total, int(size), replace=False)
    elif labels is None:
        raise UsageError("how='stratified' needs labels, one class for each example; how='random' needs none.")
    else:
        known = np.asarray(labels)
        if known.shape != (total,):
            raise DataError(
                f"labels have shape {known.shape}, but the full set has {total} examples: give one class each."
            )
        chosen = _stratified(known, int(size), rng)
    indices = sorted(int(i) for i in chosen)
    part: Subset[Any] = Subset(data, indices)
    name = sample_id(indices)
    setattr(part, "sample_id", name)  # noqa: B010 - whoever evaluates on it can write down what it was
    return EvaluationSample(data=part, id=name, size=len(indices), how=how, seed=seed)


def check_drawable(data: Any) -> None:
    """Check that a sample can be drawn from `data`.

    Raises:
        DataError: it is read in its own order and has no index to draw by.
    """
    if isinstance(data, IterableDataset) or not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
        raise DataError(
            f"{type(data).__name__} has no index to draw a sample by: make it map-style, with __len__ and __getitem__."
        )


def sampled_workload(workload: Workload, sample: EvaluationSample) -> Workload:
    """Return the workload with the sample as its validation set.

    Args:
        workload: whose validation set the sample was drawn from.
        sample: of `draw_sample`.
    """
    return workload.replace(validation_data=sample.data)


def sample_id(indices: Sequence[int]) -> str:
    """Return the name of the sample with these indices, in whatever order.

    Args:
        indices: into the full set.
    """
    ordered = np.sort(np.asarray(indices, dtype="<i8"))
    return hashlib.sha256(ordered.tobytes()).hexdigest()[:12]


def _stratified(labels: NDArray[Any], size: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Return indices with every class in its share, by largest remainder."""
    classes, codes = np.unique(labels, return_inverse=True)
    full = np.bincount(codes, minlength=len(classes))
    exact = full * (size / len(labels))
    counts = np.floor(exact).astype(np.int64)
    if size >= len(classes):
        counts = np.maximum(counts, 1)
    order = rng.permutation(len(classes))  # ties between remainders go by chance, not to the first class
    while counts.sum() != size:
        gap = exact - counts
        if counts.sum() < size:
            left = order[counts[order] < full[order]]
            counts[left[np.argmax(gap[left])]] += 1
        else:
            left = order[counts[order] > 1]
            counts[left[np.argmin(gap[left])]] -= 1
    parts = [rng.choice(np.flatnonzero(codes == k), count, replace=False) for k, count in enumerate(counts)]
    return np.concatenate(parts)
