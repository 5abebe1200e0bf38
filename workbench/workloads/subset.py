"""`periodic_subset`: a workload whose periodic evaluations use a named part of the validation split (P2.3)."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset, TensorDataset

from workbench.errors import DataError, UsageError
from workbench.workloads.base import Workload
from workbench.workloads.item_access import in_its_own_order, plain_tensors

__all__ = ["SubsetOf", "check_examples", "example_ids", "periodic_subset", "subset_of", "whole"]


@dataclass(frozen=True)
class SubsetOf:
    """What a dataset is a part of, kept as its attribute `subset_of`.

    Attributes:
        id: the subset's name in the record.
        indices: of its examples in the whole split, in order.
        data: the whole split.
    """

    id: str
    indices: tuple[int, ...]
    data: Any

    def describe(self) -> dict[str, Any]:
        """Return id, size, size of the whole and a checksum of the indices, as JSON values."""
        content = np.asarray(self.indices, dtype=np.int64).tobytes()
        return {"id": self.id, "size": len(self.indices), "of": len(self.data), "crc32": f"{zlib.crc32(content):08x}"}


def periodic_subset(
    workload: Workload, examples: int | Sequence[int], *, id: str | None = None, seed: int = 0
) -> Workload:
    """Return the workload with a part of its validation split in place of it; rows of `.evals` name that part.

    What is trained stays the same. `evaluate_offline` finds the whole split again.

    Args:
        workload: to evaluate more cheaply.
        examples: how many, drawn at random without replacement, or the indices of the ones to take.
        id: how records name the subset; None writes size and seed, or a checksum of the indices.
        seed: of the draw.

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
    drawn = isinstance(examples, int)
    part: Any
    if (tensors := plain_tensors(data)) is not None:
        part = TensorDataset(*(t[torch.tensor(indices)] for t in tensors))
    else:
        part = Subset(data, indices)
    checksum = SubsetOf("", tuple(indices), data).describe()["crc32"]
    part.subset_of = SubsetOf(
        id or (f"random-{len(indices)}-seed{seed}" if drawn else f"chosen-{checksum}"), tuple(indices), data
    )
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
    """Check that it is a number of examples or a list of indices, before there is a split.

    Raises:
        UsageError: it is neither.
    """
    if isinstance(examples, int) and not isinstance(examples, bool) and examples >= 1:
        return
    if isinstance(examples, (str, bytes)) or not hasattr(examples, "__iter__"):
        raise UsageError(
            f"examples={examples!r} must be an integer of at least 1, or a list of indices, such as [0, 5, 9]."
        )
    for place, index in enumerate(examples):
        if isinstance(index, (bool, np.bool_)) or not hasattr(index, "__index__"):
            raise UsageError(f"examples[{place}]={index!r} must be an integer: the place of an example in the split.")


def _indices(examples: int | Sequence[int], size: int, seed: int) -> list[int]:
    check_examples(examples)
    if isinstance(examples, int) and not 1 <= examples <= size:
        raise UsageError(
            f"examples={examples!r} must be 1 to {size}, the examples of the validation split, or a list of indices."
        )
    if isinstance(examples, int):
        return sorted(np.random.default_rng(seed).choice(size, examples, replace=False).tolist())
    chosen = [int(index) for index in examples]
    wrong = [index for index in chosen if not 0 <= index < size]
    if not chosen or wrong or len(set(chosen)) < len(chosen):
        what = "is empty" if not chosen else f"holds {wrong[0]}" if wrong else "holds an index twice"
        raise UsageError(f"examples {what}: give indices of the validation split, 0 to {size - 1}, each once.")
    return chosen
