"""`Callback`: what can be done while `fit` runs, and `History`, what it returns (T4.8 to T4.11)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from workbench.errors import UsageError, nearest

__all__ = ["Callback", "History", "Logs", "check_callbacks"]

Logs = Mapping[str, float]

HOOKS = ("on_epoch_begin", "on_epoch_end", "on_train_batch_end", "on_train_begin", "on_train_end")


class Callback:
    """Hooks of `fit`, all of them called on the coordinator, in one thread.

    Between `on_epoch_end` and `on_epoch_begin` nothing runs on the workers: this is where to change what the next epoch does, by
    `model.set_peak_lr`, or to end training, by `model.stop_training = True` (T8.2).

    Attributes:
        model: the `StrategyModel` that is trained, from `on_train_begin` on.
        every_steps: `on_train_batch_end` is called for every so many completed steps; the functions of the workers go on meanwhile.
    """

    model: Any
    every_steps: int = 1

    def on_train_begin(self) -> None:
        """Before the first epoch; may set `model.next_epoch` to go on from a later one."""

    def on_epoch_begin(self, epoch: int) -> None:
        """Before an epoch, counted from 0."""

    def on_train_batch_end(self, step: int, logs: Logs) -> None:
        """After a step, in order of completion, each step once (T14.9).

        Args:
            step: its number among those that `fit` scheduled.
            logs: loss and metrics of its batch.
        """

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """After an epoch, when each of its steps has ended and it was evaluated.

        Args:
            epoch: counted from 0.
            logs: loss and metrics over the epoch's batches; with "val_" in front, over the validation data.
        """

    def on_train_end(self) -> None:
        """After the last epoch; not where training broke off."""


@dataclass
class History:
    """What `fit` saw, one entry an epoch.

    Attributes:
        epoch: numbers of the epochs.
        history: name -> values.
    """

    epoch: list[int] = field(default_factory=list)
    history: dict[str, list[float]] = field(default_factory=dict)

    def add(self, epoch: int, logs: Logs) -> None:
        """Append an epoch."""
        self.epoch.append(epoch)
        for name, value in logs.items():
            self.history.setdefault(name, []).append(value)


def check_callbacks(callbacks: Sequence[Any]) -> list[Callback]:
    """Return the callbacks, after checking that each of their hooks is one that is called.

    Raises:
        UsageError: one is no `Callback`, or has a hook that does not exist; hooks at the beginning of a step do not, because steps
            begin on the workers.
    """
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise UsageError(
                f"callbacks has {type(callback).__name__}: {callback!r}. Give objects of classes that derive from Callback."
            )
        for name in dir(callback):
            if name.startswith("on_") and name not in HOOKS:
                early = "batch_begin" in name
                advice = " Steps begin on the workers, and several at a time: use on_train_batch_end." if early else ""
                raise UsageError(
                    f"{type(callback).__name__} has a hook {name!r} that is never called.{advice}{nearest(name, HOOKS)}"
                )
        if (
            isinstance(callback.every_steps, bool)
            or not isinstance(callback.every_steps, int)
            or callback.every_steps < 1
        ):
            raise UsageError(
                f"{type(callback).__name__}.every_steps={callback.every_steps!r} must be an integer of at least 1."
            )
    return list(callbacks)
