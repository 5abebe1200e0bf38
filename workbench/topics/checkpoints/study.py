"""`CheckpointStudy`: the baseline under several seeds, evaluated often, on the test split as well (P4.3); `collect_resume` (P4.2)."""

import contextlib
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from workbench.checks import check_integer
from workbench.config import TrainConfig
from workbench.record.folder import lock
from workbench.record.read import TrialRecord
from workbench.record.roles import Role
from workbench.record.write import StudyWriter
from workbench.studies.base import Study
from workbench.studies.session import Session
from workbench.topics.checkpoints.resume import Trace, resume_facts
from workbench.topics.lr_sweep.study import TrialRequest, run_round, seeded
from workbench.train.hooks import Hook, Step
from workbench.train.trainer import Trainer
from workbench.workloads.base import Workload
from workbench.workloads.subsets import at_most

STEPS = 4  # updates before the checkpoint, and after it (rule of thumb: a few cost nothing)
MAX_EXAMPLES = 64  # validation examples that are looked at (rule of thumb)


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
        check_integer("seeds", self.seeds)
        check_integer("evaluations", self.evaluations, low=4)

    def extend(self, session: Session) -> None:
        """Run the study's trials inside a study that is already open."""
        if self.resume and "resume" not in session.record.facts:
            session.facts(resume=collect_resume(session.workload, session.config, session.device))
        every = max(1, session.config.total_steps // self.evaluations)
        config = session.config.replace(eval_every_steps=every, checkpoint_every_steps=every)
        before, splits = session.trainer, {"test"} if session.workload.test_data is not None else set()
        session.trainer = replace(before, evaluate_also=tuple({*before.evaluate_also, *splits}))
        try:
            seeds = seeded(config, config.peak_lr, self.seeds)
            run_round(session, [TrialRequest(Role.CHECKPOINTS, each) for each in seeds])
        finally:
            session.trainer = before


def collect_resume(workload: Workload, config: TrainConfig, device: torch.device) -> dict[str, Any]:
    """Return the facts that `resume_finding` judges: a few steps trained twice, and once with a crash in between."""
    config = config.replace(
        total_steps=2 * STEPS, warmup_steps=0, eval_every_steps=2 * STEPS, checkpoint_every_steps=STEPS, keep_best=1
    )
    workload = workload.replace(validation_data=at_most(workload.validation_data, MAX_EXAMPLES))
    with tempfile.TemporaryDirectory() as folder:
        whole, again, resumed = (
            _train(workload, config, device, Path(folder) / name, crash=name == "resumed")
            for name in ("whole", "again", "resumed")
        )
    facts = resume_facts(whole, again, resumed, STEPS)
    return facts | {"outside": bool(facts["changed"])}


class _CrashError(Exception):
    """Stands for a crash."""


class _Crash(Hook):
    def on_step(self, step: Step) -> None:
        if step.index == STEPS:
            raise _CrashError


def _train(workload: Workload, config: TrainConfig, device: torch.device, folder: Path, *, crash: bool) -> Trace:
    """Train in a folder of its own, outside of every ledger; with `crash`, break off behind the checkpoint and go on."""
    folder.mkdir()
    with contextlib.closing(lock(folder)) as held:
        for hooks in ([_Crash()], []) if crash else ([],):
            study = StudyWriter(folder, held)
            trainer = Trainer(device=str(device), gradients="loop", hooks=hooks)
            with contextlib.suppress(_CrashError):
                trainer.run_trials(workload, [config], study, stage=Role.RESUME)
        study.flush()
        record = TrialRecord(folder, 0)
        after = record.steps["loss"].to_numpy()[STEPS:].tolist()
        ended = record.evals[record.evals["step"] == 2 * STEPS]
        return Trace(after, {"evaluation": dict(zip(ended["metric"], ended["value"].tolist(), strict=True))})
