"""`CheckpointStudy`: the baseline under several seeds, evaluated often, on the test split as well (P4.3)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from workbench.errors import ConfigError
from workbench.record.roles import Role
from workbench.studies.base import Study
from workbench.studies.session import Session
from workbench.topics.checkpoints.resume_trainer import collect_resume
from workbench.topics.lr_sweep.rounds import Asked, run_round
from workbench.topics.lr_sweep.study import seeded

__all__ = ["CheckpointStudy"]

STAGE = Role.CHECKPOINTS


@dataclass(frozen=True, kw_only=True)
class CheckpointStudy(Study):
    """The baseline as it is, under fresh seeds: where is its best checkpoint, and what is the last one worth?

    The test split decides nothing. It is evaluated beside the validation split, so that what selection has won there can be told
    from luck. A workload without test data trains all the same, and the diagnosis says what it could not tell.

    Attributes:
        seeds: trials, the baseline's own seed first (rule of thumb).
        steps: length of a trial; None is the baseline's.
        evaluations: of a trial, at least; each may become a checkpoint (rule of thumb).
        resume: also train a few steps twice, once through a checkpoint, and compare (P4.2).
    """

    stem: ClassVar[str] = "checkpoints"

    seeds: int = 5
    steps: int | None = None
    evaluations: int = 40
    resume: bool = True

    def __post_init__(self) -> None:
        """Check every field."""
        for name, least in (("seeds", 1), ("evaluations", 4)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{name}={value!r} must be an integer of at least {least}.")

    def extend(self, session: Session) -> None:
        """Run the study's trials inside a study that is already open."""
        if self.resume and "resume" not in session.record.facts:
            session.facts(resume=collect_resume(session.workload, session.config, session.device))
        every = max(1, session.config.total_steps // self.evaluations)
        config = session.config.replace(eval_every_steps=every, checkpoint_every_steps=every)
        before = session.trainer
        if session.workload.test_data is not None:
            session.trainer = replace(before, evaluate_also=tuple({*before.evaluate_also, "test"}))
        try:
            run_round(session, [Asked(STAGE, one) for one in seeded(config, config.peak_lr, self.seeds)])
        finally:
            session.trainer = before
