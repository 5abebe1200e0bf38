"""`audit_input`: an input pipeline looked at by itself, with a step, its seconds, or a workload's own; and its Chrome trace (P1.1, P1.2)."""

from __future__ import annotations

import inspect
import math
import multiprocessing
import os
import re
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.data import DataLoader, Dataset

from workbench.errors import ConfigError, UsageError, WorkbenchError
from workbench.findings.audited import Audit
from workbench.topics.data.order import untouched
from workbench.topics.input.collect import Budget, Stepping, collect_input
from workbench.topics.input.loaders import TimedBatch, batches_of, closed, timed_loader, torch_loader
from workbench.topics.input.loop import Device
from workbench.train.rng import isolated_rng

_SHOWN = 160
"""Characters of an error's own message that are repeated; the whole of it is its cause."""
LOADING, STEP = "data loading", "training step"
"""Names of the spans."""


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
            "wb.input.audit was called by a worker process while it imports the script that started it. Put what the script does "
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
    budget = Budget(seconds=seconds, max_workers=max_workers, timeout_s=timeout_s)
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


def default_device(synchronize: Callable[[], object] | None = None) -> Device:
    """Return how to wait for what steps run on: the function given, CUDA where it is in use, else nothing to wait for."""
    if synchronize is not None:
        return Device(wait=synchronize, ahead=True)
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return Device(wait=torch.cuda.synchronize, ahead=True)
    return Device()


def _stepping(step: Any, synchronize: Callable[[], object] | None) -> Stepping:
    device = default_device(synchronize)
    if step is None:
        return Stepping(kind="none", step=None, device=device)
    if isinstance(step, (int, float)) and not isinstance(step, bool):
        if not 0 <= step < math.inf:
            raise ConfigError(
                f"step={step!r} must be a finite number of seconds of at least 0, or a function of a batch."
            )
        return Stepping(kind="seconds", step=lambda _: time.sleep(float(step)), device=device)
    if not callable(step):
        raise UsageError(f"step must be a function of one batch, seconds, or None, not {type(step).__name__}.")

    def explained(batch: Any) -> Any:
        try:
            return step(batch)
        except WorkbenchError:
            raise
        except Exception as error:
            message = (str(error).splitlines() or ["no message"])[0]
            short = message if len(message) <= _SHOWN else f"{message[:_SHOWN]} ..."
            frames = [
                f
                for f in traceback.extract_tb(error.__traceback__)[1:]
                if not re.search(r"(site|dist)-packages[/\\]", f.filename)
            ]
            place = f" in {frames[-1].name} ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
            raise UsageError(
                f"your step raised {type(error).__name__}{place} on a batch that is {_kind(batch)}: {short}"
            ) from error

    return Stepping(kind="function", step=explained, device=device)


def _kind(batch: Any) -> str:
    """Return what a batch is made of: "a list of [Tensor, Tensor]"."""
    name, shape = type(batch).__name__, getattr(batch, "shape", None)
    if isinstance(batch, Mapping):
        inner = ", ".join(f"{key!r}: {type(part).__name__}" for key, part in batch.items())
        return f"a {name} of {{{inner}}}"
    if isinstance(batch, (list, tuple)):
        return f"a {name} of [{', '.join(type(part).__name__ for part in batch)}]"
    return f"a {name}" + (f" of shape {tuple(shape)}" if shape is not None else "")


def write_trace(
    loader: Any, stepping: Stepping, path: str | Path, *, steps: int = 20, timeout_s: float = 60.0
) -> dict[str, Any]:
    """Write a trace of at most `steps` steps that https://ui.perfetto.dev opens, and return "path" and "steps".

    Args:
        loader: a `DataLoader`, or whatever gives batches.
        stepping: what is called with each.
        path: ends in .json or .json.gz; its folder is made.
        timeout_s: for a batch.
    """
    file = Path(path)
    if not file.name.endswith((".json", ".json.gz")):
        raise UsageError(f"trace={str(path)!r} must end in .json or .json.gz: it is a Chrome trace.")
    file.parent.mkdir(parents=True, exist_ok=True)
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
    own, done = torch_loader(loader), 0
    with (
        untouched(loader) if isinstance(loader, DataLoader) else isolated_rng(),
        closed(timed_loader(own) if own is not None else loader) as timed,
    ):
        batches = iter(batches_of(timed, timeout_s=timeout_s))
        # or torch's profiler writes to the terminal when it starts and stops
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        with profile(activities=activities) as profiler:
            while done < steps:
                with record_function(LOADING):
                    batch = next(batches, None)
                if batch is None:
                    break
                with record_function(STEP):
                    if stepping.step is not None:
                        stepping.step(batch.data if isinstance(batch, TimedBatch) else batch)
                done += 1
            stepping.device.wait()
        batches.close()  # type: ignore[attr-defined]  # a generator: its worker processes are gone with it
    profiler.export_chrome_trace(str(file))
    return {"path": str(file), "steps": done}
