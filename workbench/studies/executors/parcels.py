"""Trials on their way to a worker: what is there of them, so that they go on where they were."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from workbench.ray.folders import temporary_folder
from workbench.record.read import StudyRecord
from workbench.record.write import StudyWriter
from workbench.train.checkpoint import latest_checkpoint

__all__ = ["Chunk", "pack_chunk", "unpacked"]


@dataclass(frozen=True)
class Parcel:
    """One trial.

    Attributes:
        number: the one that the study gave to it.
        config_json: the file `config.json`.
        events: the file `events.jsonl`, empty where it was never begun.
        latest: files of the newest checkpoint, by name.
        kept: names of all checkpoints; the older ones stay where they are and only count.
    """

    number: int
    config_json: bytes
    events: bytes
    latest: Mapping[str, bytes]
    kept: tuple[str, ...]


@dataclass(frozen=True)
class Chunk:
    """Trials that a worker trains together.

    Attributes:
        stage: what they are for.
        configs: their configs, packed by the cluster.
        study_json: the study's file.
        parcels: the trials.
        rows: for each of the study's tables the rows there are, column by column.
    """

    stage: str
    configs: bytes
    study_json: bytes
    parcels: tuple[Parcel, ...]
    rows: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def pack_chunk(study: StudyWriter, numbers: Sequence[int], *, stage: str, configs: bytes) -> Chunk:
    """Return the trials with these numbers as the study has them now, everything flushed."""
    parcels = tuple(_parcel(study.path / "trials" / str(number), number) for number in numbers)
    rows: dict[str, Mapping[str, Any]] = {}
    if any(parcel.kept for parcel in parcels):  # without a checkpoint a trial begins anew
        record = StudyRecord(study.path, frozenset(numbers))
        tables = {"steps": record.steps, "evals": record.evals, "predictions": record.predictions}
        rows = {name: _columns(table) for name, table in tables.items()}
    return Chunk(stage, configs, (study.path / "study.json").read_bytes(), parcels, rows)


@contextmanager
def unpacked(chunk: Chunk) -> Iterator[StudyWriter]:
    """Yield the writer of a temporary study that holds the chunk's trials under their own numbers."""
    with temporary_folder() as name:
        path = Path(name)
        (path / "study.json").write_bytes(chunk.study_json)
        for parcel in chunk.parcels:
            folder = path / "trials" / str(parcel.number)
            folder.mkdir(parents=True)
            (folder / "config.json").write_bytes(parcel.config_json)
            if parcel.events:
                (folder / "events.jsonl").write_bytes(parcel.events)
            for checkpoint in parcel.kept:
                (folder / "checkpoints" / checkpoint).mkdir(parents=True)
            for file, content in parcel.latest.items():
                (folder / "checkpoints" / parcel.kept[-1] / file).write_bytes(content)
        with (path / ".lock").open("w") as lock:
            study = StudyWriter(path, lock)
            for table, columns in chunk.rows.items():
                if columns:
                    getattr(study, table).add(columns)
            yield study


def _parcel(folder: Path, number: int) -> Parcel:
    checkpoints = folder / "checkpoints"
    newest = latest_checkpoint(checkpoints)
    events = folder / "events.jsonl"
    return Parcel(
        number,
        (folder / "config.json").read_bytes(),
        events.read_bytes() if events.exists() else b"",
        {} if newest is None else {file.name: file.read_bytes() for file in newest.iterdir()},
        tuple(sorted(path.name for path in checkpoints.glob("step-*"))),
    )


def _columns(table: pd.DataFrame) -> dict[str, Any]:
    return {str(name): table[name].to_numpy() for name in table.columns} if len(table) else {}
