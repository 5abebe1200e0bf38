"""`InputPipelineStudy`: does training wait for its data, why, and what would help (P1); `examine_input` is `workbench input`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.utils.data import DataLoader

from workbench.checks import check_integer
from workbench.config import TrainConfig
from workbench.errors import UsageError
from workbench.findings.diagnosis import Diagnosis
from workbench.plots.render import inline_svg, standalone_svg
from workbench.record.json_values import dumps, to_json
from workbench.record.parts import write_atomic
from workbench.record.read import StudyRecord
from workbench.record.roles import Role
from workbench.studies.base import Study
from workbench.studies.session import Session
from workbench.topics.input.audit import InputAudit, audit_input, default_device, write_trace
from workbench.topics.input.collect import Budget, Stepping, collect_input
from workbench.topics.input.diagnose import diagnose_input_pipeline
from workbench.topics.input.figures import plot_input_pipeline, plot_input_workers
from workbench.train.batches import to_device, train_batches
from workbench.train.forward import autocast, explained, per_example
from workbench.train.gradients import LoopGradients
from workbench.train.lane_stack import LaneStack
from workbench.train.rng import isolated_rng
from workbench.train.trainer import Trainer
from workbench.train.update_rules import make_updater
from workbench.workloads.base import Workload
from workbench.workloads.items import in_its_own_order, plain_tensors
from workbench.workloads.registry import load_named


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
            facts = collect_input(_training_loader(*made[:2]), _training_step(*made), self._budget())
        if self.trace:
            file = session.writer.record.path / "trace.json"
            with isolated_rng():
                written = write_trace(
                    _training_loader(*made[:2]), _training_step(*made), file, timeout_s=self.timeout_s
                )
            facts["trace"] = {**written, "path": "trace.json"}
        session.facts(input_pipeline=facts)


def _training_loader(workload: Workload, config: TrainConfig) -> Any:
    """Return a loader like the trainer's: a `DataLoader`, or, for tensors in memory, what gathers its batches."""
    data, micro = workload.train_data, config.batch_size // config.accumulate_steps
    if workload.num_workers == 0 and plain_tensors(data, workload.collate) is not None:
        return _Gathered(workload, config.replace(accumulate_steps=1, batch_size=micro))
    settings: dict[str, Any] = {"batch_size": micro, "drop_last": True, "collate_fn": workload.collate}
    workers = workload.num_workers
    if in_its_own_order(data):
        workers = min(1, workers)
    else:
        settings |= {"shuffle": True, "generator": torch.Generator().manual_seed(config.per_host_seed)}
    return DataLoader(data, num_workers=workers, persistent_workers=workers > 0, **settings)


class _Gathered:
    """The trainer's own batches of tensors that are in memory."""

    def __init__(self, workload: Workload, config: TrainConfig) -> None:
        self.workload, self.config, self.batch_size = workload, config, config.batch_size

    def __iter__(self) -> Iterator[Any]:
        for batches in train_batches(self.workload, self.config, torch.device("cpu")):
            yield batches[0][0]


def _training_step(workload: Workload, config: TrainConfig, device: torch.device) -> Stepping:
    """Return the trainer's step on a model of its own: forward, loss, gradient and update of one batch.

    The learning rate is 0, so that what is timed for long does not diverge; it costs the same.
    """
    stack = LaneStack(workload, [config], device)
    model = stack.models[0].train()
    gradients, updater = LoopGradients(workload, stack), make_updater([config], stack.values, stack.parameters)
    micro = config.batch_size // config.accumulate_steps
    lr = torch.zeros((1, 1), dtype=stack.values.dtype, device=device)
    dtype = {"float32": torch.float32, "float64": torch.float64}.get(config.precision or "")
    count = 0

    def step(batch: Any) -> None:
        nonlocal count
        with explained(workload, f"at step {count}"):
            gradients([[(to_device(batch, device, dtype), micro)]])
        stack.values.sub_(updater.update(stack.values, stack.grad, lr, count, [0.0]))
        count += 1

    def read(batch: Any) -> None:
        with torch.no_grad(), autocast(device, config.precision), explained(workload, "at the first batch"):
            outputs, _, _ = per_example(workload, model, batch, micro)
            for metric in workload.metrics.values():
                metric(outputs, batch)

    return Stepping(
        kind="workload", step=step, device=default_device(), read=read,
        prepare=lambda batch: to_device(batch, device, dtype),
    )  # fmt: skip


def examine_input(
    target: str,
    *,
    step: str | float | None = None,
    out: str | Path | None = None,
    device: str = "auto",
    seconds: float = 20.0,
    max_workers: int = 8,
    timeout_s: float = 60.0,
    command: str | None = None,
) -> Diagnosis:
    """Diagnose the input pipeline of a workload, or of a loader, that a name stands for.

    Args:
        target: a bundled workload, `package.module:attribute` or `path/to/file.py:attribute`; the attribute is a workload, a
            `DataLoader`, or a function that returns one of them when called with nothing.
        step: of a loader: the name of a function of one batch, or the seconds of a step; None looks at the loader alone.
        out: a folder for diagnosis.json, trace.json and pictures; None is a new study for a workload, and nothing for a loader.
        seconds: to look for, about.
        max_workers: worker processes to try.
        timeout_s: that a batch may take.

    Raises:
        UsageError: the name stands for something else, or a workload is given a step.
        DataError: the loader gives nothing, an item raised, or no batch came in time.
    """
    found = load_named(target, what="a workload or a loader")
    limits: dict[str, Any] = {"seconds": seconds, "max_workers": max_workers, "timeout_s": timeout_s}
    if isinstance(found, Workload):
        if step is not None:
            raise UsageError("a workload has its own step: leave --step and --step-s out.")
        record = InputPipelineStudy(**limits).run(found, Trainer(device=device), out=out)
        diagnosis = replace(diagnose_input_pipeline(record), path=record.path, command=command or record.command)
        _write(record.path, diagnosis, record)
        return diagnosis
    folder, doing = None if out is None else Path(out), step if not isinstance(step, str) else _named_step(step)
    audit = audit_input(found, doing, name=target, trace=None if folder is None else folder / "trace.json", **limits)
    diagnosis = replace(diagnose_input_pipeline(audit), path=folder, command=command)
    if folder is not None:
        write_atomic(folder / "facts.json", dumps(to_json(audit.facts)).encode())
        _write(folder, diagnosis, audit)
    return diagnosis


def _named_step(name: str) -> Callable[[Any], Any]:
    found = load_named(name, what="a step", call=False, anew=False)
    if not callable(found):
        raise UsageError(f"--step {name} must be a function of one batch, not {type(found).__name__}.")
    return found  # type: ignore[no-any-return]


def _write(folder: Path, diagnosis: Diagnosis, record: InputAudit | StudyRecord) -> None:
    """Write the verdict, and the pictures that have something to show."""
    write_atomic(folder / "diagnosis.json", dumps(diagnosis.to_dict()).encode())
    (folder / "figures").mkdir(exist_ok=True)
    for name, draw, alt in (
        ("input_pipeline", plot_input_pipeline, "where the time of a step goes"),
        ("input_workers", plot_input_workers, "batches per second against worker processes"),
    ):
        svg, _ = inline_svg(lambda ax, draw=draw: draw(record, ax=ax), key=name, alt=alt, size=(8.4, 3.6))  # type: ignore[misc]
        if svg is not None:
            write_atomic(folder / "figures" / f"{name}.svg", standalone_svg(svg).encode())
