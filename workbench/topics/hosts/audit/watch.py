"""`HostsWatch`: all watches of one rank together, and the file with its facts."""

from __future__ import annotations

import json
import os
import platform
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from workbench.record.json_values import to_json
from workbench.record.parts import write_atomic
from workbench.topics.hosts.audit.buffers import BufferWatch
from workbench.topics.hosts.audit.collectives import CollectiveWatch
from workbench.topics.hosts.audit.draws import DrawWatch
from workbench.topics.hosts.audit.files import FileWatch
from workbench.topics.hosts.audit.loaders import LoaderWatch
from workbench.topics.hosts.audit.models import ModelWatch
from workbench.topics.hosts.audit.patches import Patches
from workbench.topics.hosts.audit.spawned import SpawnWatch
from workbench.topics.hosts.audit.state import State
from workbench.topics.hosts.audit.trainer import TrainerWatch
from workbench.topics.hosts.audit.updates import UpdateWatch
from workbench.topics.hosts.audit.watchdog import Watchdog

__all__ = ["HostsWatch", "facts_path", "read_facts"]


def facts_path(folder: Path, rank: int) -> Path:
    """Return the file with the facts of a rank."""
    return folder / f"rank-{rank}.json"


def read_facts(folder: Path) -> dict[str, Any]:
    """Return `{"ranks": [...]}`, what every rank in the folder has written, by rank."""
    ranks = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("rank-*.json")]
    ranks.sort(key=lambda found: int(found["rank"]))
    return {"ranks": [found for found in ranks if found["world"] == ranks[0]["world"]]}  # others are of an earlier job


class HostsWatch:
    """Observes this process from now until `close`; a context manager.

    What is watched belongs to torch: models, optimizers, loaders, samplers, collectives, clipping and `torch.save`; and to Python:
    files that are opened for writing. Nothing is drawn, reordered or rounded differently.

    Attributes:
        state: where this rank is.

    Args:
        folder: where the facts go; the same for all ranks.
        timeout_s: without progress, until the stack of this rank is written; None is never.
        stop_after: updates after which this rank ends; None is never.
        launched: whether this process is one of the ranks already, and must not start any itself.
    """

    def __init__(
        self,
        folder: Path,
        *,
        timeout_s: float | None = None,
        stop_after: int | None = None,
        launched: bool = False,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.state = State(folder.resolve())
        facts_path(self.state.folder, self.state.rank).unlink(missing_ok=True)
        self._patches = Patches()
        models = ModelWatch(self.state, self._patches)
        updates = UpdateWatch(self.state, self._patches, models, stop_after)
        buffers, loaders = BufferWatch(self.state), LoaderWatch(self.state, self._patches)
        collectives = CollectiveWatch(self.state, self._patches)
        trainer = TrainerWatch(self.state, self._patches, updates, loaders, buffers)
        collectives.on_group.append(trainer.install)
        draws, files = DrawWatch(self.state, self._patches), FileWatch(self.state, self._patches)
        spawned = SpawnWatch(self.state, self._patches, refused=launched)
        self._watches: list[Any] = [models, updates, buffers, collectives, loaders, draws, files, spawned]
        self._began = time.perf_counter()
        self._open = True
        self._dog = None if timeout_s is None else Watchdog(self.state, timeout_s)

    def __enter__(self) -> HostsWatch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close(error=error)

    def close(self, *, error: BaseException | None = None) -> Path:
        """Stop observing, and write what was seen; a second call does nothing.

        Args:
            error: that ended the training, where one did.

        Returns:
            The file with the facts of this rank.
        """
        state = self.state
        path = facts_path(state.folder, state.rank)
        if not self._open or not state.here:
            return path
        self._open = False
        self._patches.undo()
        for heard in (state.on_train_call, state.on_evaluation, state.on_checkpoint, state.on_joining):
            heard.clear()
        found: dict[str, Any] = {
            "rank": state.rank, "world": state.world, "pid": state.pid, "host": platform.node(), "cores": os.cpu_count(),
            "initialised": state.initialised, "backend": state.backend, "seconds": time.perf_counter() - self._began,
            "error": None if error is None or isinstance(error, SystemExit) else f"{type(error).__name__}: {error}",
        }  # fmt: skip
        for watch in self._watches:
            found |= watch.facts()
        write_atomic(path, json.dumps(to_json(found)).encode())
        if self._dog is not None:
            self._dog.close()
        return path
