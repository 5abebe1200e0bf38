"""`classification`, `regression` and `language_model`: the fields of a `Workload` but loss and metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NotRequired, Required, TypedDict, Unpack

from torch import Tensor, nn

from workbench.config import TrainConfig
from workbench.workloads.base import Workload, second_of_batch
from workbench.workloads.losses import (
    AbsoluteError,
    Accuracy,
    CrossEntropy,
    SquaredError,
    TokenAccuracy,
    TokenCount,
    TokenCrossEntropy,
    forward_tokens,
    next_tokens,
)

__all__ = ["WorkloadFields", "classification", "language_model", "regression"]


class WorkloadFields(TypedDict, total=False):
    """The fields of a `Workload` that the person fills in; loss and metrics come from the helper."""

    name: Required[str]
    build_model: Required[Callable[[], nn.Module]]
    train_data: Required[Any]
    validation_data: Required[Any]
    config: Required[TrainConfig]
    test_data: NotRequired[Any]
    weights: NotRequired[Callable[[Any], Tensor] | None]
    forward: NotRequired[Callable[[Any, Any], Any]]
    collate: NotRequired[Callable[[list[Any]], Any] | None]
    num_workers: NotRequired[int]
    minimised: NotRequired[bool]


def classification(*, targets: Callable[[Any], Tensor] = second_of_batch, **fields: Unpack[WorkloadFields]) -> Workload:
    """Return a workload with cross-entropy and accuracy.

    Args:
        targets: `batch -> (batch,)` integer classes; the default is `batch[1]`.
        **fields: every other field of `Workload`; outputs are logits of shape (batch, classes).
    """
    return Workload(loss=CrossEntropy(targets), metrics={"accuracy": Accuracy(targets)}, **fields)


def regression(*, targets: Callable[[Any], Tensor] = second_of_batch, **fields: Unpack[WorkloadFields]) -> Workload:
    """Return a workload with squared error and absolute error, means over what an example has.

    Args:
        targets: `batch -> tensor` of exactly the outputs' shape; the default is `batch[1]`.
        **fields: every other field of `Workload`; outputs have shape (batch,) or (batch, ...).
    """
    return Workload(loss=SquaredError(targets), metrics={"absolute_error": AbsoluteError(targets)}, **fields)


def language_model(
    *,
    targets: Callable[[Any], Tensor] = next_tokens,
    ignore_index: int | None = -100,
    **fields: Unpack[WorkloadFields],
) -> Workload:
    """Return a workload with next-token cross-entropy and token accuracy.

    An example's loss is the mean over its counted tokens, and its weight is how many there are, so every mean is a mean
    over tokens, however they are padded.

    Args:
        targets: `batch -> (batch, length)`; the default takes `(inputs, targets)` or a tensor of tokens, whose next
            token is then the target.
        ignore_index: the target that marks padding; None when there is none, and every example then weighs the same.
        **fields: every other field of `Workload`; outputs are logits of shape (batch, length, vocabulary).
    """
    fields.setdefault("forward", forward_tokens)
    if ignore_index is not None:
        fields.setdefault("weights", TokenCount(targets, ignore_index))
    return Workload(
        loss=TokenCrossEntropy(targets, ignore_index),
        metrics={"token_accuracy": TokenAccuracy(targets, ignore_index)},
        **fields,
    )
