"""`find_affine`: is the model a linear function of its inputs, however many layers it has?"""

from __future__ import annotations

from typing import Any

import torch

from workbench.topics.one_batch.batch import OneBatch

__all__ = ["find_affine"]


def find_affine(one: OneBatch) -> dict[str, Any] | None:
    """Return how far outputs halfway between two examples are from the mean of theirs; None where that cannot be asked.

    A linear function, with or without a bias, has the mean there: f((a + b) / 2) = (f(a) + f(b)) / 2. Only floating inputs are moved.

    Args:
        one: the batch, in evaluation mode for as long as it takes.

    Returns:
        "deviation": the largest difference over the largest difference of two examples' outputs.
    """
    if one.examples < 2 or not any(t.is_floating_point() for t in one.inputs()):
        return None
    own = one.flat(one.forward())
    others = one.flat(one.forward(one.changed(lambda t: t if t.is_floating_point() else t.roll(1, 0))))
    if not own.numel() or not torch.equal(own, others):  # a product with an embedding is no matter of layers
        return None
    rolled = one.flat(one.forward(one.changed(lambda t: t.roll(1, 0) if t.is_floating_point() else t)))
    between = one.flat(one.forward(one.changed(lambda t: (t + t.roll(1, 0)) / 2 if t.is_floating_point() else t)))
    if own.shape != rolled.shape or own.shape != between.shape:
        return None
    apart = float((own - rolled).abs().max())
    deviation = float((between - (own + rolled) / 2).abs().max())
    return {"deviation": deviation / apart} if apart > 1e-6 * float(own.abs().max()) else None
