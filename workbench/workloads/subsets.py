"""Parts of a dataset: train, validation and test, a validation subset for periodic evaluation (P2.3), a named sample (P3.1)."""

import hashlib
import itertools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import IterableDataset, Subset, TensorDataset

from workbench.errors import DataError, UsageError, nearest
from workbench.workloads.base import Workload
from workbench.workloads.items import in_its_own_order, plain_tensors

Indices = npt.NDArray[np.int64]
How = Literal["stratified", "random"]


def stratified_split(
    labels: npt.ArrayLike, *, validation: float = 0.15, test: float = 0.15, seed: int = 0
) -> tuple[Indices, Indices, Indices]:
    """Return sorted indices of the training, validation and test examples, every class in the same shares.

    By hand, because scikit-learn promises no split that stays the same from one version to the next.
    """
    rng = np.random.default_rng(seed)
    classes = np.asarray(labels)
    parts: tuple[list[Indices], list[Indices], list[Indices]] = ([], [], [])
    for label in np.unique(classes):
        members = rng.permutation(np.flatnonzero(classes == label))
        cuts = [round(len(members) * validation), round(len(members) * (validation + test))]
        for part, chosen in zip(parts, np.split(members, cuts), strict=True):
            part.append(chosen)
    validation_part, test_part, train_part = (np.sort(np.concatenate(part)) for part in parts)
    return train_part, validation_part, test_part


@dataclass(frozen=True)
class SubsetOf:
    """What a dataset is a part of, kept as its attribute `subset_of`: the subset's name, its indices, the whole split."""

    id: str
    indices: tuple[int, ...]
    data: Any

    def describe(self) -> dict[str, Any]:
        """Return id, size, size of the whole and a checksum of the indices, as JSON values."""
        return {"id": self.id, "size": len(self.indices), "of": len(self.data), "crc32": _checksum(self.indices)}


def periodic_subset(
    workload: Workload, examples: int | Sequence[int], *, id: str | None = None, seed: int = 0
) -> Workload:
    """Return the workload with a part of its validation split in place of it; rows of `.evals` name that part.

    What is trained stays the same. `evaluate_offline` finds the whole split again.

    Args:
        workload: to evaluate more cheaply.
        examples: how many, drawn at random without replacement, or the indices of the ones to take.
        id: how records name the subset; None writes size and seed, or a checksum of the indices.

    Raises:
        UsageError: a number or an index that the split does not have, or one index twice.
        DataError: the split cannot be indexed.
    """
    data = whole(workload).validation_data
    if in_its_own_order(data):
        raise DataError(
            f"workload {workload.name!r}: a subset needs validation_data with __getitem__, and it is iterable only."
        )
    indices = _indices(examples, len(data), seed)
    tensors = plain_tensors(data)
    part: Any = (
        Subset(data, indices) if tensors is None else TensorDataset(*(t[torch.tensor(indices)] for t in tensors))
    )
    drawn = isinstance(examples, int)
    name = id or (f"random-{len(indices)}-seed{seed}" if drawn else f"chosen-{_checksum(indices)}")
    part.subset_of = SubsetOf(name, tuple(indices), data)
    return workload.replace(validation_data=part)


def subset_of(data: Any) -> SubsetOf | None:
    """Return what a dataset is a named part of; None for a whole split."""
    found = getattr(data, "subset_of", None)
    return found if isinstance(found, SubsetOf) else None


def whole(workload: Workload) -> Workload:
    """Return the workload with its whole validation split."""
    part = subset_of(workload.validation_data)
    return workload if part is None else workload.replace(validation_data=part.data)


def example_ids(data: Any) -> Sequence[int]:
    """Return the ids of a split's examples in the order of evaluation: their places in the whole split."""
    part = subset_of(data)
    return range(len(data)) if part is None else part.indices


def check_examples(examples: Any) -> None:
    """Raise a `UsageError` unless it is a number of examples or a list of indices; the split need not be there yet."""
    if isinstance(examples, int) and not isinstance(examples, bool) and examples >= 1:
        return
    if isinstance(examples, (str, bytes)) or not hasattr(examples, "__iter__"):
        raise UsageError(
            f"examples={examples!r} must be an integer of at least 1, or a list of indices, such as [0, 5, 9]."
        )
    for place, index in enumerate(examples):
        if isinstance(index, (bool, np.bool_)) or not hasattr(index, "__index__"):
            raise UsageError(f"examples[{place}]={index!r} must be an integer: the place of an example in the split.")


def _checksum(indices: Sequence[int]) -> str:
    return f"{zlib.crc32(np.asarray(indices, dtype=np.int64).tobytes()):08x}"


def _indices(examples: int | Sequence[int], size: int, seed: int) -> list[int]:
    check_examples(examples)
    if isinstance(examples, int):
        if examples > size:
            raise UsageError(
                f"examples={examples!r} must be 1 to {size}, the examples of the validation split, or a list of indices."
            )
        return sorted(np.random.default_rng(seed).choice(size, examples, replace=False).tolist())
    chosen = [int(index) for index in examples]
    wrong = [index for index in chosen if not 0 <= index < size]
    if not chosen or wrong or len(set(chosen)) < len(chosen):
        what = "is empty" if not chosen else f"holds {wrong[0]}" if wrong else "contains an index twice"
        raise UsageError(f"examples {what}: give indices of the validation split, 0 to {size - 1}, each once.")
    return chosen


def draw_sample(
    data: Any, size: int, *, how: How = "random", labels: Sequence[int] | npt.NDArray[Any] | None = None, seed: int = 0
) -> Subset[Any]:
    """Return `size` examples of a dataset, drawn without replacement, in their order; the same arguments give the same ones.

    Args:
        data: the full set, map-style.
        how: "random", or "stratified": each class of `labels` in its share of the full set, to one example, and at least one
            of each class where `size` permits.
        labels: class of every example, shape (examples,), for "stratified".

    Raises:
        UsageError: `size` is out of its range, `how` is unknown, or "stratified" has no labels.
        DataError: the dataset has no index to draw by, or `labels` do not fit it.
    """
    check_drawable(data)
    total = len(data)
    if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or not 1 <= size <= total:
        raise UsageError(f"size={size!r} must be an integer from 1 to {total}, the examples of the full set.")
    if how not in get_args(How):
        raise UsageError(f"how={how!r} is not a way to draw a sample.{nearest(how, get_args(How))}")
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
    return Subset(data, sorted(int(i) for i in chosen))


def at_most(data: Any, count: int) -> Any:
    """Return so many random examples of a dataset, or all of them where it has no more; of one in its own order the first."""
    if in_its_own_order(data):
        return list(itertools.islice(data, count))
    return data if len(data) <= count else draw_sample(data, count)


def check_drawable(data: Any) -> None:
    """Raise a `DataError` where `data` is read in its own order and has no index to draw a sample by."""
    if isinstance(data, IterableDataset) or not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
        raise DataError(
            f"{type(data).__name__} has no index to draw a sample by: make it map-style, with __len__ and __getitem__."
        )


def sample_id(indices: Sequence[int]) -> str:
    """Return the name of the sample with these indices into the full set, in whatever order."""
    ordered = np.sort(np.asarray(indices, dtype="<i8"))
    return hashlib.sha256(ordered.tobytes()).hexdigest()[:12]


def _stratified(labels: npt.NDArray[Any], size: int, rng: np.random.Generator) -> Indices:
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
