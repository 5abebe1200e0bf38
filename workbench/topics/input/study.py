"""`audit_input`: an input pipeline by itself, with a step, its seconds, or a workload's own; its study, and what `workbench input` does (P1)."""

import inspect
import math
import multiprocessing
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.utils.data import DataLoader, Dataset

from workbench.checks import check_integer
from workbench.config import TrainConfig
from workbench.errors import ConfigError, UsageError, WorkbenchError, in_one_line
from workbench.findings.audited import Audit
from workbench.findings.diagnosis import Diagnosis
from workbench.plots.render import inline_svg, standalone_svg
from workbench.record.folder import write_atomic, write_json
from workbench.record.json_values import dumps, to_json
from workbench.record.read import StudyRecord
from workbench.record.roles import Role
from workbench.studies.base import Study
from workbench.studies.session import Session
from workbench.topics.input.collect import Budget, Stepping, collect_input
from workbench.topics.input.diagnose import diagnose_input_pipeline
from workbench.topics.input.figures import plot_input_pipeline, plot_input_workers
from workbench.topics.input.timed_loop import Wait, at_once, write_trace
from workbench.train.batches import kind_of, to_device, train_batches
from workbench.train.forward import autocast, explained, per_example
from workbench.train.gradients import LoopGradients
from workbench.train.optimizers import make_updater
from workbench.train.rng import isolated_rng
from workbench.train.stacked_weights import LaneStack
from workbench.train.trainer import Trainer
from workbench.workloads.base import Workload
from workbench.workloads.items import in_its_own_order, plain_tensors
from workbench.workloads.registry import load_named


def audit_input(
    loader: DataLoader[Any] | Any, step: Callable[[Any], Any] | float | None = None, *, name: str | None = None, seconds: float = 20.0,
    max_workers: int = 8, timeout_s: float = 60.0, synchronize: Callable[[], object] | None = None, trace: str | Path | None = None,
) -> Audit:  # fmt: skip
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
        facts["input_pipeline"]["trace"] = write_trace(loader, stepping.step, stepping.wait, trace, timeout_s=timeout_s)
    return Audit(facts=facts, workload=name or type(getattr(loader, "dataset", loader)).__name__)


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


def _wait_for_device() -> Wait:
    on_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.cuda.synchronize if on_cuda else at_once


def _stepping(step: Any, synchronize: Callable[[], object] | None) -> Stepping:
    wait = synchronize or _wait_for_device()
    if step is None:
        return Stepping(kind="none", step=None, wait=wait)
    if isinstance(step, (int, float)) and not isinstance(step, bool):
        if not 0 <= step < math.inf:
            raise ConfigError(f"step={step!r} must be finite seconds of at least 0, or a function of a batch.")
        return Stepping(kind="seconds", step=lambda _: time.sleep(float(step)), wait=wait)
    if not callable(step):
        raise UsageError(f"step must be a function of one batch, seconds, or None, not {type(step).__name__}.")

    def told(batch: Any) -> Any:
        try:
            return step(batch)
        except WorkbenchError:
            raise
        except Exception as error:
            raise UsageError(f"your step raised {in_one_line(error)}, on a batch that is {kind_of(batch)}.") from error

    return Stepping(kind="function", step=told, wait=wait)


@dataclass(frozen=True, kw_only=True)
class InputPipelineStudy(Study):
    """Trains a few steps, which says what the trainer waits for, then takes the loader apart and tries what answers the cause.

    Attributes:
        steps: of the trial; None is the baseline's length.
        seconds: for the ablations, about; a loader of a few batches a second takes longer.
        max_workers: worker processes to try, at most.
        timeout_s: that a batch may take.
        trace: write trace.json into the study's folder, a Chrome trace that Perfetto opens (P1.2).
    """

    stem: ClassVar[str] = "input_pipeline"

    steps: int | None = 100
    seconds: float = 20.0
    max_workers: int = 8
    timeout_s: float = 60.0
    trace: bool = True

    def __post_init__(self) -> None:
        """Check the numbers."""
        if self.steps is not None:
            check_integer("steps", self.steps, low=2, hint=", or None for the baseline's")
        self._budget()

    def _budget(self) -> Budget:
        return Budget(seconds=self.seconds, max_workers=self.max_workers, timeout_s=self.timeout_s)

    def extend(self, session: Session) -> None:
        """Train, then audit."""
        session.trial(session.config, stage=Role.INPUT_PIPELINE)
        if "input_pipeline" in session.record.facts:
            return
        made = session.workload, session.config, session.device
        with isolated_rng():
            facts = collect_input(*_as_trained(*made), self._budget())
        if self.trace:
            file = session.writer.record.path / "trace.json"
            with isolated_rng():
                loader, stepping = _as_trained(*made)
                traced = write_trace(loader, stepping.step, stepping.wait, file, timeout_s=self.timeout_s)
            facts["trace"] = {**traced, "path": "trace.json"}
        session.facts(input_pipeline=facts)


class _Gathered:
    """The trainer's own batches of tensors that are in memory."""

    def __init__(self, workload: Workload, config: TrainConfig) -> None:
        self.workload, self.config, self.batch_size = workload, config, config.batch_size

    def __iter__(self) -> Iterator[Any]:
        for batches in train_batches(self.workload, self.config, torch.device("cpu")):
            yield batches[0][0]


def _as_trained(workload: Workload, config: TrainConfig, device: torch.device) -> tuple[Any, Stepping]:
    """Return a loader like the trainer's, and its step on a model of its own: forward, loss, gradient and update of one batch."""
    data, micro, workers = workload.train_data, config.batch_size // config.accumulate_steps, workload.num_workers
    loader: Any = _Gathered(workload, config.replace(accumulate_steps=1, batch_size=micro))
    if workers or plain_tensors(data, workload.collate) is None:
        order: dict[str, Any] = {"shuffle": True, "generator": torch.Generator().manual_seed(config.per_host_seed)}
        if in_its_own_order(data):
            workers, order = min(1, workers), {}
        order |= {"num_workers": workers, "persistent_workers": workers > 0}
        loader = DataLoader(data, micro, drop_last=True, collate_fn=workload.collate, **order)
    stack = LaneStack(workload, [config], device)
    model = stack.models[0].train()
    gradients = LoopGradients(workload, stack)
    updater = make_updater([config], stack.values, stack.parameters, stack.models)
    lr = torch.zeros((1, 1), dtype=stack.values.dtype, device=device)
    dtype = {"float32": torch.float32, "float64": torch.float64}.get(config.precision or "")
    count = 0

    def prepare(batch: Any) -> Any:
        return to_device(batch, device, dtype)

    def step(batch: Any) -> None:
        nonlocal count
        with explained(workload, f"at step {count}"):
            gradients([[(prepare(batch), micro)]])
        stack.values.sub_(updater.update(stack.values, stack.grad, lr, count, [0.0]))
        count += 1

    def read(batch: Any) -> None:
        with torch.no_grad(), autocast(device, config.precision), explained(workload, "at the first batch"):
            outputs, _, _ = per_example(workload, model, batch, micro)
            for metric in workload.metrics.values():
                metric(outputs, batch)

    return loader, Stepping(kind="workload", step=step, wait=_wait_for_device(), read=read, prepare=prepare)


def examine_input(
    target: str, *, step: str | float | None = None, out: str | Path | None = None, device: str = "auto",
    command: str | None = None, **limits: Any,
) -> Diagnosis:  # fmt: skip
    """Diagnose the input pipeline of a workload or a loader by name; the other arguments are those of `audit_input`."""
    found = load_named(target, what="a workload or a loader")
    if isinstance(found, Workload):
        if step is not None:
            raise UsageError("a workload has its own step: leave --step and --step-s out.")
        record = InputPipelineStudy(**limits).run(found, Trainer(device=device), out=out)
        diagnosis = replace(diagnose_input_pipeline(record), path=record.path, command=command or record.command)
        _write(record.path, diagnosis, record)
        return diagnosis
    if isinstance(found, torch.Tensor | str | bytes):
        raise UsageError(
            f"{target} is a {type(found).__name__}, which is no workload, DataLoader or dataset: give what makes batches."
        )
    doing: Any = step
    folder = None if out is None else Path(out)
    if isinstance(step, str):
        doing = load_named(step, what="a step", call=False, anew=False)
        if not callable(doing):
            raise UsageError(f"--step {step} must be a function of one batch, not {type(doing).__name__}.")
    audit = audit_input(found, doing, name=target, trace=None if folder is None else folder / "trace.json", **limits)
    diagnosis = replace(diagnose_input_pipeline(audit), path=folder, command=command)
    if folder is not None:
        write_atomic(folder / "facts.json", dumps(to_json(audit.facts)).encode())
        _write(folder, diagnosis, audit)
    return diagnosis


def _write(folder: Path, diagnosis: Diagnosis, record: Audit | StudyRecord) -> None:
    """Write the verdict, and the pictures that have something to show."""
    write_json(folder / "diagnosis.json", diagnosis.to_dict())
    (folder / "figures").mkdir(exist_ok=True)
    for name, draw, alt in (
        ("input_pipeline", plot_input_pipeline, "where the time of a step goes"),
        ("input_workers", plot_input_workers, "batches per second against worker processes"),
    ):
        svg, _ = inline_svg(lambda ax, draw=draw: draw(record, ax=ax), key=name, alt=alt, size=(8.4, 3.6))  # type: ignore[misc]
        if svg is not None:
            write_atomic(folder / "figures" / f"{name}.svg", standalone_svg(svg).encode())
