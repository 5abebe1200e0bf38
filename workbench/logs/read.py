"""`read_log`: logs of one or several runs, whoever wrote them, as one record."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeAlias

import pandas as pd

from workbench.errors import RecordError, UsageError
from workbench.logs.columns import RawLog, columns_of, find_columns
from workbench.logs.record import LogRecord, read_run, record_of
from workbench.logs.tensorboard import is_event_file, read_event_files
from workbench.logs.text import read_csv, read_json
from workbench.logs.wandb import read_wandb

Source: TypeAlias = "str | os.PathLike[str] | pd.DataFrame"


def read_log(
    path: Source | Sequence[Source],
    *,
    loss: str | None = None,
    lr: str | float | None = None,
    step: str | None = None,
    grad_norm: str | None = None,
    validation: str | None = None,
    max_grad_norm: float | None = None,
    total_steps: int | None = None,
) -> LogRecord:
    """Return the logs of runs made elsewhere as a record that `wb.judge` and every diagnosis of curves takes.

    Read are CSV files, JSON lines, TensorBoard's event files, offline runs of W&B, Lightning's `metrics.csv`, Hugging Face's
    `trainer_state.json`, folders with one of these, and DataFrames. Several of them, or a folder of runs, are several trials; with
    different learning rates they are a sweep. Columns are found by their usual names.

    Args:
        path: a file, a folder, a frame, or several of them.
        loss: name of the column with the training loss.
        step: of that with the step.
        grad_norm: of that with the norm of the gradient before clipping.
        validation: of that with the validation loss.
        lr: name of the column with the learning rate, or the learning rate itself where it was constant and not logged.
        max_grad_norm: threshold that gradients were clipped at.
        total_steps: planned length of a run; None takes what the log says, else its last step.

    Raises:
        UsageError: there is no such file, or no column of a name that was given.
        RecordError: there is no log in it, or it cannot be read.
    """
    if isinstance(lr, (int, float)) and not (math.isfinite(lr) and lr > 0):
        raise UsageError(f"lr={lr!r} must be above 0, or the name of a column.")
    if total_steps is not None and total_steps < 1:
        raise UsageError(f"total_steps={total_steps!r} must be at least 1.")
    several = isinstance(path, Sequence) and not isinstance(path, str)
    sources: Sequence[Source] = path if several else [path]  # type: ignore[assignment,list-item]
    if not len(sources):
        raise UsageError("no log was given: give a file, a folder, a DataFrame, or several of them.")
    logs = [log for place, source in enumerate(sources) for log in _logs(source, place)]
    column = lr if isinstance(lr, str) else None
    runs = [
        read_run(
            log, find_columns(log, loss=loss, lr=column, step=step, grad_norm=grad_norm, validation=validation),
            own_lr=float(lr) if isinstance(lr, (int, float)) else None,
        )
        for log in logs
    ]  # fmt: skip
    first = logs[0].path
    name = first.parent.name or first.name if first.name in ("metrics.csv", "trainer_state.json") else first.name
    if len(logs) > 1:
        common = os.path.commonpath([os.path.abspath(log.path.parent) for log in logs])
        name = f"{len(logs)} logs in {Path(common).name or common}"
    return record_of(runs, max_grad_norm=max_grad_norm, total_steps=total_steps, workload=name, path=first)


def _logs(source: Source, place: int) -> list[RawLog]:
    if not isinstance(source, pd.DataFrame):
        return logs_at(Path(source))
    if source.empty:
        raise RecordError("the DataFrame has no row: nothing was logged.")
    frame = source if isinstance(source.index, pd.RangeIndex) or source.index.name is None else source.reset_index()
    name = Path(f"frame {place}" if place else "frame")
    return [RawLog(path=name, columns=columns_of(frame), rows=len(frame), text=True)]


READ = "CSV, JSON lines, TensorBoard event files, W&B offline runs, Lightning's metrics.csv, Hugging Face's trainer_state.json"
_DEPTH = 4


def logs_at(path: Path) -> list[RawLog]:
    """Return every run that is logged at a path."""
    if not path.exists():
        beside = sorted(p.name for p in path.parent.glob("*"))[:10] if path.parent.is_dir() else []
        there = f" In {path.parent} there is: {', '.join(beside)}." if beside else ""
        raise UsageError(f"there is no {path}.{there}")
    if (path / "study.json").is_file():
        raise UsageError(
            f"{path} is a study of workbench, not a log of another tool. Its verdict is in diagnosis.json there; "
            f"`workbench report {shlex.quote(str(path))}` writes the report anew, `workbench studies {shlex.quote(str(path.parent))}` lists it."
        )
    found = [_file(path)] if path.is_file() else list(_folder(path, _DEPTH))
    if found:
        return found
    names = sorted(p.name for p in path.iterdir())
    raise RecordError(f"{path} holds no log that can be read ({READ}); it holds {', '.join(names[:10]) or 'nothing'}.")


def _file(path: Path) -> RawLog:
    if path.stat().st_size == 0:
        raise RecordError(f"{path} is empty.")
    if is_event_file(path):
        return read_event_files([path])
    if path.suffix == ".wandb":
        return read_wandb(path)
    if path.suffix in (".json", ".jsonl"):
        return read_json(path)
    if path.suffix in (".csv", ".tsv", ".txt", ".log"):
        return read_csv(path)
    raise RecordError(f"{path}: a log is {READ}. Give one of these, or a pandas DataFrame.")


def _folder(path: Path, depth: int) -> Iterable[RawLog]:
    """Yield the runs of a folder: what lies in it is one run, but for tables, which are one each; else those of its folders."""
    state = _trainer_state(path)
    events = sorted(p for p in path.iterdir() if p.is_file() and is_event_file(p))
    if state is not None:
        yield read_json(state)
    elif events:
        yield read_event_files(events)
    elif offline := sorted(path.glob("*.wandb")):
        yield read_wandb(offline[-1])
    elif (path / "metrics.csv").is_file():
        yield read_csv(path / "metrics.csv")
    else:
        tables = [p for p in sorted(path.iterdir()) if p.suffix in (".csv", ".tsv", ".jsonl") and p.is_file()]
        yield from map(_file, tables)
        below = {p.resolve(): p for p in sorted(path.iterdir()) if p.is_dir()}  # W&B's latest-run is one of the others
        for folder in below.values() if depth and not tables else ():
            yield from _folder(folder, depth - 1)


def _trainer_state(path: Path) -> Path | None:
    """Return the state beside the newest checkpoint: its log goes back to the first step."""
    if (path / "trainer_state.json").is_file():
        return path / "trainer_state.json"
    found = [p for p in path.glob("checkpoint-*/trainer_state.json") if p.parent.name.rpartition("-")[2].isdigit()]
    return max(found, key=lambda p: int(p.parent.name.rpartition("-")[2]), default=None)
