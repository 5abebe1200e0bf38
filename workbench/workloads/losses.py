"""Losses, metrics, labels and predictions example by example, and the three kinds of workload that are made of them.

Losses and metrics have shape (batch,), run under `torch.func.vmap`, and ask the device for a value only to explain an error.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NotRequired, Required, TypedDict, Unpack

from torch import Tensor, nn
from torch.nn import functional as F

from workbench.config import TrainConfig
from workbench.errors import TargetError, UsageError, WorkloadError
from workbench.workloads.base import Workload, second_of_batch

Targets = Callable[[Any], Tensor]
NOT_A_CLASS = -(2**31)  # nothing is ignored: torch's default would pass over every target of -100 in silence
MAX_VALUES = 4096  # rule of thumb: an example whose output has more values than this is no table's business


def forward_tokens(model: Callable[[Any], Any], batch: Any) -> Any:
    """Return the model's logits for `(inputs, targets)`, or for all but the last of a tensor of tokens."""
    return model(batch[:, :-1]) if isinstance(batch, Tensor) else model(batch[0])


def next_tokens(batch: Any) -> Tensor:
    """Return the targets of `(inputs, targets)`, or all but the first of a tensor of tokens."""
    targets: Tensor = batch[:, 1:] if isinstance(batch, Tensor) else second_of_batch(batch)
    return targets


@dataclass(frozen=True)
class CrossEntropy:
    """Cross-entropy of logits (batch, classes) against integer classes (batch,), in nats."""

    targets: Targets = second_of_batch

    def __call__(self, outputs: Tensor, batch: Any) -> Tensor:
        """Return nats per example, shape (batch,)."""
        return _cross_entropy(outputs, self.targets(batch), NOT_A_CLASS)


@dataclass(frozen=True)
class Accuracy:
    """1.0 where the largest logit is the target's, else 0.0."""

    targets: Targets = second_of_batch

    def __call__(self, outputs: Tensor, batch: Any) -> Tensor:
        """Return 0.0 or 1.0 per example, shape (batch,)."""
        return (outputs.argmax(-1) == self.targets(batch)).float()


@dataclass(frozen=True)
class SquaredError:
    """Squared error, the mean over an example's values; shapes must agree, nothing broadcasts."""

    targets: Targets = second_of_batch

    def __call__(self, outputs: Tensor, batch: Any) -> Tensor:
        """Return squared target units per example, shape (batch,)."""
        return _per_example(_difference(outputs, self.targets(batch)).square())


@dataclass(frozen=True)
class AbsoluteError:
    """Absolute error, the mean over an example's values; shapes must agree, nothing broadcasts."""

    targets: Targets = second_of_batch

    def __call__(self, outputs: Tensor, batch: Any) -> Tensor:
        """Return target units per example, shape (batch,)."""
        return _per_example(_difference(outputs, self.targets(batch)).abs())


@dataclass(frozen=True)
class TokenCount:
    """The tokens of an example that count: what it weighs in every mean."""

    targets: Targets
    ignore_index: int

    def __call__(self, batch: Any) -> Tensor:
        """Return tokens per example, shape (batch,)."""
        return (self.targets(batch) != self.ignore_index).sum(-1).float()


@dataclass(frozen=True)
class TokenCrossEntropy:
    """Cross-entropy of logits (batch, length, vocabulary), in nats, the mean over an example's counted tokens; 0 without any.

    `z_loss` times log Z squared is in the gradient and not in the value, so that losses compare whatever it is.
    """

    targets: Targets = next_tokens
    ignore_index: int | None = None
    z_loss: float = 0.0

    def __call__(self, outputs: Tensor, batch: Any) -> Tensor:
        """Return nats per token for each example, shape (batch,)."""
        targets = _token_targets(outputs, self.targets(batch))
        ignored = NOT_A_CLASS if self.ignore_index is None else self.ignore_index
        losses = _cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignored).view(targets.shape)
        if self.z_loss:
            penalty = self.z_loss * outputs.logsumexp(-1).square()
            losses = losses + (penalty - penalty.detach())
        return _token_mean(losses, targets, self.ignore_index)


@dataclass(frozen=True)
class TokenAccuracy:
    """Share, in [0, 1], of an example's counted tokens whose largest logit is the target's."""

    targets: Targets = next_tokens
    ignore_index: int | None = None

    def __call__(self, outputs: Tensor, batch: Any) -> Tensor:
        """Return a share per example, shape (batch,)."""
        targets = _token_targets(outputs, self.targets(batch))
        return _token_mean((outputs.argmax(-1) == targets).float(), targets, self.ignore_index)


def classes_of(loss: object, outputs: object) -> int | None:
    """Return among how many classes a cross-entropy chooses, given the model's outputs; None for any other loss."""
    if not isinstance(outputs, Tensor) or outputs.dim() < 2:
        return None
    if isinstance(loss, TokenCrossEntropy):
        return int(outputs.shape[-1])
    return int(outputs.shape[1]) if isinstance(loss, CrossEntropy) else None


def _per_example(values: Tensor) -> Tensor:
    return values.flatten(1).mean(1) if values.dim() > 1 else values


def _token_mean(values: Tensor, targets: Tensor, ignore_index: int | None) -> Tensor:
    if ignore_index is None:
        return values.mean(-1)
    counted = targets != ignore_index
    return (values * counted).sum(-1) / counted.sum(-1).clamp(min=1)


def _difference(outputs: Tensor, targets: Tensor) -> Tensor:
    _check_tensor(outputs)
    if outputs.shape != targets.shape:
        raise WorkloadError(
            f"outputs of shape {tuple(outputs.shape)} against targets of shape {tuple(targets.shape)}: they must "
            "be equal, because broadcasting would compare every output with every target. For (batch, 1) against "
            "(batch,) end the model with .squeeze(-1), or give targets=lambda batch: batch[1].unsqueeze(-1)."
        )
    return outputs - targets


def _token_targets(outputs: Tensor, targets: Tensor) -> Tensor:
    _check_tensor(outputs)
    if outputs.dim() != 3 or outputs.shape[:2] != targets.shape:
        raise WorkloadError(
            f"outputs of shape {tuple(outputs.shape)} against targets of shape {tuple(targets.shape)}: a language "
            "model gives logits (batch, length, vocabulary) for targets (batch, length). A batch is (inputs, targets), "
            "or one tensor of tokens (batch, length + 1)."
        )
    return targets


def _cross_entropy(outputs: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
    _check_tensor(outputs)
    if not targets.is_floating_point():
        targets = targets.long()
        if outputs.dim() == 2 and outputs.shape[:1] == targets.shape:
            try:
                return F.cross_entropy(outputs, targets, reduction="none", ignore_index=ignore_index)
            except (IndexError, RuntimeError) as error:
                raise _explain(outputs, targets, ignore_index, error) from error
    raise WorkloadError(
        f"outputs of shape {tuple(outputs.shape)} against targets of shape {tuple(targets.shape)} and type "
        f"{targets.dtype}: cross-entropy takes logits (batch, classes) and integer classes (batch,). For targets "
        "(batch, 1) give targets=lambda batch: batch[1].squeeze(-1)."
    )


def _explain(outputs: Tensor, targets: Tensor, ignore_index: int, error: Exception) -> WorkloadError:
    classes = outputs.shape[-1]
    try:
        bad = targets[((targets < 0) | (targets >= classes)) & (targets != ignore_index)]
        value = int(bad[0]) if bad.numel() else None
        low, high = (int(end) for end in targets[targets != ignore_index].aminmax()) if bad.numel() else (0, 0)
    except (RuntimeError, IndexError):  # under vmap, or after a device-side assert, no value can be read
        value = None
    if value is None:
        return WorkloadError(f"cross-entropy failed on outputs of shape {tuple(outputs.shape)}: {error}")
    fix = f"Give the model at least {high + 1} outputs: the targets go from 0 to {high}."
    if low != 0:  # they may begin elsewhere
        more = ", and give the model as many outputs as there are classes" if high >= classes else ""
        fix = f"Number the classes from 0, in every split alike{more}."
    return TargetError(f"target {value} is out of range ({classes} outputs, so classes are 0 to {classes - 1}). {fix}")


def _check_tensor(outputs: object) -> None:
    if not isinstance(outputs, Tensor):
        raise WorkloadError(
            f"the model returned {type(outputs).__name__}, but the loss needs a tensor. Pick it in forward, for example "
            "forward=lambda model, batch: model(batch[0]).logits."
        )


def label_of(loss: object, batch: Any, examples: int, *, place: int = 1) -> Tensor | None:
    """Return the labels of a collated batch, shape (examples, ...); None where nobody can tell what they are."""
    targets, found = getattr(loss, "targets", None), None
    if callable(targets):
        found = targets(batch)
    elif isinstance(batch, Sequence) and len(batch) > place:
        found = batch[place]
    if not isinstance(found, Tensor) or found.dim() == 0 or found.shape[0] != examples:
        return None
    return found if found.shape[1:].numel() <= MAX_VALUES else None


def prediction_of(
    outputs: Any, labels: Tensor | None, examples: int, rows: Sequence[int] | None = None
) -> Tensor | None:
    """Return the prediction for each example, shape (rows, ...); None where the outputs are no tensor of examples (P2.12).

    Integer labels call for a class: the largest output along the axis that the labels do not have, the last one where two would do.
    Everything else is the output itself, without a last axis of one that the labels do not have. `labels` are those of the whole batch.
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


class WorkloadFields(TypedDict, total=False):
    """The fields of a `Workload` that the person fills in; loss and metrics come from its kind."""

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
        **fields: `name`, `build_model`, `train_data`, `validation_data`, `config`, and what else `Workload` takes; outputs are logits of shape (batch, classes).
    """
    return Workload(loss=CrossEntropy(targets), metrics={"accuracy": Accuracy(targets)}, **fields)


def regression(*, targets: Callable[[Any], Tensor] = second_of_batch, **fields: Unpack[WorkloadFields]) -> Workload:
    """Return a workload with squared error and absolute error, means over what an example has.

    Args:
        targets: `batch -> tensor` of exactly the outputs' shape; the default is `batch[1]`.
        **fields: `name`, `build_model`, `train_data`, `validation_data`, `config`, and what else `Workload` takes; outputs have shape (batch,) or (batch, ...).
    """
    return Workload(loss=SquaredError(targets), metrics={"absolute_error": AbsoluteError(targets)}, **fields)


def language_model(
    *,
    targets: Callable[[Any], Tensor] = next_tokens,
    ignore_index: int | None = -100,
    z_loss: float = 0.0,
    **fields: Unpack[WorkloadFields],
) -> Workload:
    """Return a workload with next-token cross-entropy and token accuracy.

    An example's loss is the mean over its counted tokens, and its weight is how many there are, so every mean is a mean
    over tokens, however they are padded.

    Args:
        targets: `batch -> (batch, length)`; the default takes `(inputs, targets)` or a tensor of tokens, whose next
            token is then the target.
        ignore_index: the target that marks padding; None when there is none, and every example then weighs the same.
        z_loss: coefficient of log Z squared, Z the softmax's denominator, which keeps the output logits from drifting; 1e-4 is usual
            (Chowdhery et al. 2022, arXiv:2204.02311, section 5). It acts through the gradient: losses are shown without it.
        **fields: `name`, `build_model`, `train_data`, `validation_data`, `config`, and what else `Workload` takes; outputs are logits of shape (batch, length, vocabulary).
    """
    if not 0 <= z_loss < math.inf:
        raise UsageError(f"z_loss={z_loss!r} must be a finite number of at least 0; 1e-4 is usual, 0 is none.")
    fields.setdefault("forward", forward_tokens)
    if ignore_index is not None:
        fields.setdefault("weights", TokenCount(targets, ignore_index))
    return Workload(
        loss=TokenCrossEntropy(targets, ignore_index, z_loss),
        metrics={"token_accuracy": TokenAccuracy(targets, ignore_index)},
        **fields,
    )
