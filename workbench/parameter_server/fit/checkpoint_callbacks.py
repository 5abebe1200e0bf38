"""`ModelCheckpoint` and `BackupAndRestore`: what `fit` leaves on disk, and how it goes on after a crash (T4.8, T4.9)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

from workbench.errors import CheckpointError, UsageError, nearest
from workbench.parameter_server.fit.callbacks import Callback, Logs
from workbench.parameter_server.fit.checkpoint_manager import CheckpointManager, delete_whole

__all__ = ["BackupAndRestore", "ModelCheckpoint"]


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
    among the callbacks, so that the others see the restored state.

    Args:
        directory: folder of the backup, of this training alone.
        delete: take it away at the end of training, so that the next `fit` begins anew.
    """

    def __init__(self, directory: str | Path, *, delete: bool = True) -> None:
        self.directory, self.delete = Path(directory), delete
        self._manager: CheckpointManager | None = None

    def on_train_begin(self) -> None:
        """Restore the newest backup, if there is one."""
        self._manager = CheckpointManager(self.model.placed, self.directory, max_to_keep=1)
        restored = self._manager.restore()
        if restored is None:
            return
        if restored.epoch is None:
            raise CheckpointError(
                f"{restored.path} does not say how many epochs it holds: it is no backup. Give a folder of its own."
            )
        self.model.next_epoch = restored.epoch

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:  # noqa: ARG002
        """Back up."""
        assert self._manager is not None
        self._manager.save(epoch=epoch + 1)

    def on_train_end(self) -> None:
        """Take the backup away."""
        if self.delete and self.directory.exists():
            delete_whole(self.directory)
