"""`TensorBoard`: loss and metrics of each epoch in files that TensorBoard reads (T4.10, behaviour 83)."""

from __future__ import annotations

from pathlib import Path

from workbench.parameter_server.fit.callbacks import Callback, Logs
from workbench.parameter_server.fit.event_file import EventFile

__all__ = ["TensorBoard"]


class TensorBoard(Callback):
    """Writes `epoch_<name>` under `train/` and `validation/`, as Keras does; look at them by `tensorboard --logdir <folder>`.

    Args:
        log_dir: folder of the files.
    """

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
