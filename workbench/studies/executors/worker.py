"""`train_chunk`: the task that trains a chunk of trials in a folder of its own, and tells the driver what happens there."""

import os
import pickle
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from workbench.errors import StudyInterrupted
from workbench.progress import ask_to_stop
from workbench.ray.folders import temporary_folder
from workbench.record.read import StudyRecord
from workbench.record.watch import Watcher, watching
from workbench.record.write import StudyWriter
from workbench.studies.executors.shipping import Shipment, unpack_shipment
from workbench.train.checkpoint import latest_checkpoint
from workbench.train.trainer import Trainer
from workbench.workloads.base import Workload

TELL_S = 0.2  # rule of thumb: five times a second looks like motion to who looks on


@dataclass(frozen=True)
class Chunk:
    """Trials that a worker trains together, as the study has them: from there they go on."""

    key: str
    stage: str
    configs: bytes  # those of `numbers`, then those that others train
    numbers: Sequence[int]
    files: Mapping[str, bytes]  # path in the study's folder -> content: of the newest checkpoint of each trial
    kept: Sequence[str]  # folders of all checkpoints; the older ones stay where they are and only count
    rows: Mapping[str, Mapping[str, Any]]  # of each of the study's tables, column by column


@dataclass(frozen=True)
class Ended:
    """A worker's last word about a chunk: whether it was done, stopped or raised, the error's class, message, notes and traceback, and its facts."""

    state: Literal["done", "stopped", "failed"] = "done"
    kind: str = ""
    said: str = ""
    details: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


def pack_chunk(study: StudyWriter, numbers: Sequence[int], *, key: str, stage: str, configs: bytes) -> Chunk:
    """Return the trials with these numbers as the study has them now, everything flushed."""
    paths, kept = [study.path / "study.json"], []
    for number in numbers:
        trial = study.path / "trials" / str(number)
        paths += [path for path in (trial / "config.json", trial / "events.jsonl") if path.exists()]
        kept += sorted((trial / "checkpoints").glob("step-*"))
        newest = latest_checkpoint(trial / "checkpoints")
        paths += [] if newest is None else newest.iterdir()
    rows: dict[str, Mapping[str, Any]] = {}
    if kept:  # without a checkpoint a trial begins anew
        record = StudyRecord(study.path, frozenset(numbers))
        for name, table in (("steps", record.steps), ("evals", record.evals), ("predictions", record.predictions)):
            rows[name] = {str(column): table[column].to_numpy() for column in table.columns} if len(table) else {}
    files = {str(path.relative_to(study.path)): path.read_bytes() for path in paths}
    return Chunk(key, stage, configs, numbers, files, [str(path.relative_to(study.path)) for path in kept], rows)


@contextmanager
def unpacked(chunk: Chunk) -> Iterator[StudyWriter]:
    """Yield the writer of a temporary study that holds the chunk's trials under their own numbers."""
    with temporary_folder() as name:
        for folder in chunk.kept:
            Path(name, folder).mkdir(parents=True)
        for file, content in chunk.files.items():
            Path(name, file).parent.mkdir(parents=True, exist_ok=True)
            Path(name, file).write_bytes(content)
        with Path(name, ".lock").open("w") as lock:
            study = StudyWriter(Path(name), lock)
            for table, columns in chunk.rows.items():
                if columns:
                    getattr(study, table).add(columns)
            yield study


class Teller(Watcher):
    """Puts what happens in a worker's folder into the mailbox: rows, events, rewinds, checkpoints, progress."""

    early = False

    def __init__(self, folder: Path, chunk: Chunk, put: Callable[[Sequence[Any], int], bool | None]) -> None:
        self._put = put
        self._checkpoints = {n: folder / "trials" / str(n) / "checkpoints" for n in chunk.numbers}
        self._known = {number: self._names(number) for number in chunk.numbers}
        self._untold: list[tuple[Any, ...]] = []
        self._told_at = time.monotonic()

    def on_rows(self, path: Path, table: str, columns: Mapping[str, Any]) -> None:  # noqa: ARG002
        """Keep rows to be told."""
        self._untold.append(("rows", table, dict(columns)))

    def on_event(self, path: Path, number: int, event: Mapping[str, Any]) -> None:  # noqa: ARG002
        """Keep an event to be told."""
        self._untold.append(("event", number, dict(event)))

    def on_rewind(self, path: Path, number: int, step: int) -> None:  # noqa: ARG002
        """Keep a rewind to be told."""
        self._untold.append(("rewind", number, step))

    def advance(self, steps: int) -> None:
        """Note so many more updates; tell all where it is time, or where an event or a checkpoint is new."""
        new = any(told[0] == "event" for told in self._untold)
        new = new or any(self._names(number) != known for number, known in self._known.items())
        self._untold.append(("advanced", steps))
        if new or time.monotonic() - self._told_at > TELL_S:
            self.tell()

    def tell(self) -> None:
        """Tell what was not told yet: checkpoints first, because what is said of a trial's end rests on them."""
        files: list[tuple[Any, ...]] = []
        size = 0
        for number, known in self._known.items():
            there = self._known[number] = self._names(number)
            for name in sorted(there - known):
                found = {file.name: file.read_bytes() for file in (self._checkpoints[number] / name).iterdir()}
                files.append(("saved", number, name, found))
                size += sum(map(len, found.values()))
            files += [("dropped", number, name) for name in sorted(known - there)]
        told, self._untold = [*files, *self._untold], []
        while (stop := self._put(told, size)) is None:
            time.sleep(TELL_S / 4)
        self._told_at = time.monotonic()
        if stop:
            ask_to_stop()

    def _names(self, number: int) -> set[str]:
        return {path.name for path in self._checkpoints[number].glob("step-*")}


_loaded: tuple[str, Workload, Trainer] | None = None  # of the shipment that this process has unpacked last


def train_chunk(shipment: Shipment, chunk: Chunk, mailbox: Any, locate: Callable[[], str], threads: int) -> Ended:
    """Train a chunk in this process, and return how it ended; all else is told to the mailbox."""
    global _loaded  # noqa: PLW0603
    os.environ["WORKBENCH_LIVE"] = "0"
    node = locate()
    mailbox.put(chunk.key, [("begun", {"ray_node": node, "pid": os.getpid()})], 0)
    try:
        if _loaded is None or _loaded[0] != shipment.key:
            _loaded = (shipment.key, *unpack_shipment(shipment, node))
        _, workload, trainer = _loaded
        torch.set_num_threads(trainer.threads or threads)
        with unpacked(chunk) as study:
            teller = Teller(study.path, chunk, lambda messages, size: mailbox.put(chunk.key, messages, size))
            configs, own = pickle.loads(chunk.configs), len(chunk.numbers)
            how: dict[str, Any] = {"stage": chunk.stage, "progress": teller.advance, "elsewhere": configs[own:]}
            try:
                with watching(teller):
                    trainer.run_trials(workload, configs[:own], study, **how)
            finally:
                teller.tell()
            return Ended(facts=study.record.facts)
    except (StudyInterrupted, KeyboardInterrupt):
        return Ended("stopped")
    except BaseException as error:
        notes = [*getattr(error, "__notes__", ()), "".join(traceback.format_exception(error)).rstrip()]
        return Ended("failed", type(error).__name__, str(error), "\n".join(notes))
