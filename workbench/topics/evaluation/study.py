"""`EvaluationStudy`: does what is evaluated while training tell what the whole splits tell? (P2.4)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from workbench.config import TrainConfig
from workbench.errors import ConfigError
from workbench.record.roles import Role
from workbench.studies.base import Study
from workbench.studies.session import Session
from workbench.topics.evaluation.check import collect_own_evaluation
from workbench.topics.evaluation.memory import memory_per_example
from workbench.train.hooks import Pause
from workbench.train.offline import evaluate_checkpoints
from workbench.workloads.subsets import check_examples, periodic_subset, subset_of

__all__ = ["EvaluationStudy"]

STAGE, PAUSED = Role.EVALUATION, Role.EVALUATION_PAUSE


@dataclass(frozen=True, kw_only=True)
class EvaluationStudy(Study):
    """Trains the baseline with a proxy for its periodic evaluations, keeps every checkpoint, and evaluates all of them offline.

    Attributes:
        examples: the proxy: so many examples of the validation split, drawn at random, or their indices; None is all of it.
        subset_seed: of the draw.
        evaluations: of a trial, after the initial one; the last may come earlier.
        seeds: trials, under as many seeds.
        steps: length of a trial; None is the baseline's.
        offline_splits: to evaluate offline; None is validation, and test where there is one.
        pause_s: seconds that one more trial, else the same as the first, is held up for at a third of its length; 0 leaves it out.
    """

    stem: ClassVar[str] = "evaluation"

    examples: int | Sequence[int] | None = 64
    subset_seed: int = 0
    evaluations: int = 20
    seeds: int = 1
    steps: int | None = None
    offline_splits: Sequence[str] | None = None
    pause_s: float = 0.0

    def __post_init__(self) -> None:
        """Check the numbers; the indices are checked against the split later on."""
        if self.examples is not None:
            check_examples(self.examples)
        for name in ("evaluations", "seeds"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name}={value!r} must be an integer of at least 1.")
        number = isinstance(self.pause_s, (int, float)) and not isinstance(self.pause_s, bool)
        if not (number and 0 <= self.pause_s < math.inf):
            raise ConfigError(f"pause_s={self.pause_s!r} must be a number of seconds of at least 0.")

    def extend(self, session: Session) -> None:
        """Train, evaluate every checkpoint offline, and train once more with a pause where one is asked for."""
        full = session.workload
        if self.examples is not None:
            size = len(full.validation_data)
            wanted = min(self.examples, size) if isinstance(self.examples, int) else self.examples
            session.workload = periodic_subset(full, wanted, seed=self.subset_seed)
        config = self._config(session.config)
        part = subset_of(session.workload.validation_data)
        session.facts(subset=None if part is None else part.describe())
        session.collect("memory", lambda: memory_per_example(full, config, session.device))
        session.collect("evaluation", lambda: collect_own_evaluation(full, session.device))
        configs = [
            config.replace(shared_seed=config.shared_seed + k, per_host_seed=config.per_host_seed + k)
            for k in range(self.seeds)
        ]
        records = session.trials(configs, stage=STAGE)
        numbers = [record.number for record in records]
        evaluate_checkpoints(full, session.writer, numbers, splits=self.offline_splits, device=session.trainer.device)
        if self.pause_s:
            at = config.eval_interval * max(1, round(config.total_steps / config.eval_interval / 3)) + 1
            held_up = replace(session.trainer, hooks=[*session.trainer.hooks, Pause(at, self.pause_s)])
            session.trials([configs[0].replace(keep_best=config.keep_best + 1)], stage=PAUSED, trainer=held_up)

    def _config(self, config: TrainConfig) -> TrainConfig:
        every = max(1, math.ceil(config.total_steps / self.evaluations))
        return config.replace(eval_every_steps=every, checkpoint_every_steps=None, keep_best=self.evaluations + 2)
