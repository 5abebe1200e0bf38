"""`EvaluationSampleStudy`: which part of the full set to evaluate on during training, and whether it is like the whole (P3)."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, get_args

import numpy as np

from workbench.errors import ConfigError, UnknownNameError, UsageError, nearest
from workbench.record.roles import Role
from workbench.studies.base import Study
from workbench.studies.session import Session
from workbench.topics.evaluation.cost import measure_evaluation
from workbench.topics.evaluation.detectable import detectable_difference
from workbench.topics.evaluation.sample_size import size_bounds
from workbench.topics.evaluation.validation_set import (
    MAX_FEATURES,
    class_facts,
    pair_facts,
    sample_facts,
    selected_model,
)
from workbench.topics.lr_sweep.rounds import Asked, run_round
from workbench.topics.lr_sweep.study import seeded
from workbench.train.coupled_losses import evaluation_batch
from workbench.train.evaluation import ExampleValues, example_values
from workbench.workloads.subsets import How, check_drawable, draw_sample

__all__ = ["EvaluationSampleStudy"]


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
        sample_seed: decides which examples.
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
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name}={value!r} must be a finite number above 0; None leaves it open.")
        if self.size is not None and (isinstance(self.size, bool) or not isinstance(self.size, int) or self.size < 1):
            raise ConfigError(f"size={self.size!r} must be an integer of at least 1; None is what the budget allows.")
        if self.how not in get_args(How):
            raise ConfigError(f"how={self.how!r} is no way to draw a sample.{nearest(self.how, get_args(How))}")
        detectable_difference(1, accuracy=0.5, label_noise=self.label_noise, classes=1000)

    def extend(self, session: Session) -> None:
        """Train the baseline under two seeds, then measure, draw and test."""
        check_drawable(session.workload.validation_data)
        available = len(session.workload.validation_data)
        if self.size is not None and self.size > available:
            raise UsageError(
                f"size={self.size} is more than the {available} examples of the validation set. Allowed is 1 to {available}."
            )
        known = ("loss", *session.workload.metrics)
        if self.metric is not None and self.metric not in known:
            raise UnknownNameError(
                f"workload {session.workload.name!r} has no metric {self.metric!r}.{nearest(self.metric, known)}"
            )
        config = session.config
        trials = run_round(session, [Asked(Role.BASELINE, each) for each in seeded(config, config.peak_lr, 2)])
        if "evaluation_sample" in session.record.facts:
            return
        how: dict[str, Any] = {
            "device": session.device,
            "precision": config.precision,
            "batch_size": evaluation_batch(session.workload, config, session.device),
        }
        models = [
            selected_model(session.workload, config, session.record, trial.number, session.device) for trial in trials
        ]
        full = [
            example_values(session.workload, model, split="validation", max_features=MAX_FEATURES * (not i), **how)
            for i, model in enumerate(models)
        ]
        metric = self._metric(full[0])
        pair = pair_facts([(full[0], full[1])], metric=metric) | {"trials": [[trial.number for trial in trials]]}
        facts: dict[str, Any] = {
            "split": "validation", "metric": metric, "examples": available, "asked": asdict(self), "pair": pair,
            "timing": measure_evaluation(session.workload, models[0], **how), "compared": "two seeds of the baseline",
        }  # fmt: skip
        session.facts(evaluation_sample=facts | self._sample(session, facts, full))

    def _metric(self, values: ExampleValues) -> str:
        zero_one = [n for n, v in values.columns.items() if n != "loss" and np.isin(v, (0.0, 1.0)).all()]
        return self.metric or (zero_one[0] if zero_one else "loss")

    def _sample(self, session: Session, facts: dict[str, Any], full: list[ExampleValues]) -> dict[str, Any]:
        """Draw the sample, hold it against the full set and count its classes; {} where nothing can be evaluated in time."""
        labels = full[0].labels
        facts = facts | {"num_classes": full[0].classes}
        size = self.size or size_bounds(facts).proposed
        if size is None:
            return {
                "num_classes": full[0].classes,
                "no_classes": "no sample can be evaluated in the time that is given",
            }
        how = "random" if labels is None else self.how
        sample = draw_sample(
            session.workload.validation_data,
            size,
            how=how,
            labels=labels if how == "stratified" else None,
            seed=self.sample_seed,
        )
        mask = np.zeros(len(full[0].weights), dtype=bool)
        mask[sample.indices] = True
        said = {"id": sample.id, "size": sample.size, "how": sample.how, "seed": sample.seed}
        skew = sample_facts(full[0], mask, sorted({str(facts["metric"]), "loss"}))
        return {"sample": said, "skew": skew, **class_facts(session.workload, *(values.only(mask) for values in full))}
