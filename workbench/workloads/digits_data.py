"""The handwritten digits that scikit-learn ships: 1,797 images of 8x8, ten classes."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch.utils.data import TensorDataset

from workbench.workloads.splits import stratified_split

__all__ = ["Digits", "digits_data"]


class Digits(NamedTuple):
    """Three splits; an item is (image, class)."""

    train: TensorDataset
    validation: TensorDataset
    test: TensorDataset


@cache
def digits_data(*, flat: bool) -> Digits:
    """Return the digits, standardised by one mean and one deviation of the training pixels.

    Args:
        flat: images of shape (64,) instead of (1, 8, 8).
    """
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = torch.from_numpy(bunch.images).float()
    labels = torch.from_numpy(bunch.target).long()
    splits = [torch.from_numpy(indices) for indices in stratified_split(bunch.target)]
    train = images[splits[0]]
    images = (images - train.mean()) / train.std()
    images = images.flatten(1) if flat else images.unsqueeze(1)
    return Digits(*(TensorDataset(images[indices], labels[indices]) for indices in splits))
