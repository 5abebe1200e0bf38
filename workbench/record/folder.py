"""A study's folder: which one, whether it is this study's, and which process holds it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import re
import shutil
import stat
import time
import zlib
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from workbench.errors import RecordError, UsageError
from workbench.record.json_values import dumps

TRIES = 3  # a reader that asks whether somebody writes holds the file for a moment
_PROJECT = (".git", "pyproject.toml")
_IDENTITY = ("workload", "config", "settings")
_CHECKSUM, _EDITABLE = "crc32", ("name", "note")
_WAY_OUT = "Delete the study's folder, or run it under another name."


def runs_root() -> Path:
    """Return the one folder of studies of a project, relative to the current folder: that of WORKBENCH_RUNS, else `runs` beside `.git` or `pyproject.toml`.

    It is the same from whichever folder of the project a command, a notebook or a panel is started. Outside of any project it is
    `runs` in the current folder.
    """
    given = os.environ.get("WORKBENCH_RUNS")
    if given:
        return Path(given)
    here = Path.cwd()
    project = next((f for f in (here, *here.parents) if any((f / mark).exists() for mark in _PROJECT)), here)
    home = Path.home()
    return Path(os.path.relpath((here if project in (home, *home.parents) else project) / "runs"))


def _one_name(workload: str) -> str:
    """Return a workload's name as that of one folder: letters, digits, `_`, `.` and `-`, of 120 bytes at most, and none that leads elsewhere."""
    plain = re.sub(r"[^\w.-]+", "-", workload).strip(".-")
    return plain.encode()[:120].decode(errors="ignore") or "study"


def check_path(path: Path) -> None:
    """Raise an error where a folder cannot be made or listed by this name, or an address was meant."""
    if len(path.parts) > 1 and path.parts[0].endswith(":"):  # `Path` has made one slash of two
        raise UsageError(
            f"out={str(path)!r} is an address, and a study is a folder, which an object store cannot stand for. Give a folder, and copy it "
            "there and back (docs/clusters.md shows how)."
        )
    if not str(path).isprintable():
        raise RecordError(
            f"out={str(path)!a} holds a line break, a NUL or bytes that are no UTF-8: give a folder whose name can be printed."
        )
    long = next((part for part in path.parts if len(os.fsencode(part)) > 255), None)
    if long is not None:
        raise RecordError(
            f"out={str(path)[:60]}... has a name of {len(os.fsencode(long))} bytes; file systems allow 255. Give a shorter one."
        )


def default_folder(workload: str, stem: str, *, root: str | Path | None = None) -> Path:
    """Make and return a new folder `root/<workload>-<stem>-<time>`, None is `runs_root`; nobody who asks at the same moment gets the same."""
    base = Path(root or runs_root()) / f"{_one_name(workload)}-{stem}-{datetime.now():%Y%m%d-%H%M%S}"
    for path in [base, *(base.with_name(f"{base.name}-{n}") for n in range(2, 1000))]:
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise RecordError(f"{path} cannot be created: {error.strerror}. Give a folder that is writable.") from error
        return path
    raise RecordError(f"{base} and 998 others of its name are there already: give a folder with out=...")


def unfinished(workload: str, stem: str, wanted: Mapping[str, Any], *, root: str | Path | None = None) -> Path | None:
    """Return the newest folder under `root` in which a study with all that is `wanted` was begun and not finished, if there is one."""
    for path in sorted(Path(root or runs_root()).glob(f"{_one_name(workload)}-{stem}-*/study.json"), reverse=True):
        with contextlib.suppress(RecordError):
            study = read_json(path)
            same = isinstance(study, dict) and all(study.get(key) == value for key, value in wanted.items())
            if same and "finished" not in study and not is_locked(path.parent):
                return path.parent
    return None


def check_folder(path: Path, wanted: Mapping[str, Any]) -> None:
    """Make the folder where there is none, and refuse one that is not this study's."""
    if path.is_file():
        raise RecordError(f"out={str(path)!r} is a file, and a study needs a folder. Give another name with out=...")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RecordError(
            f"out={str(path)!r} cannot be created: {error.strerror}. Give a folder that is writable."
        ) from error
    if not os.access(path, os.W_OK):
        raise RecordError(f"out={str(path)!r} is not writable. Give another folder with out=...")
    if (path / "study.json").exists():
        stored = read_json(path / "study.json")
        for key in _IDENTITY:
            if stored.get(key) != wanted[key]:
                raise RecordError(
                    f"out={str(path)!r} holds another study ({_difference(key, stored.get(key), wanted[key])}). "
                    "Give a new folder; nothing in this one was touched."
                )
    elif any(not _left_by_a_crash(p.name) for p in path.iterdir()):
        raise RecordError(f"out={str(path)!r} holds other files and no study.json. Give a new or empty folder.")


def check_fingerprint(path: Path, stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Compare what the workload's code and data gave when the study was begun with what they give now."""
    difference = fingerprint_difference(stored, wanted)
    if difference is not None:
        key, there, here = difference
        raise RecordError(
            f"the workload's code or data has changed since {path} was begun ({key}: there {there!r}, here {here!r}), so "
            "its trials and new ones do not belong together. Give a new folder; nothing in this one was touched."
        )


def fingerprint_difference(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """Return what differs first between two fingerprints, and its two values; None where nothing does.

    Numbers may differ by 0.1 %, because processors do (rule of thumb).
    """
    for key in [k for k in stored if k in wanted]:
        one, other = stored[key], wanted[key]
        numbers = isinstance(one, float) and isinstance(other, float)
        if not (math.isclose(one, other, rel_tol=1e-3, abs_tol=1e-12) if numbers else one == other):
            return key, one, other
    return None


def _left_by_a_crash(name: str) -> bool:
    """Tell whether a file is one that is written before `study.json`."""
    return name in (".lock", "repro.patch", "config.json") or (
        name.startswith((".study.json.", ".config.json.", ".repro.patch.")) and name[-4:] == ".tmp"
    )


def _difference(key: str, stored: Any, wanted: Any) -> str:
    if isinstance(stored, dict) and isinstance(wanted, dict):
        names = [n for n in sorted({*stored, *wanted}) if stored.get(n) != wanted.get(n)]
        if "code" in names and "code" in stored:
            return "of the same training before its code was changed"
        return "; ".join(f"{n}: there {stored.get(n)!r}, here {wanted.get(n)!r}" for n in names[:4])
    return f"{key}: there {stored!r}, here {wanted!r}"


def lock(path: Path) -> IO[str]:
    """Hold the folder for this process until the returned file is closed."""
    try:
        file = (path / ".lock").open("w")
    except OSError as error:
        raise RecordError(
            f"cannot write {path / '.lock'}: {error.strerror}. Give another folder with out=..."
        ) from error
    for left in reversed(range(TRIES)):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError as error:
            if left:
                time.sleep(0.05)
                continue
            file.close()
            raise RecordError(
                f"another process is writing {path}. Wait for it, interrupt it, or give another folder; wb.open() reads it meanwhile."
            ) from error
    _sweep(path)
    return file


def _sweep(path: Path) -> None:
    """Delete what killed processes were writing under temporary names in a study that this process holds now."""
    for left in path.rglob(".*"):
        if _TEMPORARY.fullmatch(left.name):
            shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink(missing_ok=True)


_TEMPORARY = re.compile(r"\.(step-\d+|part-\d+\.parquet|(study|config|diagnosis)\.json|repro\.patch)(\.\d+\.tmp|\.old)")
"""The names that `write_atomic` and checkpoints give to what is not whole yet; other hidden files may be a script's own."""


def is_locked(path: Path) -> bool:
    """Tell whether a process is writing this study now; this one counts. Nothing is created, and no writer is kept out for long."""
    try:
        with (path / ".lock").open("r") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def last_change(folder: Path, names: str = "*") -> float:
    """Return when the newest file of these names was written, 0 where there is none: files are replaced while they are looked at."""
    found = 0.0
    with contextlib.suppress(OSError):  # of a folder that vanishes
        for path in folder.rglob(names):
            with contextlib.suppress(OSError):
                about = path.stat()
                found = max(found, about.st_mtime if stat.S_ISREG(about.st_mode) else 0.0)
    return found


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`; a missing or damaged file is a `RecordError` that names it."""
    try:
        value = dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise RecordError(f"{path} does not exist.") from None
    except (TypeError, ValueError) as error:
        raise RecordError(f"{path} is damaged ({error}). {_WAY_OUT}") from error
    given = value.pop(_CHECKSUM, None)
    if given is not None and given != _checksum(value):
        raise RecordError(
            f"{path} is damaged: its contents do not have its checksum. {_WAY_OUT} If it was edited by hand, delete "
            f'the entry "{_CHECKSUM}".'
        )
    return value


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object to `path` by `write_atomic`, with a checksum of all but what may be edited by hand."""
    plain = json.loads(dumps(value))
    write_atomic(path, dumps({**plain, _CHECKSUM: _checksum(plain)}).encode())


def _checksum(value: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps({k: v for k, v in value.items() if k not in _EDITABLE}, sort_keys=True).encode())


def write_atomic(path: Path, content: bytes | Callable[[IO[bytes]], None]) -> None:
    """Write `content`, or what it writes into a file, to `path` through a temporary name and a rename."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            _ = content(file) if callable(content) else file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise RecordError(
            f"cannot write {path}: {error.strerror or error}. Nothing that was saved before is lost; free some space or "
            "choose another folder with out=..., then run the same call again to go on."
        ) from error
