"""`audit_input`: an input pipeline looked at by itself, with the step that uses its batches, or with a step of known length."""

from __future__ import annotations

import inspect
import math
import multiprocessing
import re
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from workbench.errors import ConfigError, UsageError, WorkbenchError
from workbench.findings.audited import Audit
from workbench.topics.input.collect import Budget, Stepping, collect_input
from workbench.topics.input.loop import Device
from workbench.topics.input.trace import write_trace

__all__ = ["InputAudit", "audit_input", "checked_budget", "default_device"]

_SHOWN = 160
"""Characters of an error's own message that are repeated; the whole of it is its cause."""


class InputAudit(Audit):
    """What `audit_input` found, for `diagnose_input_pipeline`."""


def audit_input(
    loader: DataLoader[Any] | Any,
    step: Callable[[Any], Any] | float | None = None,
    *,
    name: str | None = None,
    seconds: float = 20.0,
    max_workers: int = 8,
    timeout_s: float = 60.0,
    synchronize: Callable[[], object] | None = None,
    trace: str | Path | None = None,
) -> InputAudit:
    """Time a loader and its step, look for what makes it slow in short ablations, and try the change that answers it.

    The loader itself is not iterated over: its dataset, sampler and collate function are, in loaders made like it, and all
    random state is put back. A `step` makes real updates, several hundred of them: give it a model that may be spoilt.

    Args:
        loader: the `DataLoader` that you train with. Anything else that gives batches is timed, but cannot be taken apart: a
            subclass that iterates in its own way, a list, an iterator, a generator function, which is called anew for each epoch.
        step: takes one batch and makes one update; or the seconds of one; None looks at the loader alone, and nobody can say then
            whether that is too slow.
        name: for the report; None is the dataset's class.
        seconds: to look for, about; a loader of a few batches a second takes longer.
        max_workers: worker processes to try, at most.
        timeout_s: that a batch may take.
        synchronize: waits until the device has done what steps handed to it, where that is no CUDA device.
        trace: a file for a Chrome trace of some steps, which Perfetto opens.

    Returns:
        What was found; `diagnose_input_pipeline` judges it.

    Raises:
        UsageError: `loader` or `step` is nothing of that kind.
        ConfigError: a number is out of its range.
        DataError: the loader gives nothing, an item raised, a worker died, or no batch came within `timeout_s`.
        WorkbenchError: the step raised.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise UsageError(
            "audit_input was called by a worker process while it imports the script that started it. Put what the script does "
            'under `if __name__ == "__main__":`, so that importing it does nothing.'
        )
    if isinstance(loader, Dataset) and not isinstance(loader, DataLoader):
        raise UsageError(
            f"loader is a dataset ({type(loader).__name__}); give the loader that you train with, "
            "for example DataLoader(dataset, batch_size=..., num_workers=...)."
        )
    if inspect.isgeneratorfunction(loader):
        loader = _Generated(loader)
    if not hasattr(loader, "__iter__") or isinstance(loader, (str, bytes, dict)):
        raise UsageError(f"loader must be a DataLoader, not {type(loader).__name__} ({str(loader)[:60]}).")
    budget = checked_budget(seconds=seconds, max_workers=max_workers, timeout_s=timeout_s)
    stepping = _stepping(step, synchronize)
    facts = {"input_pipeline": collect_input(loader, stepping, budget)}
    if trace is not None:
        facts["input_pipeline"]["trace"] = write_trace(loader, stepping, trace, timeout_s=timeout_s)
    return InputAudit(facts=facts, workload=name or type(getattr(loader, "dataset", loader)).__name__)


class _Generated:
    """A generator function as a loader: each epoch is a call."""

    def __init__(self, function: Callable[[], Iterator[Any]]) -> None:
        try:
            inspect.signature(function).bind()
        except TypeError as error:
            raise UsageError(
                f"the generator function {function.__name__} needs arguments; give one without, such as lambda or functools.partial."
            ) from error
        self.function = function

    def __iter__(self) -> Iterator[Any]:
        return self.function()


def checked_budget(*, seconds: float, max_workers: int, timeout_s: float) -> Budget:
    """Return the budget of these numbers; one that is out of its range is a `ConfigError`."""
    for what, value in (("seconds", seconds), ("timeout_s", timeout_s)):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise ConfigError(f"{what}={value!r} must be a finite number of seconds above 0.")
    if isinstance(max_workers, bool) or not isinstance(max_workers, int) or max_workers < 0:
        raise ConfigError(f"max_workers={max_workers!r} must be an integer of at least 0: worker processes to try.")
    return Budget(seconds=seconds, timeout_s=timeout_s, max_workers=max_workers)


def default_device(synchronize: Callable[[], object] | None = None) -> Device:
    """Return how to wait for what steps run on: the function given, CUDA where it is in use, else nothing to wait for."""
    if synchronize is not None:
        return Device(wait=synchronize, ahead=True)
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return Device(wait=torch.cuda.synchronize, ahead=True)
    return Device(wait=lambda: None, ahead=False)


def _stepping(step: Any, synchronize: Callable[[], object] | None) -> Stepping:
    device = default_device(synchronize)
    if step is None:
        return Stepping(kind="none", step=None, device=device)
    if isinstance(step, (int, float)) and not isinstance(step, bool):
        if not 0 <= step < math.inf:
            raise ConfigError(
                f"step={step!r} must be a finite number of seconds of at least 0, or a function of a batch."
            )
        length = float(step)
        return Stepping(kind="seconds", step=lambda _: time.sleep(length), device=device)
    if not callable(step):
        raise UsageError(f"step must be a function of one batch, seconds, or None, not {type(step).__name__}.")
    return Stepping(kind="function", step=_told(step), device=device)


def _told(step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a step; what it raises is told with the line that it was in and what the batch is."""

    def told(batch: Any) -> Any:
        try:
            return step(batch)
        except WorkbenchError:
            raise
        except Exception as error:
            said = (str(error).splitlines() or ["no message"])[0]
            short = said if len(said) <= _SHOWN else f"{said[:_SHOWN]} ..."
            raise UsageError(
                f"your step raised {type(error).__name__}{_line_of(error)} on a batch that is {_kind(batch)}: {short}"
            ) from error

    return told


def _line_of(error: Exception) -> str:
    """Name the innermost line that is no library's."""
    frames = [
        f
        for f in traceback.extract_tb(error.__traceback__)[1:]
        if not re.search(r"(site|dist)-packages[/\\]", f.filename)
    ]
    return f" in {frames[-1].name} ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""


def _kind(batch: Any) -> str:
    """Return what a batch is made of: "a list of [Tensor, Tensor]"."""
    if isinstance(batch, Mapping):
        inner = ", ".join(f"{key!r}: {type(part).__name__}" for key, part in batch.items())
        return f"a {type(batch).__name__} of {{{inner}}}"
    if isinstance(batch, (list, tuple)):
        return f"a {type(batch).__name__} of [{', '.join(type(part).__name__ for part in batch)}]"
    shape = getattr(batch, "shape", None)
    return f"a {type(batch).__name__}" + (f" of shape {tuple(shape)}" if shape is not None else "")
