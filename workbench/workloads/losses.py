"""Losses and metrics per example, shape (batch,): what the helpers put into a `Workload`.

They run under `torch.func.vmap` and never ask the device for a value, except to explain an error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from workbench.errors import TargetError, WorkloadError
from workbench.workloads.base import second_of_batch

__all__ = [
    "AbsoluteError",
    "Accuracy",
    "CrossEntropy",
    "SquaredError",
    "TokenAccuracy",
    "TokenCount",
    "TokenCrossEntropy",
    "classes_of",
    "forward_tokens",
    "next_tokens",
]

Targets = Callable[[Any], Tensor]
NOT_A_CLASS = -(2**31)  # nothing is ignored: torch's default would pass over every target of -100 in silence


def forward_tokens(model: Callable[[Any], Any], batch: Any) -> Any:
    """Return the model's logits for `(inputs, targets)`, or for all but the last of a tensor of tokens."""
    return model(batch[:, :-1]) if isinstance(batch, Tensor) else model(batch[0])


def next_tokens(batch: Any) -> Tensor:
    """Return the targets of `(inputs, targets)`, or all but the first of a tensor of tokens."""
    targets: Tensor = batch[:, 1:] if isinstance(batch, Tensor) else second_of_batch(batch)
    return targets


@dataclass(frozen=True)
class CrossEntropy:
    """Cross-entropy of logits (batch, classes) against integer classes (batch,)."""

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
        return _per_example((outputs - _same_shape(outputs, self.targets(batch))).square())


@dataclass(frozen=True)
class AbsoluteError:
    """Absolute error, the mean over an example's values; shapes must agree, nothing broadcasts."""

    targets: Targets = second_of_batch

    def __call__(self, outputs: Tensor, batch: Any) -> Tensor:
        """Return target units per example, shape (batch,)."""
        return _per_example((outputs - _same_shape(outputs, self.targets(batch))).abs())


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
    """Cross-entropy of logits (batch, length, vocabulary), the mean over an example's counted tokens."""

    targets: Targets = next_tokens
    ignore_index: int | None = None

    def __call__(self, outputs: Tensor, batch: Any) -> Tensor:
        """Return nats per token for each example, shape (batch,); 0 where no token counts."""
        targets = _token_targets(outputs, self.targets(batch))
        ignored = NOT_A_CLASS if self.ignore_index is None else self.ignore_index
        losses = _cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignored).view(targets.shape)
        return _token_mean(losses, targets, self.ignore_index)


@dataclass(frozen=True)
class TokenAccuracy:
    """Share of an example's counted tokens whose largest logit is the target's."""

    targets: Targets = next_tokens
    ignore_index: int | None = None

    def __call__(self, outputs: Tensor, batch: Any) -> Tensor:
        """Return a share in [0, 1] per example, shape (batch,)."""
        targets = _token_targets(outputs, self.targets(batch))
        return _token_mean((outputs.argmax(-1) == targets).float(), targets, self.ignore_index)


def _per_example(values: Tensor) -> Tensor:
    return values.flatten(1).mean(1) if values.dim() > 1 else values


def _token_mean(values: Tensor, targets: Tensor, ignore_index: int | None) -> Tensor:
    if ignore_index is None:
        return values.mean(-1)
    counted = targets != ignore_index
    return (values * counted).sum(-1) / counted.sum(-1).clamp(min=1)


def _same_shape(outputs: Tensor, targets: Tensor) -> Tensor:
    if not isinstance(outputs, Tensor):
        raise WorkloadError(_not_a_tensor(outputs))
    if outputs.shape != targets.shape:
        raise WorkloadError(
            f"outputs of shape {tuple(outputs.shape)} against targets of shape {tuple(targets.shape)}: they must "
            "be equal, because broadcasting would compare every output with every target. For (batch, 1) against "
            "(batch,) end the model with .squeeze(-1), or give targets=lambda batch: batch[1].unsqueeze(-1)."
        )
    return targets


def _token_targets(outputs: Tensor, targets: Tensor) -> Tensor:
    if not isinstance(outputs, Tensor):
        raise WorkloadError(_not_a_tensor(outputs))
    if outputs.dim() != 3 or outputs.shape[:2] != targets.shape:
        raise WorkloadError(
            f"outputs of shape {tuple(outputs.shape)} against targets of shape {tuple(targets.shape)}: a language "
            "model gives logits (batch, length, vocabulary) for targets (batch, length). A batch is (inputs, targets), "
            "or one tensor of tokens (batch, length + 1)."
        )
    return targets


def classes_of(loss: object, outputs: object) -> int | None:
    """Return among how many classes a cross-entropy chooses; None for any other loss.

    Args:
        loss: of a workload.
        outputs: what the model returned for a batch.
    """
    if not isinstance(outputs, Tensor) or outputs.dim() < 2:
        return None
    if isinstance(loss, TokenCrossEntropy):
        return int(outputs.shape[-1])
    return int(outputs.shape[1]) if isinstance(loss, CrossEntropy) else None


def _cross_entropy(outputs: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
    if not isinstance(outputs, Tensor):
        raise WorkloadError(_not_a_tensor(outputs))
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
    except (RuntimeError, IndexError):  # under vmap, or after a device-side assert, no value can be read
        value = None
    if value is None:
        return WorkloadError(f"cross-entropy failed on outputs of shape {tuple(outputs.shape)}: {error}")
    return TargetError(
        f"target {value} is out of range: the model has {classes} outputs, so classes are 0 to {classes - 1}. Give the "
        "model as many outputs as there are classes, and number the classes from 0."
    )


def _not_a_tensor(outputs: object) -> str:
    return (
        f"the model returned {type(outputs).__name__}, but the loss needs a tensor. Pick it in forward, for example "
        "forward=lambda model, batch: model(batch[0]).logits."
    )
