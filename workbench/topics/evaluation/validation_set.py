"""Facts about the set that periodic evaluation reads: how far two models differ on it, and its classes in counts (P3)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.data import IterableDataset

from workbench.config import TrainConfig
from workbench.curves.class_counts import count_classes
from workbench.curves.judged_runs import trials_with
from workbench.curves.trials import RecordLike
from workbench.errors import RecordError
from workbench.record.read import StudyRecord, TrialRecord
from workbench.record.roles import Role
from workbench.studies.session import Session
from workbench.topics.evaluation.skew import skew_tests
from workbench.topics.recommendation.diagnose import config_of
from workbench.train.checkpoint import load_model
from workbench.train.coupled_losses import evaluation_batch
from workbench.train.evaluation import ExampleValues, example_values
from workbench.train.lane_stack import build_model
from workbench.train.rng import isolated_rng
from workbench.workloads.base import Workload
from workbench.workloads.items import plain_tensors
from workbench.workloads.losses import SquaredError, TokenCrossEntropy
from workbench.workloads.subsets import SubsetOf, draw_sample, subset_of, whole

__all__ = ["class_facts", "collect_validation_set", "pair_facts", "sample_facts", "selected_model"]


class Compared(NamedTuple):
    """Pairs of trials, one a seed.

    Attributes:
        what: how they differ, in words.
        pairs: (trial, other trial); the other is None where there is nothing to compare with.
    """

    what: str
    pairs: list[tuple[int, int | None]]


def compared_pairs(record: RecordLike, found: Mapping[str, Any]) -> Compared:
    """Return the pairs of trials whose difference on the validation set decides what is recommended.

    Baseline and best candidate under the same seeds, fresh ones where the candidate was proved; without a candidate the
    baseline under two seeds, or else beside the next best learning rate of its sweep.

    Args:
        record: a study with a baseline.
        found: what `screen` said of it.
    """
    fields = record.config
    ours = _by_seed(record, trials_with(record, fields))
    if not ours:
        return Compared("nothing", [])
    own = int(fields["shared_seed"])
    first = ours.get(own, next(iter(ours.values())))
    if found["candidate"] is not None:
        theirs = _by_seed(record, trials_with(record, config_of(record, found["recommended"]["trials"][0])))
        shared = sorted(ours.keys() & theirs.keys())
        fresh = [seed for seed in shared if seed != own]
        pairs: list[tuple[int, int | None]] = [(ours[seed], theirs[seed]) for seed in fresh or shared]
        if pairs:
            return Compared(f"baseline and {found['candidate']}", pairs)
    others = [trial for trial in ours.values() if trial != first]
    if others:
        return Compared("the baseline under two seeds", [(first, others[0])])
    return Compared("the baseline and the next best lr of its sweep", [(first, _next_best(record, first))])


def _next_best(record: RecordLike, first: int) -> int | None:
    """Return the trial of the sweep, as long as the baseline's, whose selected checkpoint is best; None without one."""
    trials = record.trials
    rows = trials[(trials["stage"] == Role.LR_SWEEP) & (trials["total_steps"] == record.config["total_steps"])]
    rows = rows[rows["trial"] != first].dropna(subset=["best_value"])
    if rows.empty:
        return None
    rows = rows.sort_values("best_value", ascending=record.config["select_mode"] == "min")
    return int(rows["trial"].iloc[0])


def _by_seed(record: RecordLike, numbers: list[int]) -> dict[int, int]:
    seeds = dict(zip(record.trials["trial"].tolist(), record.trials["seed"].tolist(), strict=True))
    return dict(sorted((int(seeds[number]), int(number)) for number in reversed(numbers)))


LEAST_EXAMPLES = 2000
MAX_FEATURES = 256
"""Columns of the inputs that a part is held against the whole by (rule of thumb)."""
RUN_FRAC = 0.06
"""Examples seen in forward passes, as a share of those of a baseline run: 2 % of its time, an update being three passes."""


def collect_validation_set(session: Session, found: Mapping[str, Any]) -> dict[str, Any]:
    """Return JSON facts for `diagnose_evaluation_sample` from the selected checkpoints that a study has.

    At most as many examples are evaluated as 2 % of a baseline run take, and 2,000 in any case: where the set is larger, a
    random part of it tells how far models differ, and classes are not counted.

    Args:
        session: a study with a baseline.
        found: what `screen` said of its candidates.
    """
    config, workload, record = session.config, session.workload, session.record
    split, metric = config.select.split("/", 1)
    data = workload.data(split)
    facts: dict[str, Any] = {"split": split, "metric": metric, "examples": len(data), "asked": {}}
    facts["is_train"] = _same_data(data, workload.train_data)
    compared = compared_pairs(record, found)
    pairs = [pair for pair in ((a, _kept(record, b)) for a, b in compared.pairs) if _kept(record, pair[0]) is not None]
    pairs = [pair for pair in pairs if pair[1] is not None] or pairs[:1]
    if not pairs:
        reason = "no trial of the baseline has a selected checkpoint"
        return facts | {"reason": reason, "no_classes": reason}
    pairs, small = _affordable(workload, config, pairs, split)
    with isolated_rng():
        values = [
            (_values(small, session, record, a), None if b is None else _values(small, session, record, b))
            for a, b in pairs
        ]
    pair = pair_facts(values, metric=metric)
    pair |= {"trials": [list(numbers) for numbers in pairs], "learned": _learned(record, pair, split, metric)}
    facts |= {"pair": pair, "compared": compared.what}
    if (part := subset_of(data)) is not None:
        facts["skew"] = _against_whole(session, record, pairs[0][0], part)
    counted = class_facts(workload, *values[0])
    if small is not workload and "classes" in counted:
        reason = f"counting by class takes an evaluation of all {len(data)} examples, more than 2 % of a baseline run"
        counted = {"no_classes": reason}
    return facts | counted


def _same_data(data: Any, train: Any) -> bool:
    """Return whether a split is the training set itself, as in a problem whose loss is no sample of anything."""
    if data is train:
        return True
    ours, other = plain_tensors(data), plain_tensors(train)
    if ours is None or other is None or len(ours) != len(other):
        return False
    return all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(ours, other, strict=True))


def _affordable(
    workload: Workload, config: TrainConfig, pairs: list[tuple[int, int | None]], split: str
) -> tuple[list[tuple[int, int | None]], Workload]:
    """Return the pairs that can be evaluated, and the workload with as much of the split: fewer pairs before fewer examples."""
    data = workload.data(split)
    allowed = _allowed(config)
    if len(data) * sum(n is not None for pair in pairs for n in pair) > allowed:
        pairs = pairs[:1]
    each = allowed // sum(n is not None for n in pairs[0])
    if len(data) <= each or isinstance(data, IterableDataset):
        return pairs, workload
    return pairs, workload.replace(**{f"{split}_data": draw_sample(data, each).data})


def _allowed(config: TrainConfig) -> int:
    return max(LEAST_EXAMPLES, int(RUN_FRAC * config.total_steps * config.batch_size))


def pair_facts(pairs: Sequence[tuple[ExampleValues, ExampleValues | None]], *, metric: str) -> dict[str, Any]:
    """Return how far two models differ from example to example: the mean over pairs, one a seed.

    Args:
        pairs: values on the same examples.
        metric: of which.

    Returns:
        values (means of both), difference (second minus first), difference_sd (for a mean over the pairs), disagreement (of
        a metric of zeros and ones, else None); only values where there is no second model or a value is not finite.
    """
    known: dict[str, Any] = {"values": [_mean(a.columns[metric], a.weights) for a, _ in pairs[:1]]}
    both = [(a, b) for a, b in pairs if b is not None]
    if not both:
        return known
    weights = both[0][0].weights
    ones = np.stack([a.columns[metric] for a, _ in both])
    others = np.stack([b.columns[metric] for _, b in both])
    if not (np.isfinite(ones).all() and np.isfinite(others).all()):
        return known
    known["values"] = [_mean(each.mean(0), weights) for each in (ones, others)]
    differences = (others - ones).mean(0)
    scaled = weights * (differences - _mean(differences, weights)) * weights.size / weights.sum()
    sd = float(np.sqrt((scaled**2).sum() / max(weights.size - 1, 1)))
    zero_one = bool(np.isin(np.concatenate([ones, others]), (0.0, 1.0)).all()) and metric != "loss"
    same_weights = bool((weights == weights[0]).all())
    return known | {
        "difference": known["values"][1] - known["values"][0],
        "difference_sd": sd,
        "disagreement": float((ones != others).mean()) if zero_one and same_weights else None,
    }


def class_facts(workload: Workload, model: ExampleValues, other: ExampleValues | None) -> dict[str, Any]:
    """Return classes and classes_before, correct predictions class by class, or no_classes with the reason.

    Args:
        workload: that was evaluated.
        model: values of one model on every example.
        other: of another one on the same examples; then the first one is what was before.
    """
    if model.labels is None or model.classes is None:
        reason = "it is unknown which classes the examples have: the loss is not that of classification(...)"
        return {"no_classes": reason, "classless": isinstance(workload.loss, (SquaredError, TokenCrossEntropy))}
    right = [name for name, v in model.columns.items() if name != "loss" and np.isin(v, (0.0, 1.0)).all()]
    if not right:
        return {"no_classes": "no metric of the workload is 0 or 1 for each example, as accuracy is"}
    counts = [
        count_classes(model.labels, values.columns[right[0]], classes=model.classes)
        for values in (model, other)
        if values is not None
    ]
    return {
        "classes": counts[-1],
        "classes_before": counts[0] if other is not None else None,
        "num_classes": model.classes,
    }


def selected_model(
    workload: Workload, config: TrainConfig, record: StudyRecord, number: int, device: torch.device
) -> nn.Module:
    """Return the model of a trial's selected checkpoint (P4.5).

    Args:
        workload: that was trained.
        config: for the precision; the weights are the checkpoint's.
        record: the study.
        number: of a trial of it.
        device: where to put the model.

    Raises:
        RecordError: the trial has no such checkpoint.
    """
    checkpoint = _selected(record, number)
    if checkpoint is None:
        raise RecordError(
            f"trial {number} has no selected checkpoint on disk: no evaluation of it was finite: look for NaN in the validation "
            "set, and train with a smaller lr. (Or the checkpoint was deleted.)"
        )
    return load_model(build_model(workload, config, device), checkpoint)


def _selected(record: StudyRecord, number: int) -> Path | None:
    """Return the folder of a trial's selected checkpoint; read from the table of trials, which is in memory."""
    best = record.trials.loc[record.trials["trial"] == number, "best_step"].dropna()
    if best.empty:
        return None
    folder = TrialRecord(record.path, number).folder / "checkpoints" / f"step-{int(best.iloc[0]):08d}"
    return folder if folder.exists() else None


def _kept(record: StudyRecord, number: int | None) -> int | None:
    """Return a trial's number where its selected checkpoint is on disk, else None."""
    return number if number is not None and _selected(record, number) is not None else None


def _values(
    workload: Workload, session: Session, record: StudyRecord, number: int, *, max_features: int = 0
) -> ExampleValues:
    config = session.config
    split = config.select.split("/", 1)[0]
    model = selected_model(workload, config, record, number, session.device)
    how: dict[str, Any] = {
        "batch_size": evaluation_batch(workload, config, session.device),
        "precision": config.precision,
        "max_features": max_features,
    }
    return example_values(workload, model, split=split, device=session.device, **how)


def _against_whole(session: Session, record: StudyRecord, number: int, part: SubsetOf) -> dict[str, Any]:
    """Return how the part that evaluation reads differs from the whole split, by the values of one model on it."""
    config, size = session.config, {"size": len(part.indices), "of": len(part.data)}
    if size["of"] > _allowed(config):
        reason = f"an evaluation of all {size['of']} examples takes more than 2 % of a baseline run"
        return size | {"tests": [{"p": None, "reason": reason}]}
    full = _values(whole(session.workload), session, record, number, max_features=MAX_FEATURES)
    mask = np.isin(np.arange(size["of"]), part.indices)
    return sample_facts(full, mask, sorted({config.select.split("/", 1)[1], "loss"}))


def _mean(values: Any, weights: Any) -> float:
    return float((values * weights).sum() / weights.sum())


def _learned(record: StudyRecord, pair: Mapping[str, Any], split: str, metric: str) -> float | None:
    """Return by how much training improved the metric: initial minus selected, or the other way round where more is better."""
    evals = record.evals
    rows = evals[(evals["step"] == 0) & (evals["split"] == split) & (evals["metric"] == metric)]
    values = rows["value"].to_numpy(dtype=np.float64)
    if not values.size or not math.isfinite(values[0]):
        return None
    sign = 1.0 if record.config["select_mode"] == "min" else -1.0
    return float(sign * (values[0] - pair["values"][0]))


def sample_facts(full: ExampleValues, mask: Any, metrics: Sequence[str]) -> dict[str, Any]:
    """Return the skew tests of a sample.

    Args:
        full: values of one model on the full set.
        mask: which examples are in the sample.
        metrics: to compare.
    """
    tests = skew_tests(
        mask, labels=full.labels, features=full.features, metrics={name: full.columns[name] for name in metrics}
    )
    return {"tests": tests, "size": int(mask.sum()), "of": int(mask.size)}
