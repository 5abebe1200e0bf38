"""Which logs lie at a path: a file, a folder of one run, or a folder of runs."""

import shlex
from collections.abc import Iterable
from pathlib import Path

from workbench.errors import RecordError, UsageError
from workbench.logs.raw import RawLog
from workbench.logs.tensorboard import is_event_file, read_event_files
from workbench.logs.text import read_csv, read_json
from workbench.logs.wandb import read_wandb

READ = "CSV, JSON lines, TensorBoard event files, W&B offline runs, Lightning's metrics.csv, Hugging Face's trainer_state.json"
_DEPTH = 4


def logs_at(path: Path) -> list[RawLog]:
    """Return every run that is logged at a path."""
    if not path.exists():
        beside = sorted(p.name for p in path.parent.glob("*"))[:10] if path.parent.is_dir() else []
        there = f" In {path.parent} there is: {', '.join(beside)}." if beside else ""
        raise RecordError(f"there is no {path}.{there}")
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
