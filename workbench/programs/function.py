"""`Function`: a function that builds and trains, run as often as is needed, in this process or in others."""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import inspect
import io
import multiprocessing
import pickle
import random
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workbench.errors import UsageError, WorkbenchError
from workbench.instruments.caller import own_line
from workbench.instruments.log import listen, numbers
from workbench.instruments.losses.attention import WINDOW
from workbench.instruments.taps import TAPS
from workbench.programs.change import Change, Observing, Stopped
from workbench.programs.command import Outcome, joined, printed_last
from workbench.programs.seeds import Seed, move_seeds, set_seeds
from workbench.programs.trainings import BuiltLines

_TAIL = 4000


class FunctionRun:
    """One call of a function that trains; what it is given as its argument.

    Attributes:
        seed: of this call. The generators of torch, Python and NumPy are seeded with it already.
    """

    def __init__(self, seed: int, logged: Callable[[Mapping[str, float]], None]) -> None:
        self.seed: int = Seed(seed)
        self._logged = logged

    def log(self, **values: float | Tensor) -> None:
        """Record values of the update in progress, such as `run.log(validation_loss=0.31)`; `loss` stands in for the one of `backward`."""
        self._logged(numbers(values))


@dataclass(frozen=True, kw_only=True)
class Function:
    """A function `train(run)` that builds and trains from scratch at every call.

    Attributes:
        jobs: processes that call it at a time; None is this process.
    """

    train: Callable[[FunctionRun], object]
    jobs: int | None = None
    patterns: Mapping[str, str] = field(default_factory=dict)
    running: set[BaseProcess] = field(default_factory=set, compare=False, repr=False)

    @property
    def name(self) -> str:
        """Return the function's name."""
        train, _ = _unbound(self.train)
        name = getattr(train, "__name__", type(train).__name__)
        return "train" if name == "<lambda>" else str(name)

    @property
    def shown(self) -> str:
        """Return the function as it is called."""
        return f"{self.name}(run)"

    @property
    def settings(self) -> dict[str, Any]:
        """Return where the function is, and what its text is, so that another one does not go on with its study."""
        train, bound = _unbound(self.train)
        try:
            text = inspect.getsource(train)
        except (OSError, TypeError):
            text = ""
        where = f"{getattr(train, '__module__', '')}:{getattr(train, '__qualname__', self.name)}"
        found: dict[str, Any] = {"function": where, "code": hashlib.sha256(text.encode()).hexdigest()[:16]}
        return found | {"bound": bound} if bound else found

    def run(self, scratch: Path, trial: Mapping[str, Any], *, threads: int | None = None) -> Outcome:  # noqa: ARG002
        """Call it once, changed as `trial` says, and return what was seen."""
        return run_function(self.train, trial) if self.jobs is None else self._elsewhere(trial)

    def _elsewhere(self, trial: Mapping[str, Any]) -> Outcome:
        context = multiprocessing.get_context("spawn")
        mine, theirs = context.Pipe(duplex=False)
        threads = max(1, torch.get_num_threads() // (self.jobs or 1))
        process = context.Process(target=_worker, args=(theirs, self.train, dict(trial), threads), daemon=True)
        began = time.perf_counter()
        process.start()
        theirs.close()
        self.running.add(process)
        try:
            outcome: Outcome = mine.recv()
        except EOFError:
            process.join()
            said = f"its process ended with code {process.exitcode}"
            outcome = Outcome(
                columns={}, metrics=[], facts={}, code=process.exitcode or 1, seconds=time.perf_counter() - began, start_s=0.0, tail=said,
            )  # fmt: skip
        except BaseException:
            process.kill()
            raise
        finally:
            self.running.discard(process)
            mine.close()
            process.join()
        return outcome

    remark = ""

    def stop(self) -> None:
        """End the calls in other processes."""
        for process in tuple(self.running):
            process.kill()

    def failure(self, outcome: Outcome) -> WorkbenchError:
        """Return the error that says why a call is of no use, and what to do."""
        said = printed_last(outcome.tail)
        if outcome.code:
            return WorkbenchError(
                f"{self.name}(run) failed after {outcome.updates} updates: {said}. It has to run by itself first."
            )
        if outcome.facts.get("fault"):
            return WorkbenchError(
                f"{self.name}(run) could not be observed to its end, an error in this package ({outcome.facts['fault']})."
            )
        return WorkbenchError(
            f"{self.name}(run) returned, and no step of a torch optimizer was observed. It has to build its model and its optimizer, and train, at every call."
            + (f" It printed last: {said}" if said else "")
        )


def _unbound(train: Any) -> tuple[Any, list[str]]:
    """Return the function below `functools.partial`, and what is bound; an object's address is no part of what it is."""
    bound = []
    while isinstance(train, functools.partial):
        bound.append(re.sub(r" at 0x[0-9a-f]+", "", f"{train.args!r} {sorted(train.keywords.items())!r}"))
        train = train.func
    return train, bound


def check_function(train: Any, jobs: int | None) -> None:
    """Raise where `train` is no function of one argument, or cannot be called in another process though `jobs` asks for that."""
    if not callable(train):
        raise UsageError(
            f"diagnose_function(train) needs a function `train(run)` that builds and trains; given: {type(train).__name__}."
        )
    try:
        inspect.signature(train).bind(None)
    except TypeError as error:
        raise UsageError(
            f"{getattr(train, '__name__', train)} must take one argument, `run`, as in `def train(run): ...` ({error}); bind others with functools.partial."
        ) from None
    except ValueError:
        pass  # a builtin has no signature
    if jobs is None:
        return
    try:
        pickle.dumps(train)
        main = sys.modules["__main__"]
        found = getattr(train, "__module__", None) != "__main__" or hasattr(main, "__file__")
    except Exception:
        found = False
    if not found:
        raise UsageError(
            f"jobs={jobs} calls {getattr(train, '__name__', train)} in other processes, which have to import it: put it into a file beside the notebook and import it "
            "from there, or leave jobs out."
        )


def run_function(train: Callable[[FunctionRun], object], trial: Mapping[str, Any]) -> Outcome:
    """Call `train` once in this process, changed as `trial` says, and return what was seen; nothing is left behind.

    Generators of random numbers are what they were before. What it prints is kept for the case that it fails.

    Raises:
        KeyboardInterrupt: Ctrl-C.
    """
    printed = io.StringIO()
    code, said = 0, ""
    began = time.perf_counter()
    with _own_randomness(), _Observed(trial) as seen:
        try:
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
                train(FunctionRun(trial["seed"], seen.logged))
        except Stopped:
            pass
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
        except Exception as error:
            code, said = 1, f"{type(error).__name__}: {str(error).rstrip('.')}{_place(error)}"
    seconds = time.perf_counter() - began
    gc.collect()  # models and optimizers refer to themselves in circles
    return Outcome(
        columns=joined(seen.blocks), metrics=seen.metrics, facts=seen.facts, code=code, seconds=seconds,
        start_s=max(seen.first_update - began, 0.0), tail=said or printed.getvalue()[-_TAIL:],
    )  # fmt: skip


def _worker(answer: Any, train: Callable[[FunctionRun], object], trial: Mapping[str, Any], threads: int) -> None:
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # the process that asked is the one that is interrupted, and ends this one
    torch.set_num_threads(threads)
    answer.send(run_function(train, trial))
    answer.close()


def _place(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = own_line(trace.tb_frame) if trace is not None else ""
    return f" ({where})" if where else ""


@contextlib.contextmanager
def _own_randomness() -> Iterator[None]:
    """Put the states of the generators back afterwards."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 (what a person draws from is put back)
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002


class _Observed(Observing):
    """What is seen of one call, and how it is changed."""

    def __init__(self, trial: Mapping[str, Any]) -> None:
        self._seed = int(trial["seed"])
        self._change = Change(
            factor=trial["factor"], constants=trial.get("constants") or {}, warmup_steps=trial["warmup_steps"],
            unclipped=bool(trial.get("unclipped")), max_grad_norm=trial["max_grad_norm"], stop_after=trial["stop_after"],
            stop_s=trial.get("stop_s"), anew=self._observe,
        )  # fmt: skip
        self._change.trainings.wanted = trial.get("training")
        self._observer = self._fresh()
        self.blocks: list[Mapping[str, list[float]]] = []
        self.metrics: list[dict[str, Any]] = []
        self.facts: dict[str, Any] = {}
        self.first_update = 0.0
        self._fault = ""
        self._known = False
        self._built = BuiltLines()
        self._handles: list[Any] = []

    def __enter__(self) -> _Observed:
        self._undo = contextlib.ExitStack()
        set_seeds(self._seed)
        self._seeded, unmoved = move_seeds(lambda: self._seed)
        self._undo.callback(unmoved)
        self._undo.callback(self._built.watch())
        self._observe()
        self._undo.callback(lambda: TAPS.remove(self._observer))
        self._handles = [TAPS.watch_modules()]
        self._undo.callback(self._remove_handles)
        self._settle = TAPS.watch_criteria()
        self._undo.callback(self._settle)
        self._undo.callback(listen(self.logged))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._undo.close()
        facts = self._observer.facts
        facts.ended = self._change.stop_after is None or self._observer.updates < self._change.stop_after
        self._observer.rows.flush()
        self.facts = {
            "loop": facts.to_dict(), "updates": self._observer.updates, "stopped": not facts.ended, "diverged": self._change.diverged,
            "seeded": self._seeded, "fault": self._fault, "world": 1, "threads": torch.get_num_threads(),
            "built": self._built.of(self._change.optimizers), "trainings": self._change.trainings.to_dict(),
        }  # fmt: skip

    def logged(self, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            if name == "loss":
                self._observer.log(loss=value)
            elif self._change.trainings.is_on:
                self.metrics.append({"update": self._observer.updates, "name": name, "value": value})

    def _take(self, columns: Mapping[str, list[float]]) -> None:
        self.blocks.append(columns)
        if not self.first_update:
            self.first_update = time.perf_counter() - sum(columns["step_time_s"][1:])
        self._change.saw(columns.get("loss") or [])
        if self._observer.updates >= WINDOW and not self._known:  # by now the models are, and tell of themselves
            self._known = True
            self._settle()
            self._remove_handles()
            self._handles = self._observer.facts.modes.attach(self._observer.entered)

    def _remove_handles(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _on_fault(self, error: Exception) -> None:
        self._fault = f"{type(error).__name__}: {error}"
