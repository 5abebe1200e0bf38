"""`CheckpointStore`: the checkpoints of one trial; what is superseded within seconds never reaches the disk.

`SilentStore` is that of a host that trains along while another one writes (P7.2).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from workbench.train.checkpoint import Checkpoint, best_steps, latest_checkpoint, prune, save_checkpoint

__all__ = ["CheckpointStore", "SilentStore", "Store"]

WRITE_SECONDS = 5.0  # rule of thumb: what a killed process may have to train again
WAITING_BYTES = 32 * 2**20  # rule of thumb: larger checkpoints are written at once instead of waiting in memory


class Store(Protocol):
    """Where the checkpoints of one trial go."""

    @property
    def latest(self) -> int | None:
        """Step of the newest checkpoint."""
        ...

    @property
    def due(self) -> bool:
        """Whether it is time to `write`."""
        ...

    def add(self, checkpoint: Checkpoint, evaluated: Mapping[int, float]) -> None:
        """Take one checkpoint."""
        ...

    def write(self, evaluated: Mapping[int, float]) -> None:
        """Bring what was taken to the disk."""
        ...


class SilentStore:
    """Keeps nothing but the step of the newest checkpoint.

    Args:
        latest: step of the one that the trial goes on from.
    """

    due = False

    def __init__(self, latest: int | None = None) -> None:
        self.latest = latest

    def add(self, checkpoint: Checkpoint, evaluated: Mapping[int, float]) -> None:  # noqa: ARG002
        """Remember the step."""
        self.latest = checkpoint.step

    def write(self, evaluated: Mapping[int, float]) -> None:
        """Write nothing."""


class CheckpointStore:
    """Keeps the best `keep_best` checkpoints of a trial and its latest (P4.4), in memory first and then on disk."""

    def __init__(self, folder: Path, *, keep_best: int, mode: str) -> None:
        self.folder = folder
        self._keep_best, self._mode = keep_best, mode
        self._waiting: dict[int, Checkpoint] = {}
        self._written_at = time.perf_counter()

    @property
    def latest(self) -> int | None:
        """Step of the newest checkpoint, written or waiting."""
        path = latest_checkpoint(self.folder)
        written = [] if path is None else [int(path.name.removeprefix("step-"))]
        return max([*written, *self._waiting], default=None)

    def add(self, checkpoint: Checkpoint, evaluated: Mapping[int, float]) -> None:
        """Take one checkpoint, whose tensors must not change any more.

        Args:
            checkpoint: to keep.
            evaluated: step -> value that selection compares, of all evaluations so far.
        """
        self._waiting[checkpoint.step] = checkpoint
        best = best_steps({s: v for s, v in evaluated.items() if s in self._waiting}, self._keep_best, mode=self._mode)
        kept = {checkpoint.step, *best}
        self._waiting = {step: c for step, c in self._waiting.items() if step in kept}

    @property
    def due(self) -> bool:
        """Whether what waits is too old or too large to wait on."""
        late = time.perf_counter() - self._written_at > WRITE_SECONDS
        return bool(self._waiting) and (late or sum(map(_bytes, self._waiting.values())) > WAITING_BYTES)

    def write(self, evaluated: Mapping[int, float]) -> None:
        """Write what waits, and delete from disk what is neither among the best nor the latest.

        A killed process loses nothing of it; for a power cut it is waited until the disk has it, but at most every
        `WRITE_SECONDS`: less than that is sooner trained again.

        Args:
            evaluated: step -> value that selection compares, of all evaluations so far.
        """
        sync = time.perf_counter() - self._written_at > WRITE_SECONDS
        for step in sorted(self._waiting):
            save_checkpoint(self.folder, self._waiting[step], sync=sync)
            del self._waiting[step]
        prune(self.folder, evaluated, keep_best=self._keep_best, mode=self._mode)
        self._written_at = time.perf_counter()


def _bytes(checkpoint: Checkpoint) -> int:
    return sum(t.numel() * t.element_size() for part in (checkpoint.model, checkpoint.trainer) for t in part.values())
