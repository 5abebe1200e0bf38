"""What a model predicted, example by example, read from its outputs: a class, a number, or a short list of them (P2.12)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

__all__ = ["MAX_VALUES", "label_of", "prediction_of"]

MAX_VALUES = 4096  # rule of thumb: an example whose output has more values than this is no table's business


def label_of(loss: object, batch: Any, examples: int, *, place: int = 1) -> Tensor | None:
    """Return the labels of a batch, shape (examples, ...); None where nobody can tell what they are.

    Args:
        loss: of the workload; those of `classification(...)` and its kind know their targets. For any other loss it is
            the part of the batch at `place`.
        batch: as collated.
        examples: in the batch.
        place: of the target in a batch of several parts.
    """
    targets = getattr(loss, "targets", None)
    found = (
        targets(batch)
        if callable(targets)
        else batch[place]
        if isinstance(batch, Sequence) and len(batch) > place
        else None
    )
    if not isinstance(found, Tensor) or found.dim() == 0 or found.shape[0] != examples:
        return None
    return found if found.shape[1:].numel() <= MAX_VALUES else None


def prediction_of(
    outputs: Any, labels: Tensor | None, examples: int, rows: Sequence[int] | None = None
) -> Tensor | None:
    """Return the prediction for each example, shape (rows, ...); None where the outputs are no tensor of examples.

    Integer labels ask for a class: the largest output along the axis that the labels do not have, the last one where two
    would do. Everything else is the output itself, without a last axis of one that the labels do not have.

    Args:
        outputs: what forward returned.
        labels: of all examples of the batch, None where unknown.
        examples: in the batch.
        rows: of the examples to look at; None is all.
    """
    if not isinstance(outputs, Tensor) or outputs.dim() == 0 or outputs.shape[0] != examples:
        return None
    found = outputs if rows is None else outputs[rows]
    if labels is not None and outputs.dim() == labels.dim() + 1:
        axis = -1 if outputs.shape[:-1] == labels.shape else 1 if outputs.shape[2:] == labels.shape[1:] else None
        if axis is not None and outputs.shape[axis] == 1:
            found = found.squeeze(axis)
        elif axis is not None and not labels.is_floating_point():
            found = found.argmax(axis)
    return found if found.shape[1:].numel() <= MAX_VALUES else None
