"""`InputPipelineStudy`: does training wait for its data, why, and what would help (P1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from workbench.checks import check_integer
from workbench.record.roles import Role
from workbench.studies.base import Study
from workbench.studies.session import Session
from workbench.topics.input.audit import (
    checked_budget,
    collect_workload_input,
    training_loader,
    training_step,
    write_trace,
)
from workbench.train.rng import isolated_rng

STAGE = Role.INPUT_PIPELINE


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
        checked_budget(seconds=self.seconds, max_workers=self.max_workers, timeout_s=self.timeout_s)

    def extend(self, session: Session) -> None:
        """Train, then audit."""
        session.trial(session.config, stage=STAGE)
        if "input_pipeline" in session.record.facts:
            return
        workload, config, device = session.workload, session.config, session.device
        budget = checked_budget(seconds=self.seconds, max_workers=self.max_workers, timeout_s=self.timeout_s)
        facts = collect_workload_input(workload, config, device, budget)
        if self.trace:
            with isolated_rng():
                loader, stepping = training_loader(workload, config), training_step(workload, config, device)
                made = write_trace(
                    loader, stepping, session.writer.record.path / "trace.json", timeout_s=self.timeout_s
                )
            facts["trace"] = {**made, "path": "trace.json"}
        session.facts(input_pipeline=facts)
