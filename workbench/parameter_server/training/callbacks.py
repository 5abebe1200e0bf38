"""Callbacks of `fit`: checkpoints, backups, and loss and metrics of each epoch in files that TensorBoard reads (T4.8 to T4.10)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from workbench.checks import check_integer
from workbench.errors import CheckpointError, UsageError, nearest
from workbench.logs.event_file import EventFile
from workbench.parameter_server.coordinator.dispatch import BACK_S
from workbench.parameter_server.training.checkpoint_manager import CheckpointManager
from workbench.train.checkpoint import delete_whole

Logs = Mapping[str, float]


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
        """After a step, in order of completion, each step once (T14.9), with loss and metrics of its batch."""

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """After an epoch, when each of its steps has ended and it was evaluated.

        Args:
            logs: loss and metrics over the epoch's batches; with "val_" in front, over the validation data.
        """

    def on_train_end(self) -> None:
        """After the last epoch; not where training broke off."""


HOOKS = sorted(name for name in vars(Callback) if name.startswith("on_"))


@dataclass
class History:
    """What `fit` saw, one entry an epoch: its number, and loss and metrics by name."""

    epoch: list[int] = field(default_factory=list)
    history: dict[str, list[float]] = field(default_factory=dict)

    def add(self, epoch: int, logs: Logs) -> None:
        """Append an epoch."""
        self.epoch.append(epoch)
        for name, value in logs.items():
            self.history.setdefault(name, []).append(value)


def check_callbacks(callbacks: Sequence[Any]) -> list[Callback]:
    """Return the callbacks; raises `UsageError` where one is none, or has a hook that is never called, such as at the beginning of a step."""
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
        check_integer(f"{type(callback).__name__}.every_steps", callback.every_steps, error=UsageError)
    return list(callbacks)


class ModelCheckpoint(Callback):
    """Writes a checkpoint after each epoch, or after each that was the best so far.

    Args:
        directory: folder of the checkpoints; see `CheckpointManager` for what they hold.
        monitor: name in the logs, such as "val_loss": only the best so far is written; None writes every epoch.
        mode: whether a smaller or a larger value is better.
        max_to_keep: newest ones to keep; None keeps all.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        monitor: str | None = None,
        mode: Literal["min", "max"] = "min",
        max_to_keep: int | None = None,
    ) -> None:
        if mode not in ("min", "max"):
            raise UsageError(f"mode={mode!r} is not known. Allowed: 'min', 'max'.")
        self.directory, self.monitor, self.max_to_keep = Path(directory), monitor, max_to_keep
        self._sign = 1.0 if mode == "min" else -1.0
        self.best: float | None = None
        self._manager: CheckpointManager | None = None

    def on_epoch_begin(self, epoch: int) -> None:
        """Refuse a folder of another run before anything is trained; one of the run that was restored is gone on with."""
        if self._manager is None:
            self._manager = CheckpointManager(self.model.placed, self.directory, max_to_keep=self.max_to_keep)
            latest = self._manager.latest
            if latest is not None and epoch == 0 and latest.name > f"step-{self.model.steps:08d}":
                raise CheckpointError(
                    f"{self.directory} holds {latest.name} of another run. Give another folder, delete it, or put BackupAndRestore "
                    "among the callbacks to go on from where that run was."
                )

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Save where it is due; NaN is never the best."""
        if self.monitor is not None:
            if self.monitor not in logs:
                raise UsageError(f"monitor={self.monitor!r} is not among the logs.{nearest(self.monitor, logs)}")
            value = logs[self.monitor]
            if math.isnan(value) or (self.best is not None and self._sign * value >= self._sign * self.best):
                return
            self.best = value
        assert self._manager is not None
        self._manager.save(epoch=epoch + 1)


class BackupAndRestore(Callback):
    """Backs training up after each epoch, and lets the same program, started again, go on from there.

    The epoch that a crash interrupted is trained again from its beginning: parameters, optimizer slots, steps and the order of a
    dataset's examples are those of the backup, so that one worker's run ends as it would have without the crash. It comes first
    among the callbacks, so that the others see the restored state. Where a server dies, `fit` goes on by itself (T14.6).

    Args:
        directory: folder of the backup, of this training alone.
        delete: take it away at the end of training, so that the next `fit` begins anew.
        wait_s: for a server that died to be there again; 0 ends training.
    """

    def __init__(self, directory: str | Path, *, delete: bool = True, wait_s: float = BACK_S) -> None:
        self.directory, self.delete, self.wait_s = Path(directory), delete, wait_s
        self._manager: CheckpointManager | None = None

    def on_train_begin(self) -> None:
        """Restore the newest backup, if there is one."""
        self._manager = CheckpointManager(self.model.placed, self.directory, max_to_keep=1)
        restored = self._manager.restore()
        if restored is None:
            self._manager.save(epoch=self.model.next_epoch)
        elif restored.epoch is None:
            raise CheckpointError(
                f"{restored.path} does not say how many epochs it holds: it is no backup. Give a folder of its own."
            )
        else:
            self.model.next_epoch = restored.epoch

    def recover(self) -> None:
        """Go back to the backup as soon as every server is there again."""
        assert self._manager is not None
        self.model.next_epoch = self._manager.recover(self.model.executor.coordinator, wait_s=self.wait_s).epoch

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:  # noqa: ARG002
        """Back up."""
        assert self._manager is not None
        self._manager.save(epoch=epoch + 1)

    def on_train_end(self) -> None:
        """Take the backup away."""
        if self.delete and self.directory.exists():
            delete_whole(self.directory)


class TensorBoard(Callback):
    """Writes `epoch_<name>` under `train/` and `validation/`, as Keras does; look at them by `tensorboard --logdir <folder>`."""

    def __init__(self, log_dir: str | Path) -> None:
        self.log_dir = Path(log_dir)
        self._files: dict[str, EventFile] = {}

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Write the epoch's values."""
        for name, value in logs.items():
            split = "validation" if name.startswith("val_") else "train"
            if split not in self._files:
                self._files[split] = EventFile(self.log_dir / split)
            self._files[split].scalar(f"epoch_{name.removeprefix('val_')}", value, epoch)

    def on_train_end(self) -> None:
        """Let the next training begin new files."""
        self._files.clear()
