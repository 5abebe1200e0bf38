"""A split into training, validation and test examples that is the same on every machine."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["stratified_split"]

Indices = npt.NDArray[np.int64]


def stratified_split(
    labels: npt.ArrayLike, *, validation: float = 0.15, test: float = 0.15, seed: int = 0
) -> tuple[Indices, Indices, Indices]:
    """Return sorted indices of the training, validation and test examples, every class in the same shares.

    Args:
        labels: integer class of every example, shape (examples,).
        validation: share of each class that goes to validation.
        test: share of each class that goes to test.
        seed: decides which examples; the same seed gives the same split.
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
