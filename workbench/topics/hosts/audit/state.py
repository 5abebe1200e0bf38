"""`State`: where one rank is in its training, and who wants to hear of what happens there."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["State", "looked_at"]


def looked_at(step: int) -> bool:
    """Tell whether parameters and gradients are looked at before update `step`: the first four, powers of two, hundreds."""
    return step < 4 or step & (step - 1) == 0 or step % 100 == 0


@dataclass
class State:
    """What the watches of one rank share.

    Attributes:
        folder: where the facts of this job go.
        rank: of this process; that of the environment until a process group says another one.
        world: processes in the job.
        initialised: whether `init_process_group` was called.
        backend: of the process group.
        step: updates that have been made, counted by one optimizer where several take turns.
        phase: what the rank does now.
        progress: rises with everything that is seen, so that standing still shows.
        waited_s: time spent waiting for other ranks since the last update.
        evaluating: whether a model that trains was called in evaluation mode since it was last trained.
        looking: whether any model was called without being trained since one was: a copy with averaged weights, for example.
        other_calls: of models, in anything but training.
        optimizers: in the order in which they were made.
        models: the models that train, without their wrappers.
        on_train_call: called before a model is called in training.
        on_evaluation: called before a model is called in evaluation mode for the first time since training.
        on_checkpoint: called before a checkpoint is written.
        on_joining: called before a collective of the script's own joins what ranks hold, in training.
    """

    folder: Path
    rank: int = field(default_factory=lambda: int(os.environ.get("RANK", "0")))
    world: int = field(default_factory=lambda: int(os.environ.get("WORLD_SIZE", "1")))
    pid: int = field(default_factory=os.getpid)
    initialised: bool = False
    backend: str | None = None
    step: int = 0
    phase: str = "starting"
    progress: int = 0
    waited_s: float = 0.0
    evaluating: bool = False
    looking: bool = False
    other_calls: int = 0
    _waits: bool = False
    started: float = field(default_factory=time.time)
    optimizers: list[Any] = field(default_factory=list)
    models: list[Any] = field(default_factory=list)
    on_train_call: list[Callable[[Any], None]] = field(default_factory=list)
    on_evaluation: list[Callable[[Any], None]] = field(default_factory=list)
    on_checkpoint: list[Callable[[], None]] = field(default_factory=list)
    on_joining: list[Callable[[], None]] = field(default_factory=list)

    def tick(self, phase: str) -> None:
        """Say what the rank does now."""
        self.phase = phase
        self.progress += 1

    @contextmanager
    def waiting(self, phase: str) -> Iterator[None]:
        """Count the time of the block as waiting for other ranks; a block inside another one counts once.

        Where the block fails, that is where the rank was.
        """
        if self._waits:
            yield
            return
        before, self._waits, came_from = time.perf_counter(), True, self.phase
        self.tick(f"waiting in {phase}")
        try:
            yield
        finally:
            self._waits = False
            self.waited_s += time.perf_counter() - before
        self.tick(came_from)

    @property
    def here(self) -> bool:
        """Whether this is the process that is watched, and not one that it has forked."""
        return os.getpid() == self.pid
