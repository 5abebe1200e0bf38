"""What runs inside a program that is being diagnosed: begins with the import of torch, ends with the process.

Everything goes to the trial's scratch folder: `rows.jsonl` (blocks of columns), `metrics.jsonl`, `facts.json`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import re
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from workbench.instruments.caller import importing_packages
from workbench.instruments.log import listen, split_of
from workbench.instruments.losses.attention import WINDOW
from workbench.instruments.taps import TAPS
from workbench.programs.change import Change, Observing
from workbench.programs.guard import Guard
from workbench.programs.guard import begin as begin_to_guard
from workbench.programs.seeds import move_seeds, set_seeds, states
from workbench.programs.trainings import BuiltLines

_SWALLOWED = 3
"""Times that a program may catch its end before it is ended without being asked."""


def begin(path: str) -> None:
    """Begin to observe this process as the trial file at `path` says; a fault of ours is written down and changes nothing."""
    try:
        observed = Observed()
        observed.install()
        observed.start(json.loads(Path(path).read_text(encoding="utf-8")))
    except Exception as error:
        with contextlib.suppress(OSError):
            Path(path).with_name("fault.txt").write_text(f"{type(error).__name__}: {error}", encoding="utf-8")


class Observed(Observing):
    """One process of the program; the first one whose optimizer steps writes, of several ranks rank 0.

    `install` changes what has to be changed before other libraries are imported; nothing is observed before `start`.
    """

    def __init__(self) -> None:
        self._folder, self._trial = Path(), {}  # type: Path, Mapping[str, Any]
        self._pid = 0
        self._seed: int | None = None
        self._writes: bool | None = None if os.environ.get("RANK", "0") == "0" else False
        self._change = Change(at_end=self._finish, at_update=self._look, anew=self._observe)
        self._observer = self._fresh()
        self._handles: list[Any] = []
        self._patterns: list[tuple[str, re.Pattern[str]]] = []
        self._given: set[tuple[str, str]] = set()
        self._finished = False
        self._ends = 0
        self._seeded: list[str] = []
        self._reseeded: dict[str, int] = {}
        self._built = BuiltLines(at_first=lambda: self._guard().note_imports())
        self._packages: list[str] = []
        self._models: list[nn.Module] = []
        self._fault = ""
        self._first_update = 0.0
        self._lock = threading.Lock()

    def install(self) -> None:
        """Make this process ready to be observed."""
        self._seeded, _ = move_seeds(lambda: self._seed, seeded=self._reseed)
        self._observe()
        self._handles.append(TAPS.watch_modules())
        self._settle = TAPS.watch_criteria()
        self._built.watch()
        listen(self._logged)
        self._guard_saving()
        for name in ("stdout", "stderr"):
            setattr(sys, name, _Lines(getattr(sys, name), self._patterns, self._printed))
        atexit.register(self._finish)

    def start(self, trial: Mapping[str, Any]) -> None:
        """Seed the generators, and observe and change the program as the trial says from now on."""
        self._folder, self._trial, self._pid = Path(trial["folder"]), trial, os.getpid()
        self._patterns += [(name, re.compile(pattern)) for name, pattern in trial["patterns"].items()]
        for name in ("factor", "warmup_steps", "max_grad_norm", "stop_after"):
            setattr(self._change, name, trial[name])
        # the clocks of several processes differ: one would wait for another that has ended
        self._change.stop_s = trial.get("stop_s") if _world() == 1 else None
        self._change.constants = trial.get("constants") or {}
        self._change.unclipped = bool(trial.get("unclipped"))
        self._change.trainings.wanted = trial.get("training")
        self._observer.facts.judged = self._change.is_none()
        set_seeds(int(trial["seed"]))
        self._seed = int(trial["seed"])
        self._packages = importing_packages()
        self._observer.last = time.perf_counter()  # the first update begins here

    def _guard_saving(self) -> None:
        """Have `torch.save` refused like other writing: it opens its file where Python does not hear of it."""
        original = torch.save

        @functools.wraps(original)
        def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
            with self._guard().writing(f):
                return original(obj, f, *args, **kwargs)

        torch.save = save

    def _reseed(self, module: str) -> None:
        """Note how much is imported when a generator is seeded: what was drawn from it before is forgotten."""
        if not self._built.any:
            self._reseeded[module] = len(sys.modules)

    def _guard(self) -> Guard:
        return begin_to_guard(self._trial)

    def _look(self, updates: int) -> None:
        """Hold the models while they become known: those of a function are gone when the process ends and is asked for its facts."""
        if updates <= WINDOW and updates & (updates - 1) == 0:
            self._models = list(self._observer.facts.modes.roots())

    # ---- what is written

    def _take(self, columns: Mapping[str, list[float]]) -> None:
        if os.getpid() != self._pid:
            return
        self._change.saw(columns.get("loss") or [])  # every rank ends where the loss has, or the others wait for it
        if self._writes is False:
            return
        if self._writes is None:
            self._writes = self._claim()
            if not self._writes:
                return
        self._append("rows.jsonl", columns)
        if not self._first_update:
            self._first_update = time.time() - sum(columns["step_time_s"][1:])
        if (
            self._observer.updates >= WINDOW and self._handles
        ):  # by now the models are known: they tell of themselves, which costs less
            self._handles.pop().remove()
            self._settle()
            self._observer.facts.modes.attach(self._observer.entered)

    def _append(self, name: str, values: Mapping[str, Any]) -> None:
        """Write a line; where the folder is gone say so once, and let the program train on."""
        try:
            with self._lock, (self._folder / name).open("a", encoding="utf-8") as file:
                file.write(json.dumps(values) + "\n")
        except OSError as error:
            self._writes = False
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.write(f"workbench: nothing more is recorded ({error}); the program continues.\n")

    def _claim(self) -> bool:
        try:
            with (self._folder / "claimed").open("x", encoding="utf-8") as file:
                file.write(str(self._pid))
        except OSError:  # another process was there before, or the folder is gone
            return False
        return True

    def _metric(self, name: str, value: float) -> None:
        if os.getpid() != self._pid or self._writes is False or not self._change.trainings.is_on:
            return
        self._append("metrics.jsonl", {"update": self._observer.updates, "name": name, "value": value})

    def _printed(self, name: str, value: float) -> None:
        if split_of(name) not in self._given:  # by wb.log, with all of its digits
            self._metric(name, value)

    def _logged(self, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            if name == "loss":
                self._observer.log(loss=value)
            else:
                self._given.add(split_of(name))
                self._metric(name, float(value))

    def _on_fault(self, error: Exception) -> None:
        self._fault = f"{type(error).__name__}: {error}"
        if os.getpid() == self._pid:
            with contextlib.suppress(OSError):
                (self._folder / "fault.txt").write_text(self._fault, encoding="utf-8")

    def _finish(self) -> None:
        """Write the rest, once; a program that caught its end several times is ended here."""
        self._ends += 1
        if self._ends > _SWALLOWED:
            os._exit(0)
        if os.getpid() != self._pid or self._finished:
            return
        self._finished = self._ends > 0
        facts = self._observer.facts
        facts.ended = self._change.stop_after is None or self._observer.updates < self._change.stop_after
        with contextlib.suppress(Exception):
            self._observer.rows.flush()
        if self._writes is None and facts.order.backwards and self._claim():
            self._write_facts({"by_hand": {"passes": facts.order.backwards, "line": facts.order.last_backward}})
        if self._writes is not True:
            return
        self._write_facts({
            "loop": facts.to_dict(), "updates": self._observer.updates, "stopped": not facts.ended, "diverged": self._change.diverged,
            "seeded": self._seeded, "fault": self._fault, "world": _world(), "trainings": self._change.trainings.to_dict(), "built": self._built.of(self._change.optimizers), "threads": torch.get_num_threads(), "first_update": self._first_update,
            "start": {"pid": self._pid, "packages": self._packages, "states": states(), "reseeded": self._reseeded, **self._guard().imported()},
        })  # fmt: skip

    def _write_facts(self, found: Mapping[str, Any]) -> None:
        temporary = self._folder / ".facts.json"
        with contextlib.suppress(OSError):
            temporary.write_text(json.dumps(found), encoding="utf-8")
            temporary.replace(self._folder / "facts.json")


def _world() -> int:
    """Return how many processes train together."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


class _Lines:
    """A text stream that looks for metrics in the lines that go through it."""

    def __init__(self, stream: Any, patterns: Sequence[tuple[str, re.Pattern[str]]], found: Any) -> None:
        self._stream, self._patterns, self._found = stream, patterns, found
        self._open = ""

    def write(self, text: str) -> int:
        """Write through, and look at the lines that are whole now."""
        done: int = self._stream.write(text)
        if self._patterns and isinstance(text, str):
            self._open += text
            *lines, self._open = re.split(r"[\r\n]", self._open)
            for line in lines:
                self._look(line)
        return done

    def _look(self, line: str) -> None:
        for name, pattern in self._patterns:
            match = pattern.search(line)
            if match:
                with contextlib.suppress(ValueError, IndexError, TypeError):
                    self._found(name, float(match[1]))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
