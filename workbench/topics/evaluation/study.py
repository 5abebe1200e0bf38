"""`EvaluationStudy` and `EvaluationSampleStudy`: does a part tell what the whole splits tell, and which part to take? (P2.4, P3)."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, get_args

import numpy as np

from workbench.checks import check_integer, check_number
from workbench.errors import ConfigError, UnknownNameError, UsageError, nearest
from workbench.record.roles import Role
from workbench.studies.base import Study
from workbench.studies.session import Session
from workbench.topics.evaluation.check import collect_own_evaluation
from workbench.topics.evaluation.collect import (
    MAX_FEATURES,
    class_facts,
    measure_evaluation,
    memory_per_example,
    pair_facts,
    sample_facts,
    selected_model,
)
from workbench.topics.evaluation.offline import evaluate_checkpoints
from workbench.topics.evaluation.sample_size import detectable_difference, size_bounds
from workbench.topics.lr_sweep.study import TrialRequest, run_round, seeded
from workbench.train.example_values import (
    ONE_A_BATCH,
    ExampleValues,
    evaluation_batch,
    example_values,
    one_loss_a_batch,
)
from workbench.train.hooks import Pause
from workbench.workloads.subsets import (
    How,
    check_drawable,
    check_examples,
    draw_sample,
    periodic_subset,
    sample_id,
    subset_of,
)


@dataclass(frozen=True, kw_only=True)
class EvaluationStudy(Study):
    """Trains the baseline with a proxy for its periodic evaluations, keeps every checkpoint, and evaluates all of them offline.

    Attributes:
        examples: the proxy: so many examples of the validation split, drawn at random, or their indices; None is all of it.
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
        check_integer("evaluations", self.evaluations)
        check_integer("seeds", self.seeds)
        check_number("pause_s", self.pause_s, low=0.0)

    def extend(self, session: Session) -> None:
        """Train, evaluate every checkpoint offline, and train once more with a pause where one is asked for."""
        full = session.workload
        if self.examples is not None:
            size = len(full.validation_data)
            wanted = min(self.examples, size) if isinstance(self.examples, int) else self.examples
            session.workload = periodic_subset(full, wanted, seed=self.subset_seed)
        every = max(1, math.ceil(session.config.total_steps / self.evaluations))
        config = session.config.replace(
            eval_every_steps=every, checkpoint_every_steps=None, keep_best=self.evaluations + 2
        )
        part = subset_of(session.workload.validation_data)
        session.facts(subset=None if part is None else part.describe())
        session.collect("memory", lambda: memory_per_example(full, config, session.device))
        session.collect("evaluation", lambda: collect_own_evaluation(full, session.device))
        configs = seeded(config, config.peak_lr, self.seeds)
        numbers = [record.number for record in session.trials(configs, stage=Role.EVALUATION)]
        evaluate_checkpoints(full, session.writer, numbers, splits=self.offline_splits, device=session.trainer.device)
        if self.pause_s:
            at = config.eval_interval * max(1, round(config.total_steps / config.eval_interval / 3)) + 1
            held_up = replace(session.trainer, hooks=[*session.trainer.hooks, Pause(at, self.pause_s)])
            paused = configs[0].replace(keep_best=config.keep_best + 1)
            session.trials([paused], stage=Role.EVALUATION_PAUSE, trainer=held_up)


@dataclass(frozen=True, kw_only=True)
class EvaluationSampleStudy(Study):
    """Trains the baseline under two seeds, and proposes a sample of its validation set for periodic evaluation.

    The two models say how far equally good ones differ from example to example, which is what an improvement has to stand
    out from; one of them, evaluated on the full set, says whether the sample agrees with it.

    Attributes:
        budget_s: seconds that one evaluation may take; None is no bound.
        smallest_difference: the smallest improvement of the metric that should be told from chance; None asks for none.
        metric: a metric of the workload, or "loss"; None is the first one that is 0 or 1 for each example, else the loss.
        label_noise: share of labels that are wrong, for such a metric.
        size: examples to take; None is the most that the budget allows.
        how: "random", or "stratified" by class where the examples have classes.
        steps: length of a trial; None is the baseline's.
    """

    stem: ClassVar[str] = "evaluation_sample"

    budget_s: float | None = 1.0
    smallest_difference: float | None = None
    metric: str | None = None
    label_noise: float = 0.0
    size: int | None = None
    how: How = "random"
    sample_seed: int = 0
    steps: int | None = None

    def __post_init__(self) -> None:
        """Check every field that can be checked without the workload."""
        for name in ("budget_s", "smallest_difference"):
            if (value := getattr(self, name)) is not None:
                check_number(name, value)
        if self.size is not None:
            check_integer("size", self.size, hint="; None is what the budget allows")
        if self.how not in get_args(How):
            raise ConfigError(f"how={self.how!r} is not a way to draw a sample.{nearest(self.how, get_args(How))}")
        detectable_difference(1, accuracy=0.5, label_noise=self.label_noise, classes=1000)

    def extend(self, session: Session) -> None:
        """Train the baseline under two seeds, then measure, draw and test."""
        workload, config, device = session.workload, session.config, session.device
        check_drawable(workload.validation_data)
        if one_loss_a_batch(workload, config, device):
            raise UsageError(
                f'workload {workload.name!r}: {ONE_A_BATCH}. Give the loss reduction="none" to draw a sample by it.'
            )
        available = len(workload.validation_data)
        if self.size is not None and self.size > available:
            raise UsageError(
                f"size={self.size} is more than the {available} examples of the validation set. Allowed is 1 to {available}."
            )
        if self.metric is not None and self.metric not in (known := ("loss", *workload.metrics)):
            raise UnknownNameError(
                f"workload {workload.name!r} has no metric {self.metric!r}.{nearest(self.metric, known)}"
            )
        trials = run_round(session, [TrialRequest(Role.BASELINE, each) for each in seeded(config, config.peak_lr, 2)])
        if "evaluation_sample" in session.record.facts:
            return
        batch = evaluation_batch(workload, config, device)
        how: dict[str, Any] = {"device": device, "precision": config.precision, "batch_size": batch}
        models = [selected_model(workload, config, session.record, trial.number, device) for trial in trials]
        full = [
            example_values(workload, model, split="validation", max_features=MAX_FEATURES * (not i), **how)
            for i, model in enumerate(models)
        ]
        zero_one = [n for n, v in full[0].columns.items() if n != "loss" and np.isin(v, (0.0, 1.0)).all()]
        metric = self.metric or (zero_one[0] if zero_one else "loss")
        pair = pair_facts([(full[0], full[1])], metric=metric) | {"trials": [[trial.number for trial in trials]]}
        facts: dict[str, Any] = {
            "split": "validation", "metric": metric, "examples": available, "asked": asdict(self), "pair": pair,
            "timing": measure_evaluation(workload, models[0], **how), "compared": "two seeds of the baseline",
        }  # fmt: skip
        session.facts(evaluation_sample=facts | self._sample(session, facts, full))

    def _sample(self, session: Session, facts: dict[str, Any], full: list[ExampleValues]) -> dict[str, Any]:
        """Draw the sample, hold it against the full set and count its classes; {} where nothing can be evaluated in time."""
        labels, classes = full[0].labels, {"num_classes": full[0].classes}
        size = self.size or size_bounds(facts | classes).proposed
        if size is None:
            return classes | {"no_classes": "no sample can be evaluated in the time that is given"}
        how: How = "random" if labels is None else self.how
        data, by = session.workload.validation_data, labels if how == "stratified" else None
        sample = draw_sample(data, size, how=how, labels=by, seed=self.sample_seed)
        mask = np.zeros(len(full[0].weights), dtype=bool)
        mask[sample.indices] = True
        said = {"id": sample_id(sample.indices), "size": size, "how": how, "seed": self.sample_seed}
        counted = class_facts(session.workload, *(values.only(mask) for values in full))
        return {"sample": said, "skew": sample_facts(full[0], mask, str(facts["metric"])), **counted}
