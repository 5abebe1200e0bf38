"""`ChunkWorker`: the process that trains chunks; it is asked for what there is to tell, and tells it in order."""

from __future__ import annotations

import builtins
import os
import pickle
import threading
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any, cast

import torch

from workbench import errors
from workbench.config import TrainConfig
from workbench.errors import StudyInterrupted, WorkbenchError
from workbench.record.write import StudyWriter
from workbench.studies.executors.messages import Advanced, Ended, Message, Saved
from workbench.studies.executors.parcels import Chunk, unpacked
from workbench.studies.executors.relay import RelayStudy
from workbench.studies.executors.shipping import Shipment, unpack_shipment
from workbench.train.interrupt import ask_to_stop
from workbench.train.trainer import Trainer
from workbench.workloads.base import Workload

__all__ = ["ChunkWorker", "error_of"]

WAITING_MESSAGES = 256  # rule of thumb: training waits for the driver when more than this is untold,
WAITING_BYTES = 64 * 2**20  # or when checkpoints of more than this are


class ChunkWorker:
    """Trains one chunk after the other in a thread, while its main thread answers the driver.

    Args:
        locate: returns the id of the machine that this worker runs on.
        threads: how many threads torch may use.
    """

    def __init__(self, locate: Callable[[], str], threads: int = 1) -> None:
        os.environ["WORKBENCH_LIVE"] = "0"
        self.node, self._threads = locate(), threads
        self._outbox = _Outbox()
        self._loaded: tuple[str, Workload, Trainer] | None = None
        self._stopping = False

    def where(self) -> dict[str, Any]:
        """Return which process this is, and on which machine."""
        return {"ray_node": self.node, "pid": os.getpid()}

    def start(self, shipment: Shipment, chunk: Chunk) -> None:
        """Begin to train a chunk; what happens then is told by `take`."""
        self._stopping = False
        threading.Thread(target=self._train, args=(shipment, chunk), name="training", daemon=True).start()

    def take(self, timeout_s: float) -> list[Message]:
        """Return what was not told yet, as soon as there is something, at the latest after `timeout_s`."""
        return self._outbox.take(timeout_s)

    def stop(self) -> None:
        """Finish the step in progress, save everything, and end the chunk."""
        self._stopping = True
        ask_to_stop()

    def _train(self, shipment: Shipment, chunk: Chunk) -> None:
        try:
            torch.set_num_threads(self._threads)
            workload, trainer = self._load(shipment)
            configs: list[TrainConfig] = pickle.loads(chunk.configs)
            with unpacked(chunk) as inner:
                relay = RelayStudy(inner, self._outbox.put, self.where())

                def advance(steps: int) -> None:
                    relay.send_checkpoints()
                    self._outbox.put(Advanced(steps))
                    if self._stopping:  # asked for when nothing was training that could hear it
                        ask_to_stop()

                study = cast(StudyWriter, relay)  # all of its surface that training uses
                trainer.run_trials(workload, configs, study, stage=chunk.stage, progress=advance)
            ended = Ended()
        except StudyInterrupted:
            ended = Ended("stopped")
        except BaseException as error:
            ended = _failed(error)
        self._outbox.put(ended)

    def _load(self, shipment: Shipment) -> tuple[Workload, Trainer]:
        if self._loaded is None or self._loaded[0] != shipment.key:
            self._loaded = (shipment.key, *unpack_shipment(shipment, self.node))
        return self._loaded[1:]


class _Outbox:
    """What was not told yet; `put` waits while it is too much."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._messages: deque[Message] = deque()

    def put(self, message: Message) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._full())
            self._messages.append(message)
            self._changed.notify_all()

    def take(self, timeout_s: float) -> list[Message]:
        with self._changed:
            self._changed.wait_for(lambda: bool(self._messages), timeout_s)
            taken, self._messages = list(self._messages), deque()
            self._changed.notify_all()
            return taken

    def _full(self) -> bool:
        return len(self._messages) >= WAITING_MESSAGES or sum(map(_bytes, self._messages)) > WAITING_BYTES


def _bytes(message: Message) -> int:
    return sum(map(len, message.files.values())) if isinstance(message, Saved) else 0


def _failed(error: BaseException) -> Ended:
    notes = [*getattr(error, "__notes__", ()), "".join(traceback.format_exception(error)).rstrip()]
    return Ended("failed", type(error).__name__, str(error), "\n".join(notes))


def error_of(ended: Ended, where: str) -> Exception:
    """Return what the worker raised as an error of the same class, with the worker's traceback as a note."""
    kind = getattr(errors, ended.kind, None) or getattr(builtins, ended.kind, None)
    error: Exception
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            error = kind(ended.said)
        except TypeError:
            error = WorkbenchError(f"{ended.kind}: {ended.said}")
    else:
        error = WorkbenchError(f"{ended.kind}: {ended.said}")
    error.add_note(f"Raised on {where}:\n{ended.details}")
    return error
