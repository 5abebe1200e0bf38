"""Writing a study: `StudyWriter` creates or resumes a folder, `TrialWriter` fills one trial of it.

One process writes a study at a time. The same call again goes on where it was; another config is an error.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import os
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import IO, Any

import pandas as pd

from workbench.errors import RecordError, UsageError
from workbench.record import repro
from workbench.record.events import append_event, read_events
from workbench.record.folder import (
    check_fingerprint,
    check_folder,
    check_path,
    default_folder,
    lock,
    read_json,
    unfinished,
    write_atomic,
    write_json,
)
from workbench.record.json_values import dumps
from workbench.record.missing import inventory, missing
from workbench.record.read import SCHEMA, StudyRecord, TrialRecord, trial_outcome
from workbench.record.redact import redact
from workbench.record.tables import PartWriter, trial_column
from workbench.record.watch import tell

MAX_PARTS = 64  # rule of thumb: more small files than this are joined, so that reading stays fast


class StudyWriter:
    """The one writer of a study folder."""

    writes = True

    def __init__(self, path: Path, lock: IO[str], *, created: bool = False) -> None:
        self.path, self.lock, self.created = path, lock, created
        self.trained = False
        self.steps = PartWriter(path / "steps")
        self.evals = PartWriter(path / "evals")
        self.predictions = PartWriter(path / "predictions")
        self._configs: dict[int, Any] = {}  # of the trials that are there: nobody else writes any
        self._began: dict[str, float] = {}

    @classmethod
    def open(
        cls,
        path: Path | None,
        *,
        kind: str,
        workload: str,
        config: Mapping[str, Any],
        settings: Mapping[str, Any] | None = None,
        name: str | None = None,
        note: str | None = None,
        command: str | None = None,
        call: str | None = None,
    ) -> StudyWriter:
        """Create the folder with its `study.json`, or go on with the same study."""
        if note is not None and not note.strip():
            raise UsageError("note='' is empty: say in a few words what this study is for, or leave it out (P5.4).")
        wanted = {"workload": workload, "config": dict(config), "settings": dict(settings or {})}
        wanted = json.loads(dumps(wanted))
        made = path is None
        if path is None:
            path = unfinished(workload, kind, wanted) or default_folder(workload, kind)
        check_path(path)
        if not (path / "study.json").exists():
            try:
                _check_name(path, name or path.name)
            except UsageError:
                if made:
                    path.rmdir()
                raise
        check_folder(path, wanted)
        held = lock(path)
        created = not (path / "study.json").exists()
        if created:
            commit, patch = repro.git_state(Path.cwd())
            if patch:
                write_atomic(path / "repro.patch", patch)
                (path / "repro.patch").chmod(0o600)  # it may hold what was never to be shared
            given = dumps(wanted).encode()
            write_atomic(path / "config.json", given)
            study = {
                "schema": SCHEMA,
                "name": name or path.name,
                "kind": kind,
                "note": redact(note or f"{kind} of {workload}, peak_lr {wanted['config']['peak_lr']:g}"),
                **wanted,
                "config_sha256": hashlib.sha256(given).hexdigest(),
                "command": redact(command or repro.called_as(call)),
                "commit": commit,
                "patch": "repro.patch" if patch else None,
                "folder": repro.git_folder(Path.cwd()) if commit else "",
                "versions": repro.versions(),
                "created": datetime.now(UTC).isoformat(timespec="seconds"),
                "facts": {},
            }
            write_json(path / "study.json", study)
        else:
            _go_on(path, held)
            stored = read_json(path / "study.json")
            if (
                command is not None and "--budget" in f"{command} {stored['command']}"
            ):  # what was paid for now reproduces it
                write_json(path / "study.json", stored | {"command": redact(command)})
        tell("on_study", path, created=created)
        return cls(path, held, created=created)

    @classmethod
    def reopen(cls, path: Path) -> StudyWriter:
        """Open a study that is there, to add rows to it."""
        read_json(path / "study.json")
        held = lock(path)
        _go_on(path, held)
        tell("on_study", path, created=False)
        return cls(path, held)

    @property
    def record(self) -> StudyRecord:
        """The study as a reader sees it now, everything flushed."""
        self.flush()
        return StudyRecord(self.path)

    def hold_against(self, fingerprint: Mapping[str, Any]) -> None:
        """Keep what the workload's code and data give, or compare it with what they gave when the study was begun."""
        study = read_json(self.path / "study.json")
        wanted = json.loads(dumps(dict(fingerprint)))
        if "fingerprint" in study:
            check_fingerprint(self.path, study["fingerprint"], wanted)
        else:
            write_json(self.path / "study.json", study | {"fingerprint": wanted})

    def finish(self) -> None:
        """Mark the study as run to its end, so that the same call without a folder begins a new one; say so if it was before."""
        study = read_json(self.path / "study.json")
        if "finished" in study and not self.trained:
            logging.getLogger(__name__).warning(
                "%s: already finished, nothing was trained; what is shown is what it holds.", self.path
            )
        if "finished" not in study:
            now = datetime.now(UTC).isoformat(timespec="seconds")
            study.pop("progress", None)
            write_json(self.path / "study.json", study | {"finished": now})

    def plan(self, stage: str, steps: int) -> None:
        """Keep until the study is finished what it goes on with, "3 of 4: search: learning rates", and of about how many updates it is in all."""
        self._began = self._began or {"since": time.time(), "rows": len(trial_column(self.path / "steps"))}
        study = read_json(self.path / "study.json")
        if "finished" not in study:
            write_json(
                self.path / "study.json", study | {"progress": {"stage": stage, "planned": steps, **self._began}}
            )
        tell("on_stage", self.path, stage, steps)

    def add_facts(self, **facts: Any) -> None:
        """Store what was measured on the live model in `study.json`."""
        study = read_json(self.path / "study.json")
        write_json(self.path / "study.json", study | {"facts": study["facts"] | facts})

    def trial(self, config: Mapping[str, Any], *, stage: str, train_examples: int) -> TrialWriter:
        """Return the writer of the trial with this config, an earlier one of the study where there is one."""
        wanted, folder = json.loads(dumps(dict(config))), self.path / "trials"
        known = self._number_of(wanted)
        if known is not None:
            stored = read_json(folder / str(known) / "config.json")
            tell("on_trial", self.path, known, stage=stored["stage"], config=wanted)
            return TrialWriter(self, known)
        number = next(n for n in itertools.count() if n not in self._configs)
        row = {"trial": number, "stage": str(stage), "seed": wanted["shared_seed"], "train_examples": train_examples}
        write_json(folder / str(number) / "config.json", row | {"config": wanted})
        tell("on_trial", self.path, number, stage=stage, config=wanted)
        writer = TrialWriter(self, number)
        if self._configs and number < max(self._configs):  # its folder was deleted, its rows are still there
            writer.rewind(-1)
        return writer

    def reckon_anew(self) -> None:
        """Forget what the study held when it was closed, before rows of it are dropped."""
        file = self.path / "study.json"
        if file.exists() and (study := read_json(file)).pop("holds", None) is not None:
            write_json(file, study)

    def has(self, config: Mapping[str, Any]) -> bool:
        """Whether a trial with this config ran to its end."""
        number = self._number_of(json.loads(dumps(dict(config))))
        return number is not None and TrialWriter(self, number).finished

    def updates_of(self, config: Mapping[str, Any]) -> int:
        """Return how many updates the trial with this config has made; 0 where there is none."""
        number = self._number_of(json.loads(dumps(dict(config))))
        return 0 if number is None else int(trial_outcome(self.path / "trials" / str(number))["steps_run"])

    def _number_of(self, wanted: Mapping[str, Any]) -> int | None:
        folder = self.path / "trials"
        names = [entry.name for entry in os.scandir(folder) if entry.name.isdigit()] if folder.is_dir() else []
        for number in sorted(map(int, names)):
            if number not in self._configs:
                stored = folder / str(number) / "config.json"
                if not stored.exists():
                    continue
                self._configs[number] = read_json(stored)["config"]
            if self._configs[number] == wanted:
                return number
        return None

    def flush(self) -> None:
        """Write all collected rows to disk."""
        for parts in (self.steps, self.evals, self.predictions):
            parts.flush()
            if parts.written > MAX_PARTS:
                parts.join()

    def discard_unused(self) -> None:
        """Take back what `open` created, so that a study that was refused before its first trial leaves nothing."""
        own = ("study.json", "config.json", "repro.patch", ".lock")
        if not self.created or any(path.name not in own for path in self.path.iterdir()):
            return
        for name in own:
            (self.path / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.path.rmdir()

    def close(self) -> None:
        """Flush, join the parts into one, release the folder."""
        tell("on_closed", self.path)
        with self.lock:
            if (self.path / "study.json").exists():
                for parts in (self.steps, self.evals, self.predictions):
                    parts.merge()
                study, held = read_json(self.path / "study.json"), inventory(self.path)
                if study.get("holds") != held:
                    write_json(self.path / "study.json", study | {"holds": held})


def _go_on(path: Path, held: IO[str]) -> None:
    """Refuse to add to a study of which something is missing, but for trials whose folder is gone: they are trained again."""
    lacking = missing(path, resuming=True)
    if lacking:
        held.close()
        raise RecordError(
            f"{' '.join(lacking[:3])} Give a new folder with out=..., or delete the folder of a trial that lacks something, and "
            "the same command trains it again."
        )


def _check_name(path: Path, name: str) -> None:
    """Refuse a name that another study in the folder's folder has: it is what the table of studies tells them apart by (P5.2)."""
    for other in path.parent.glob("*/study.json"):
        with contextlib.suppress(RecordError):
            if other.parent != path and read_json(other).get("name") == name:
                raise UsageError(
                    f"name={name!r} is that of the study in {other.parent} already. Give another one with name=..., or, as a "
                    f'renamed folder keeps the name of its study, change "name" in {other}.'
                )


class TrialWriter:
    """Writes the rows and events of one trial."""

    def __init__(self, study: StudyWriter, number: int) -> None:
        self.study, self.number, self.writes = study, number, study.writes
        self.folder = study.path / "trials" / str(number)

    @property
    def record(self) -> TrialRecord:
        """The trial as a reader sees it now."""
        self.study.flush()
        return TrialRecord(self.study.path, self.number)

    @property
    def events(self) -> list[dict[str, Any]]:
        """What happened to the trial so far, oldest first."""
        return read_events(self.folder) if self.writes else []

    @property
    def finished(self) -> bool:
        """Whether the trial already ran to its end, diverged ones included."""
        events = self.events
        return bool(events) and events[-1].get("state") in ("complete", "diverged")

    def event(self, event: str, **values: Any) -> None:
        """Append one event; `state`, `seconds`, `steps_run`, `best_step`, `best_value` reach the trials table."""
        if not self.writes:
            return
        said = json.loads(dumps({"event": event, **values}))
        self.study.trained = True
        append_event(self.folder, said)
        tell("on_event", self.study.path, self.number, said)

    def rewind(self, step: int) -> None:
        """Drop this trial's rows of `step` and later, and its evaluations after `step`: they come again."""
        if not self.writes:
            return
        self.study.reckon_anew()
        tables = self.study.steps, self.study.evals, self.study.predictions
        for parts, last in zip(tables, (step - 1, step, step), strict=True):
            parts.merge(keep=partial(_before, trial=self.number, last=last))
        tell("on_rewind", self.study.path, self.number, step)


def _before(table: pd.DataFrame, *, trial: int, last: int) -> pd.Series:
    return (table["trial"] != trial) | (table["step"] <= last)


class SilentStudy(StudyWriter):
    """The study of a host that trains along and writes nothing, because one host writes for all (P7.2)."""

    writes = False

    def __init__(self, path: Path) -> None:
        self.path, self.created = path, False
        self.steps = self.evals = self.predictions = PartWriter(None)

    def trial(self, config: Mapping[str, Any], *, stage: str, train_examples: int) -> TrialWriter:  # noqa: ARG002
        """Return a trial whose number and state the writing host will say."""
        return TrialWriter(self, 0)

    def add_facts(self, **facts: Any) -> None:
        """Store nothing."""

    def finish(self) -> None:
        """Mark nothing."""

    def close(self) -> None:
        """Release nothing."""
