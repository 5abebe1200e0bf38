"""A person's command, run as often as is needed: each time in a folder of its own, observed, and ended with all that it started."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workbench.errors import UsageError, WorkbenchError

MAX_LINKS = 2000
"""Entries of a working directory that are linked one by one; folders that hold more are linked as a whole (rule of thumb)."""
_SKIPPED = {".git", "__pycache__", ".venv", "node_modules", "runs"}
_STARTUP = Path(__file__).parent / "startup"


@dataclass(frozen=True, kw_only=True)
class Command:
    """What a person types to train.

    Attributes:
        words: program and arguments, such as ("python", "train.py", "--epochs", "3").
        folder: where it is typed.
        redirect: files and folders in it that the program writes to: each run gets an empty one instead.
        copy: whether each run gets a copy of the whole folder, instead of links to its files.
        seed_arg: the program's own argument for its seed, such as "--seed".
        patterns: name of a metric -> pattern whose first group is its value, looked for in what the program prints.
        timeout_s: that one run may take; None is as long as it likes.
    """

    words: tuple[str, ...]
    folder: Path
    redirect: tuple[str, ...] = ()
    copy: bool = False
    seed_arg: str | None = None
    patterns: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float | None = None
    running: set[subprocess.Popen[bytes]] = field(default_factory=set, compare=False, repr=False)

    @property
    def name(self) -> str:
        """Return a short name: that of the script or module."""
        script = next((w for w in self.words if w.endswith(".py")), None)
        if script is not None:
            return Path(script).stem
        return (
            self.words[self.words.index("-m") + 1].rpartition(".")[2]
            if "-m" in self.words[:-1]
            else Path(self.words[0]).name
        )

    @property
    def shown(self) -> str:
        """Return what is run, in short."""
        return " ".join(self.words[-3:])

    @property
    def settings(self) -> dict[str, Any]:
        """Return what tells this command from another one, as JSON values."""
        return {
            "words": list(self.words), "folder": str(self.folder), "seed_arg": self.seed_arg, "redirect": list(self.redirect), "copy": self.copy,
        }  # fmt: skip

    def run(self, scratch: Path, trial: Mapping[str, Any], *, threads: int | None = None) -> Outcome:
        """Run it once, see `run_command`."""
        return run_command(self, scratch, trial, threads=threads)

    def stop(self) -> None:
        """End the runs that are under way."""
        for job in tuple(self.running):
            _end(job)

    def failure(self, outcome: Outcome) -> WorkbenchError:
        """Return the error that says why a run is of no use, and what to do."""
        return failure(self, outcome)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one run went.

    Attributes:
        columns: name -> one value an update.
        metrics: rows of update, name and value, in the order in which the program told them.
        facts: of the loop, see `LoopFacts`; empty where no update was made.
        code: exit code, below 0 for a signal.
        tail: end of what it printed.
        refused: path and line of a file of the person's own that it wanted to write, if it did.
    """

    columns: Mapping[str, Sequence[float]]
    metrics: Sequence[Mapping[str, Any]]
    facts: Mapping[str, Any]
    code: int
    seconds: float
    start_s: float
    tail: str
    refused: Mapping[str, Any] | None = None

    @property
    def updates(self) -> int:
        """Return how many updates it made."""
        return len(self.columns.get("lr", ()))


def check_command(words: Sequence[str], folder: Path) -> tuple[str, ...]:
    """Return the command in the form in which it is run.

    Raises:
        UsageError: there is none, or its program or script does not exist.
    """
    if not words:
        raise UsageError(
            "nothing stands behind --: give the command that trains, as in `workbench diagnose -- python train.py --epochs 3`."
        )
    given = list(words)
    if given[0].endswith(".py"):
        given.insert(0, sys.executable)
    if Path(given[0]).name in ("python", "python3"):
        given[0] = sys.executable
    elif shutil.which(given[0]) is None:
        raise UsageError(
            f"there is no program {given[0]!r}: give the command as it is typed, as in `workbench diagnose -- python train.py`."
        )
    script = given[1] if len(given) > 1 and given[0] == sys.executable else None
    if script is not None and script.endswith(".py") and not (folder / script).is_file():
        near = [path.name for path in folder.glob("*.py")]
        raise UsageError(
            f"there is no file {script!r} in {folder}.{' There are: ' + ', '.join(sorted(near)[:8]) + '.' if near else ''}"
        )
    return tuple(str((folder / w).resolve()) if w.startswith("..") and (folder / w).exists() else w for w in given)


def run_command(command: Command, scratch: Path, trial: Mapping[str, Any], *, threads: int | None = None) -> Outcome:
    """Run a command once in `scratch`, a folder that is made for it, and return what was seen.

    Args:
        trial: factor, warmup_steps, max_grad_norm, stop_after and seed, see `Change`.
        threads: for torch; None leaves it to the program.

    Raises:
        KeyboardInterrupt: Ctrl-C; the program and all that it started are ended.
    """
    told, place = scratch.resolve() / "told", scratch.resolve() / "run"
    told.mkdir(parents=True)
    _lay_out(command, place)
    path = told / "trial.json"
    given = dict(trial) | {
        "folder": str(told),
        "scratch": str(place),
        "guarded": str(command.folder),
        "patterns": dict(command.patterns),
    }
    path.write_text(json.dumps(given), encoding="utf-8")
    words = list(command.words)
    if command.seed_arg is not None:
        words += [command.seed_arg, str(trial["seed"])]
    began, started = time.perf_counter(), time.time()
    with (told / "output.txt").open("wb") as output:
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
        job = subprocess.Popen(
            words, cwd=place, env=_environment(path, command.folder, threads), start_new_session=True, **streams
        )
        command.running.add(job)
        try:
            code = job.wait(timeout=command.timeout_s)
        except subprocess.TimeoutExpired:
            code = -signal.SIGKILL
        finally:
            command.running.discard(job)
            _end(job)
    seconds = time.perf_counter() - began
    facts = _read(told / "facts.json") or {}
    refused = _read(told / "refused.json")
    return Outcome(
        columns=joined(_lines(told / "rows.jsonl")), metrics=_lines(told / "metrics.jsonl"), facts=facts, code=code,
        seconds=seconds, start_s=max(facts.get("first_update", started) - started, 0.0), tail=_tail(told / "output.txt"), refused=refused,
    )  # fmt: skip


def _environment(trial: Path, folder: Path, threads: int | None) -> dict[str, str]:
    package = str(Path(__file__).parents[2])
    paths = [str(_STARTUP), package, str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    found = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "WORKBENCH_TRIAL": str(trial)}
    found |= {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1", "WANDB_MODE": "offline"}
    return found if threads is None else {**found, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}


def _lay_out(command: Command, place: Path) -> None:
    """Make the folder that the program runs in: links to the person's files in folders of its own, or a copy."""
    redirected = {Path(name).as_posix().rstrip("/") for name in command.redirect}
    if command.copy:
        shutil.copytree(command.folder, place, symlinks=True, ignore=shutil.ignore_patterns(*_SKIPPED))
    else:
        _link(command.folder, place, "", redirected, [MAX_LINKS])
    for name in redirected:
        target = place / name
        if (command.folder / name).is_file() or (target.is_symlink() and target.is_file()):
            target.unlink(missing_ok=True)
        else:
            if target.is_symlink():
                target.unlink()
            target.mkdir(parents=True, exist_ok=True)


def _link(source: Path, target: Path, inside: str, redirected: set[str], left: list[int]) -> None:
    target.mkdir(parents=True)
    with os.scandir(source) as entries:
        for entry in sorted(entries, key=lambda e: e.name):
            name = f"{inside}{entry.name}"
            if name in redirected or (not inside and entry.name in _SKIPPED):
                continue
            left[0] -= 1
            if entry.is_dir(follow_symlinks=False) and left[0] > 0 and len(os.listdir(entry.path)) <= left[0]:
                _link(Path(entry.path), target / entry.name, f"{name}/", redirected, left)
            else:
                (target / entry.name).symlink_to(os.path.abspath(entry.path))


def _end(job: subprocess.Popen[bytes]) -> None:
    """End what is left of a run, which has a process group of its own: asked first, then killed."""
    for number, seconds in ((signal.SIGTERM, 2.0), (signal.SIGKILL, 5.0)):
        try:
            os.killpg(job.pid, number)
        except (ProcessLookupError, PermissionError):
            break
        until = time.monotonic() + seconds
        while time.monotonic() < until and _alive(job.pid):
            job.poll()
            time.sleep(0.02)
    with contextlib.suppress(subprocess.TimeoutExpired):
        job.wait(timeout=5.0)


def _alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None


def _lines(path: Path) -> list[dict[str, Any]]:
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def joined(blocks: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """Return blocks of rows as one; a column that a block lacks is NaN there."""
    names = list(dict.fromkeys(name for block in blocks for name in block))
    columns: dict[str, list[float]] = {name: [] for name in names}
    for block in blocks:
        count = len(next(iter(block.values())))
        for name in names:
            columns[name] += block.get(name, [float("nan")] * count)
    return columns


def _tail(path: Path, *, most: int = 4000) -> str:
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - most, 0))
        return file.read().decode("utf-8", errors="replace")


def failure(command: Command, outcome: Outcome) -> WorkbenchError:
    """Return the error that says why a run is of no use, and what to do."""
    shown = " ".join(command.words)
    last = " ".join(outcome.tail.split()[-40:])
    said = f" It printed last: {last}" if last else ""
    if outcome.refused is not None:
        path = str(outcome.refused["path"])
        top = path.split("/", maxsplit=1)[0]
        where = f" ({outcome.refused['line']})" if outcome.refused.get("line") else ""
        return UsageError(
            f"`{shown}` writes to {path}{where}, which was there before, so it was stopped: nothing of yours is overwritten. Give --redirect {top}, and each "
            "run gets an empty one of its own; or --copy, and each run gets a copy of the folder."
        )
    if outcome.code < 0:
        name = signal.Signals(-outcome.code).name if -outcome.code in set(signal.Signals) else str(-outcome.code)
        return WorkbenchError(
            f"`{shown}` was ended by {name} after {outcome.seconds:.0f} s and {outcome.updates} updates.{said}"
        )
    if outcome.code:
        return WorkbenchError(
            f"`{shown}` failed with exit code {outcome.code} after {outcome.updates} updates: it has to run by itself first.{said}"
        )
    return WorkbenchError(
        f"`{shown}` came to its end without a step of a torch optimizer that was seen. Is it the command that trains? Python started with -I or -S, "
        f"or without PYTHONPATH, cannot be observed.{said}"
    )
