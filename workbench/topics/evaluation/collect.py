"""Facts about the set that periodic evaluation reads: how far two models differ on it, its classes, seconds and bytes (P2.7, P3)."""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import IterableDataset

from workbench.config import TrainConfig
from workbench.curves.class_counts import count_classes
from workbench.curves.judged import trials_with
from workbench.curves.selection import metric_sign
from workbench.curves.trial_curves import RecordLike
from workbench.errors import RecordError
from workbench.record.json_values import number
from workbench.record.read import StudyRecord, TrialRecord
from workbench.record.roles import Role
from workbench.studies.session import Session
from workbench.topics.evaluation.skew import skew_tests
from workbench.topics.recommendation.diagnose import config_of
from workbench.train.batches import eval_batches
from workbench.train.checkpoint import load_model
from workbench.train.evaluation import eval_mode
from workbench.train.example_values import (
    ONE_A_BATCH,
    ExampleValues,
    evaluation_batch,
    example_values,
    one_loss_a_batch,
)
from workbench.train.forward import autocast, explained, peak_bytes, per_example
from workbench.train.rng import isolated_rng
from workbench.train.stacked_weights import build_model
from workbench.workloads.base import Workload
from workbench.workloads.items import plain_tensors
from workbench.workloads.losses import SquaredError, TokenCrossEntropy
from workbench.workloads.subsets import SubsetOf, draw_sample, subset_of, whole

LEAST_EXAMPLES, ROUNDS, BATCHES = 2000, 5, 4
MAX_FEATURES = 256  # columns of the inputs that a part is held against the whole by (rule of thumb)
RUN_FRAC = 0.06
"""Examples seen in forward passes, as a share of those of a baseline run: 2 % of its time, an update being three passes."""
Pairs = list[tuple[int, int | None]]


def compared_pairs(record: RecordLike, found: Mapping[str, Any]) -> tuple[str, Pairs]:
    """Return how the trials differ whose difference on the validation set decides what is recommended, and pairs of them, one a seed."""
    ours = _by_seed(record, trials_with(record, record.config))
    if not ours:
        return "nothing", []
    own = int(record.config["shared_seed"])
    first = ours.get(own, next(iter(ours.values())))
    if found["candidate"] is not None:
        theirs = _by_seed(record, trials_with(record, config_of(record, found["recommended"]["trials"][0])))
        shared = sorted(ours.keys() & theirs.keys())
        fresh = [seed for seed in shared if seed != own]
        if shared:
            return f"baseline and {found['candidate']}", [(ours[seed], theirs[seed]) for seed in fresh or shared]
    others = [trial for trial in ours.values() if trial != first]
    if others:
        return "the baseline under two seeds", [(first, others[0])]
    trials, best = record.trials, None  # of the sweep's trials that are as long
    rows = trials[(trials["stage"] == Role.LR_SWEEP) & (trials["total_steps"] == record.config["total_steps"])]
    rows = rows[rows["trial"] != first].dropna(subset=["best_value"])
    if not rows.empty:
        ascending = record.config["select_mode"] == "min"
        best = int(rows.sort_values("best_value", ascending=ascending)["trial"].iloc[0])
    return "the baseline and the next best lr of its sweep", [(first, best)]


def _by_seed(record: RecordLike, numbers: list[int]) -> dict[int, int]:
    seeds = dict(zip(record.trials["trial"].tolist(), record.trials["seed"].tolist(), strict=True))
    return dict(sorted((int(seeds[number]), int(number)) for number in reversed(numbers)))


def collect_validation_set(session: Session, found: Mapping[str, Any]) -> dict[str, Any]:
    """Return JSON facts for `diagnose_evaluation_sample` from the selected checkpoints of a study with a baseline."""
    config, workload, record = session.config, session.workload, session.record
    split, metric = config.select.split("/", 1)
    data = workload.data(split)
    facts: dict[str, Any] = {"split": split, "metric": metric, "examples": len(data), "asked": {}}
    ours, theirs = plain_tensors(data), plain_tensors(workload.train_data)
    facts["is_train"] = data is workload.train_data or bool(  # as in a problem whose loss is no sample of anything
        ours and theirs and len(ours) == len(theirs) and all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    )  # fmt: skip
    per_batch = one_loss_a_batch(workload, config, session.device)
    if per_batch and metric == "loss":
        reason = f"{ONE_A_BATCH}; select a metric that has one, with select='{split}/...'"
        return facts | {"reason": reason, "no_classes": reason}
    what, compared = compared_pairs(record, found)
    kept = [(a, b if b is not None and _selected(record, b) else None) for a, b in compared if _selected(record, a)]
    pairs = [pair for pair in kept if pair[1] is not None] or kept[:1]
    if not pairs:
        reason = "no trial of the baseline has a selected checkpoint"
        return facts | {"reason": reason, "no_classes": reason}
    allowed, small = _allowed(config), workload
    if len(data) * sum(n is not None for pair in pairs for n in pair) > allowed:
        pairs = pairs[:1]  # fewer pairs before fewer examples
    each = allowed // sum(n is not None for n in pairs[0])
    if len(data) > each and not isinstance(data, IterableDataset):
        small = workload.replace(**{f"{split}_data": draw_sample(data, each)})
    with isolated_rng():
        of_trial = partial(_trial_values, small, session, record)
        values = [(of_trial(a), None if b is None else of_trial(b)) for a, b in pairs]
    pair = pair_facts(values, metric=metric)
    evals = record.evals
    rows = evals[(evals["step"] == 0) & (evals["split"] == split) & (evals["metric"] == metric)]
    learned = metric_sign(record) * (number(next(iter(rows["value"]), None)) - pair["values"][0])  # by training
    pair |= {"trials": list(map(list, pairs)), "of": list(map(list, compared))}
    facts |= {"pair": pair | {"learned": learned if math.isfinite(learned) else None}, "compared": what}
    if (part := subset_of(data)) is not None:
        none = {"size": len(part.indices), "of": len(part.data), "tests": [{"p": None, "reason": ONE_A_BATCH}]}
        facts["skew"] = none if per_batch else _against_whole(session, record, pairs[0][0], part)
    counted = class_facts(workload, *values[0])
    if small is not workload and "classes" in counted:
        reason = f"counting by class takes an evaluation of all {len(data)} examples, more than 2 % of a baseline run"
        counted = {"no_classes": reason}
    return facts | counted


def compares_others(record: RecordLike, found: Mapping[str, Any]) -> bool:
    """Tell whether the facts about the validation set are of other trials than those that decide now, as of a smaller budget."""
    pair = (record.facts.get("evaluation_sample") or {}).get("pair") or {}
    return "of" in pair and pair["of"] != [list(numbers) for numbers in compared_pairs(record, found)[1]]


def _allowed(config: TrainConfig) -> int:
    return max(LEAST_EXAMPLES, int(RUN_FRAC * config.total_steps * config.batch_size))


def pair_facts(pairs: Sequence[tuple[ExampleValues, ExampleValues | None]], *, metric: str) -> dict[str, Any]:
    """Return how far two models differ from example to example: the mean over pairs of values on the same examples, one a seed.

    Returns:
        values (means of both), difference (second minus first), difference_sd (for a mean over the pairs), disagreement (of
        a metric of zeros and ones, else None); only values where there is no second model or a value is not finite.
    """
    known: dict[str, Any] = {"values": [float(np.average(a.columns[metric], weights=a.weights)) for a, _ in pairs[:1]]}
    both = [(a, b) for a, b in pairs if b is not None]
    if not both:
        return known
    weights = both[0][0].weights
    ones = np.stack([a.columns[metric] for a, _ in both])
    others = np.stack([b.columns[metric] for _, b in both])
    if not (np.isfinite(ones).all() and np.isfinite(others).all()):
        return known
    values = [float(np.average(each.mean(0), weights=weights)) for each in (ones, others)]
    differences = (others - ones).mean(0)
    scaled = weights * (differences - np.average(differences, weights=weights)) * weights.size / weights.sum()
    zero_one = bool(np.isin(np.concatenate([ones, others]), (0.0, 1.0)).all()) and metric != "loss"
    counted = zero_one and bool((weights == weights[0]).all())
    return {
        "values": values,
        "difference": values[1] - values[0],
        "difference_sd": float(np.sqrt((scaled**2).sum() / max(weights.size - 1, 1))),
        "disagreement": float((ones != others).mean()) if counted else None,
    }


def class_facts(workload: Workload, model: ExampleValues, other: ExampleValues | None) -> dict[str, Any]:
    """Return classes and classes_before, correct predictions class by class, or no_classes with the reason."""
    if model.labels is None or model.classes is None:
        reason = "it is unknown which classes the examples have: the loss is not that of classification(...)"
        return {"no_classes": reason, "classless": isinstance(workload.loss, (SquaredError, TokenCrossEntropy))}
    right = [name for name, v in model.columns.items() if name != "loss" and np.isin(v, (0.0, 1.0)).all()]
    if not right:
        return {"no_classes": "no metric of the workload is 0 or 1 for each example, as accuracy is"}
    given = [values for values in (model, other) if values is not None]
    counts = [count_classes(model.labels, values.columns[right[0]], classes=model.classes) for values in given]
    before = counts[0] if other is not None else None
    return {"classes": counts[-1], "classes_before": before, "num_classes": model.classes}


def selected_model(
    workload: Workload, config: TrainConfig, record: StudyRecord, number: int, device: torch.device
) -> nn.Module:
    """Return the model of a trial's selected checkpoint (P4.5); of the config the precision counts, the weights are the checkpoint's."""
    checkpoint = _selected(record, number)
    if checkpoint is None:
        raise RecordError(
            f"trial {number} has no selected checkpoint on disk: no evaluation of it was finite: look for NaN in the validation "
            "set, and train with a smaller lr. (Or the checkpoint was deleted.)"
        )
    return load_model(build_model(workload, config, device), checkpoint)


def _selected(record: StudyRecord, number: int) -> Path | None:
    """Return the folder of a trial's selected checkpoint."""
    best = record.trials.loc[record.trials["trial"] == number, "best_step"].dropna()
    if best.empty:
        return None
    folder = TrialRecord(record.path, number).folder / "checkpoints" / f"step-{int(best.iloc[0]):08d}"
    return folder if folder.exists() else None


def _trial_values(
    workload: Workload, session: Session, record: StudyRecord, number: int, *, max_features: int = 0
) -> ExampleValues:
    config, device = session.config, session.device
    return example_values(
        workload, selected_model(workload, config, record, number, device), split=config.select.split("/", 1)[0], device=device,
        batch_size=evaluation_batch(workload, config, device), precision=config.precision, max_features=max_features,
    )  # fmt: skip


def _against_whole(session: Session, record: StudyRecord, number: int, part: SubsetOf) -> dict[str, Any]:
    """Return how the part that evaluation reads differs from the whole split, by the values of one model on it."""
    config, size = session.config, {"size": len(part.indices), "of": len(part.data)}
    if size["of"] > _allowed(config):
        reason = f"an evaluation of all {size['of']} examples takes more than 2 % of a baseline run"
        return size | {"tests": [{"p": None, "reason": reason}]}
    full = _trial_values(whole(session.workload), session, record, number, max_features=MAX_FEATURES)
    return sample_facts(full, np.isin(np.arange(size["of"]), part.indices), config.select.split("/", 1)[1])


def sample_facts(full: ExampleValues, mask: Any, metric: str) -> dict[str, Any]:
    """Return the skew tests of a sample, by a metric and the loss: `full` are the values of a model, `mask` says what is in it."""
    metrics = {name: full.columns[name] for name in sorted({metric, "loss"})}
    tests = skew_tests(mask, labels=full.labels, features=full.features, metrics=metrics)
    return {"tests": tests, "size": int(mask.sum()), "of": int(mask.size)}


def measure_evaluation(
    workload: Workload,
    model: nn.Module,
    *,
    batch_size: int,
    device: torch.device,
    precision: str | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    """Return what an evaluation of a sample of the validation split costs: loading, moving and computing (P3.1).

    Returns:
        seconds_per_example (median over the batches behind the first one), start_s (what the first batch takes beyond that: worker
        processes, mostly), batch_size, batches (timed), rounds.
    """
    data = workload.validation_data
    part = workload.replace(validation_data=draw_sample(data, min(len(data), BATCHES * batch_size), seed=0))
    timed: list[list[tuple[float, int]]] = []
    with torch.no_grad(), isolated_rng(), eval_mode(model):
        for _ in range(ROUNDS + 1):
            timed.append([])
            last = clock()
            for batch, examples in eval_batches(part, "validation", batch_size, device, precision):
                with explained(workload, "in a batch of the validation split"), autocast(device, precision):
                    outputs, losses, _ = per_example(part, model, batch, examples)
                    found = [losses, *(metric(outputs, batch) for metric in workload.metrics.values())]
                for value in found:
                    value.cpu()  # waits for the device
                now = clock()
                timed[-1].append((now - last, examples))
                last = now
    rows = timed[1:]
    first, examples = [seconds for (seconds, _), *_ in rows], rows[0][0][1]
    later = [seconds / count for _, *behind in rows for seconds, count in behind if count == batch_size]
    each = statistics.median(later or [seconds / examples for seconds in first])
    start = max(0.0, statistics.median(first) - each * examples) if later else 0.0
    count = sum(len(row) for row in rows)
    return {"seconds_per_example": each, "start_s": start, "batch_size": batch_size, "batches": count, "rounds": ROUNDS}


def memory_per_example(workload: Workload, config: TrainConfig, device: torch.device) -> dict[str, float]:
    """Return bytes per example at the peak of a training step and of an evaluation batch: why the latter may be larger (P2.7)."""
    with isolated_rng():
        model = build_model(workload, config, device)
        small = max(1, min(config.batch_size, len(workload.validation_data)) // 2)

        def train(batch: Any, count: int) -> None:
            with autocast(device, config.precision):
                _, losses, _ = per_example(workload, model.train(), batch, count)  # the weights stay, as in training
                losses.mean().backward()  # type: ignore[no-untyped-call]

        def look(batch: Any, count: int) -> None:
            with autocast(device, config.precision), torch.no_grad(), eval_mode(model):
                per_example(workload, model, batch, count)

        found = {"examples": float(small)}
        for name, step in (("training", train), ("evaluation", look)):
            peaks = []
            for size in (small, 2 * small):
                once = partial(step, *next(eval_batches(workload, "validation", size, device, config.precision)))
                once()  # gradients, and what a first call fills, are there from now on
                peaks.append(peak_bytes(once, device))
            found[f"{name}_bytes_per_example"] = (peaks[1] - peaks[0]) / small
    return found
