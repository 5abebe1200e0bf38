"""`examine_input`: what `workbench input` does, for a workload or for a loader by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from workbench.errors import UsageError
from workbench.findings.diagnosis import Diagnosis
from workbench.plots.render import inline_svg, standalone_svg
from workbench.record.json_values import dumps, to_json
from workbench.record.parts import write_atomic
from workbench.record.read import StudyRecord
from workbench.topics.input.audit import InputAudit, audit_input
from workbench.topics.input.diagnose import diagnose_input_pipeline
from workbench.topics.input.figures import plot_input_pipeline, plot_input_workers
from workbench.topics.input.study import InputPipelineStudy
from workbench.train.trainer import Trainer
from workbench.workloads.base import Workload
from workbench.workloads.registry import load_named


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
    if isinstance(found, Workload):
        if step is not None:
            raise UsageError("a workload has its own step: leave --step and --step-s out.")
        study = InputPipelineStudy(seconds=seconds, max_workers=max_workers, timeout_s=timeout_s)
        record = study.run(found, Trainer(device=device), out=out)
        diagnosis = replace(diagnose_input_pipeline(record), path=record.path, command=command or record.command)
        _write(record.path, diagnosis, record)
        return diagnosis
    folder = None if out is None else Path(out)
    doing: Callable[[Any], Any] | float | None = _step(step) if isinstance(step, str) else step
    audit = audit_input(
        found, doing, name=target, seconds=seconds, max_workers=max_workers, timeout_s=timeout_s,
        trace=None if folder is None else folder / "trace.json",
    )  # fmt: skip
    diagnosis = replace(diagnose_input_pipeline(audit), path=folder, command=command)
    if folder is not None:
        write_atomic(folder / "facts.json", dumps(to_json(audit.facts)).encode())
        _write(folder, diagnosis, audit)
    return diagnosis


def _step(name: str) -> Callable[[Any], Any]:
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
