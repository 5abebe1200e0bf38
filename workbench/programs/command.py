"""A person's command, run as often as is needed: each time in a folder of its own, observed, and ended with all that it started."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from workbench.errors import UsageError, WorkbenchError, nearest
from workbench.instruments.caller import shown
from workbench.programs.forks import Forks, Job, NotForked, end_run
from workbench.programs.guard import take_back
from workbench.programs.layout import lay_out, outermost, top_of
from workbench.record.redact import redact

_STARTUP = Path(__file__).parent / "startup"
GRACE_S = 30.0
"""That a run may take to its end after it was ended early, for what it saves and cleans up (rule of thumb)."""


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
    running: dict[Job, Path] = field(default_factory=dict, compare=False, repr=False)
    stopped: threading.Event = field(default_factory=threading.Event, compare=False, repr=False)
    forks: Forks = field(default_factory=Forks, compare=False, repr=False)

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
        return redact(" ".join([Path(self.words[0]).name, *self.words[1:]][-3:]))

    @property
    def settings(self) -> dict[str, Any]:
        """Return what tells this command from another one, as JSON values."""
        return {
            "command": redact(shlex.join(self.words)), "folder": str(self.folder), "seed_arg": self.seed_arg, "redirect": list(self.redirect), "copy": self.copy,
            "patterns": dict(self.patterns), "code": self._code(),
        }  # fmt: skip

    @property
    def remark(self) -> str:
        """Return why its runs imported everything themselves, "" where they did not have to."""
        return f"each run imported everything itself: {self.forks.why}" if self.forks.why else ""

    def _code(self) -> str:
        """Return what tells the script and what stands beside it from what they were."""
        named = [self.folder / word for word in self.words if word.endswith(".py")]
        found = hashlib.sha256()
        for path in sorted({*named, *self.folder.glob("*.py")}):
            with contextlib.suppress(OSError):
                text = path.read_bytes()
                found.update(f"{path.name} {len(text)} ".encode() + text)
        return found.hexdigest()[:16]

    def run(self, scratch: Path, trial: Mapping[str, Any], *, threads: int | None = None) -> Outcome:
        """Run it once, see `run_command`: forked where that is certain to be the same."""
        seed, began = (int(trial["seed"]), *(trial.get("training") or ())), time.perf_counter()
        if self.forks.can(self.words, seed):
            with contextlib.suppress(NotForked):
                outcome = run_command(self, scratch, trial, threads=threads, forked=True)
                if self.forks.same(seed, outcome, self.timeout_s):
                    return outcome
            shutil.rmtree(scratch, ignore_errors=True)
        outcome = run_command(self, scratch, trial, threads=threads)
        self.forks.saw(seed, outcome)
        return replace(outcome, seconds=time.perf_counter() - began)

    def stop(self) -> None:
        """End the runs that are under way, and begin no other one."""
        self.stopped.set()
        self.forks.end()
        for job, trial in tuple(self.running.items()):
            end_run(job, trial)

    def failure(self, outcome: Outcome) -> WorkbenchError:
        """Return the error that says why a run is of no use, and what to do."""
        return failure(self, outcome)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one run went.

    Attributes:
        columns: name -> one value an update.
        metrics: rows of update, name and value, in the order in which the program told them.
        facts: of the loop, see `LoopFacts`; where no update was made, no more than the fault that kept this package from seeing any.
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
            "nothing was given after --: give the command that trains, as in `workbench diagnose -- python train.py --epochs 3`."
        )
    given = list(words)
    if given[0].endswith(".py"):
        given.insert(0, sys.executable)
    if Path(given[0]).name in ("python", "python3"):
        given[0] = sys.executable
    elif shutil.which(given[0]) is None:
        # An environment that is not activated: its torchrun and accelerate stand beside its python.
        beside = Path(sys.executable).parent / Path(given[0]).name
        if Path(given[0]).name != given[0] or shutil.which(beside) is None:
            raise UsageError(
                f"there is no program {given[0]!r}: give the command as it is typed, as in `workbench diagnose -- python train.py`."
            )
        given[0] = str(beside)
    script = given[1] if len(given) > 1 and given[0] == sys.executable else None
    if script is not None and script.endswith(".py") and not (folder / script).is_file():
        there = [path.name for path in (folder / script).parent.glob("*.py")]
        near = nearest(Path(script).name, there, listed="There are", most=8) if there else ""
        raise UsageError(f"there is no file {script!r} in {folder}.{near}")
    return tuple(str((folder / w).resolve()) if w.startswith("..") and (folder / w).exists() else w for w in given)


def run_command(
    command: Command, scratch: Path, trial: Mapping[str, Any], *, threads: int | None = None, forked: bool = False
) -> Outcome:
    """Run a command once in `scratch`, a folder that is made for it, and return what was seen.

    Args:
        trial: factor, warmup_steps, max_grad_norm, stop_after and seed, see `Change`.
        threads: for torch; None leaves it to the program.
        forked: whether its process is one of `command.forks`.

    Raises:
        NotForked: it has to be a process of its own.
        KeyboardInterrupt: Ctrl-C; the program and all that it started are ended.
        WorkbenchError: `scratch` was removed meanwhile.
    """
    told, place = scratch.resolve() / "told", scratch.resolve() / "run"
    told.mkdir(parents=True)
    twin, top = lay_out(command.folder, place, redirect=command.redirect, copy=command.copy), top_of(command.folder)
    path = told / "trial.json"
    given = dict(trial) | {
        "folder": str(told),
        "scratch": str(place),
        "typed_in": str(command.folder),
        "guarded": str(top),
        "patterns": dict(command.patterns),
    }
    path.write_text(json.dumps(given), encoding="utf-8")
    words = list(command.words)
    if command.seed_arg is not None:
        words += [command.seed_arg, str(trial["seed"])]
    began, started = time.perf_counter(), time.time()
    with (told / "output.txt").open("wb") as output, _terminal() as typed:
        streams: dict[str, Any] = {"stdin": typed, "stdout": output, "stderr": subprocess.STDOUT}
        if command.stopped.is_set():  # while the folder was laid out
            raise KeyboardInterrupt
        known = _environment(path, command.folder, threads)
        job: Job
        if forked:
            job = command.forks.run(
                words, twin, path, (typed, output.fileno()), environment=known, folder=command.folder
            )
        else:
            job = subprocess.Popen(words, cwd=twin, env=known, start_new_session=True, **streams)
        command.running[job] = path
        if command.stopped.is_set():
            end_run(job, path)
        try:
            code = _awaited(job, told, command.forks.limit_s(command.timeout_s) if forked else command.timeout_s)
        finally:
            command.running.pop(job, None)
            end_run(job, path)
            take_back(str(told))
    seconds = time.perf_counter() - began
    if not told.is_dir():
        raise WorkbenchError(
            f"{scratch} was removed while `{redact(' '.join(command.words))}` ran there; leave the study's folder in place, and give the command again."
        )
    facts = _read(told / "facts.json") or {}
    if facts.get("start", {}).get("pid", job.pid) != job.pid:
        facts["start"]["why"] = "it trains in a process that it starts itself"
    with contextlib.suppress(OSError):
        facts = facts or {"fault": (told / "fault.txt").read_text(encoding="utf-8")}
    refused = _read(told / "refused.json")
    return Outcome(
        columns=joined(_lines(told / "rows.jsonl")), metrics=_lines(told / "metrics.jsonl"), facts=facts, code=code,
        seconds=seconds, start_s=max(facts.get("first_update", started) - started, 0.0),
        tail=_tail(told / "output.txt").replace(str(outermost(place, top)), str(top)), refused=refused,
    )  # fmt: skip


def _awaited(job: Job, told: Path, timeout_s: float | None) -> int:
    """Return the exit code of a run: 0 where it was ended early and does not go, as one that waits for children of its own."""
    began, ended = time.monotonic(), math.inf
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return job.wait(timeout=0.5 if timeout_s is None else min(0.5, timeout_s))
        now = time.monotonic()
        if timeout_s is not None and now - began > timeout_s:
            return -signal.SIGKILL
        if ended == math.inf and (told / "facts.json").exists():
            facts = _read(told / "facts.json") or {}
            ended = now if facts.get("stopped") or facts.get("diverged") else math.inf
        if now - ended > GRACE_S:
            return 0


@contextlib.contextmanager
def _terminal() -> Iterator[int]:
    """Yield a standard input that is a terminal as for somebody who types the command, and at its end: scripts ask for its width."""
    if os.name != "posix":
        yield subprocess.DEVNULL
        return
    import pty
    import termios

    ours, theirs = pty.openpty()
    try:
        termios.tcsetwinsize(theirs, (24, 80))
        os.write(ours, b"\x04" * 256)  # so many times it reads as ended
        yield theirs
    finally:
        os.close(ours)
        os.close(theirs)


def _environment(trial: Path, folder: Path, threads: int | None) -> dict[str, str]:
    package = str(Path(__file__).parents[2])
    paths = [str(_STARTUP), package, str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    found = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "WORKBENCH_TRIAL": str(trial)}
    found |= {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1", "WANDB_MODE": "offline"}
    return found if threads is None else {**found, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}


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


def printed_last(tail: str, *, lines: int = 6) -> str:
    """Return the last lines of what a program printed as a part of a sentence; of a traceback its error, and the line of the program's own that it came from."""
    plain = re.sub(r"\x1b\[[\d;]*[A-Za-z]", "", tail)  # without colours
    found = [line for line in re.split(r"[\r\n]+", plain) if line.strip(" ^~")]
    return redact(_raised(found, lines) or " | ".join(" ".join(line.split()) for line in found[-lines:]))


def _raised(printed: Sequence[str], lines: int) -> str:
    """Return line and error of a traceback that ends in the last lines, "" without one."""
    began = [number for number, line in enumerate(printed) if line.startswith("Traceback (most recent call last)")]
    frames = [
        (number, place, found[2])
        for number, line in enumerate(printed)
        if began and number > began[-1] and (found := re.match(r' +File "(.+)", line (\d+)', line))
        and (place := shown(found[1]))
    ]  # fmt: skip
    if not frames:
        return ""
    number, place, line = frames[-1]
    error = next((k for k in range(number, len(printed)) if not printed[k].startswith(" ")), 0)
    said = " ".join(" ".join(printed[error:]).split())
    return f"{place}:{line}, `{printed[number + 1].strip()}`: {said}" if error >= len(printed) - lines else ""


_MISSING = re.compile(r"No such file|not found|NotFoundError|not exist|not a directory", re.IGNORECASE)


def failure(command: Command, outcome: Outcome) -> WorkbenchError:
    """Return the error that says why a run is of no use, and what to do."""
    words = redact(" ".join([Path(command.words[0]).name, *command.words[1:]]))
    last = printed_last(outcome.tail)
    said = f" It printed last: {last}" if last else ""
    if outcome.refused is not None:
        path = str(outcome.refused["path"])
        top = re.match(r"(\.\./)*[^/]+", path)[0]  # type: ignore[index]  # every path has a first part
        where = f" ({outcome.refused['line']})" if outcome.refused.get("line") else ""
        return UsageError(
            f"`{words}` writes to, moves or removes {path}{where}, which was there before, so it was stopped: nothing of yours is overwritten. Give --redirect {top}, and each "
            "run gets an empty one of its own; or --copy, and each run gets a copy of the folder."
        )
    if outcome.code < 0:
        name = signal.Signals(-outcome.code).name if -outcome.code in set(signal.Signals) else str(-outcome.code)
        return WorkbenchError(
            f"`{words}` was ended by {name} after {outcome.seconds:.0f} s and {outcome.updates} updates.{said}"
        )
    if outcome.code:
        reach = ""
        if "EOFError" in last:
            reach = " Nobody types while it is diagnosed: what it asks for has to be given as an argument."
        elif _MISSING.search(last):
            reach = f" It ran in a twin of {command.folder}, with what lies in {top_of(command.folder)}: what it reads from elsewhere needs an absolute path."
        return WorkbenchError(
            f"`{words}` failed with exit code {outcome.code} after {outcome.updates} updates: it has to run by itself first.{reach}{said}"
        )
    if outcome.facts.get("fault"):
        return WorkbenchError(
            f"`{words}` could not be observed to its end, an error in this package ({outcome.facts['fault']}). The program itself ran to its own.{said}"
        )
    if outcome.updates:
        return WorkbenchError(
            f"`{words}` ended after {outcome.updates} updates in a way that Python does not see, such as os._exit, so what its loop does is not known: have it end by sys.exit, or at its last line.{said}"
        )
    if by_hand := outcome.facts.get("by_hand"):
        return WorkbenchError(
            f"`{words}` made {by_hand['passes']:,} backward passes ({by_hand['line']}), and no optimizer of torch.optim stepped, so that there is no learning rate to change: "
            f"update the parameters by torch.optim.SGD(model.parameters(), lr) instead of by hand.{said}"
        )
    return WorkbenchError(
        f"`{words}` ended, and no step of a torch optimizer was observed. Is it the command that trains? Python started with -I or -S, "
        f"or without PYTHONPATH, cannot be observed, nor can a short training that ends by os._exit.{said}"
    )
