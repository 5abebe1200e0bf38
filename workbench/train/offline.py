"""Checkpoints put to use after training: evaluated on whole splits (P2.2), or serving a stream of requests (P2.1)."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch.utils.data import Subset

from workbench.checks import check_integer
from workbench.errors import DataError, RecordError, UsageError
from workbench.ledger.push import pusher
from workbench.record.read import StudyRecord, TrialRecord, open_record
from workbench.record.write import StudyWriter
from workbench.train.artifacts import best_checkpoint, load_trained, trained_with
from workbench.train.batches import resolve_device
from workbench.train.coupled_losses import evaluation_batch
from workbench.train.evaluation import Evaluation, evaluate, evaluation_columns, values_each, weighted_means
from workbench.workloads.base import Workload
from workbench.workloads.items import in_its_own_order
from workbench.workloads.subsets import whole


def evaluate_offline(
    workload: Workload,
    record: str | Path | StudyRecord | TrialRecord,
    *,
    trials: Sequence[int] | None = None,
    splits: Sequence[str] | None = None,
    batch_size: int | None = None,
    device: str = "auto",
) -> StudyRecord | TrialRecord:
    """Evaluate the checkpoints of trials on whole splits, add rows with the setting "offline", and return the record anew.

    Each row says what it cost, in seconds and examples. What was evaluated before is not evaluated again, so an interrupted
    call goes on where it was.

    Args:
        workload: what was trained; of a named subset the whole split is taken.
        record: the study, or its folder.
        trials: numbers; None is all, or the one trial of a `TrialRecord`.
        splits: None is validation, and test where there is one.
        batch_size: None is the config's evaluation batch.
        device: where.

    Raises:
        UsageError: a split that the workload does not have.
        RecordError: the study is of another workload, has no checkpoint, or another process is writing it.
    """
    opened = open_record(record) if isinstance(record, (str, Path)) else record
    if opened.workload != workload.name:
        raise RecordError(
            f"{opened.path} is a study of {opened.workload!r}, not of {workload.name!r}: give that workload."
        )
    if trials is None:
        trials = [int(number) for number in opened.trials.get("trial", [])]
    with closing(StudyWriter.reopen(opened.path, when_closed=pusher())) as writer:
        evaluate_checkpoints(workload, writer, trials, splits=splits, batch_size=batch_size, device=device)
    return TrialRecord(opened.path, opened.number) if isinstance(opened, TrialRecord) else opened.reload()


def evaluate_checkpoints(
    workload: Workload,
    writer: StudyWriter,
    trials: Sequence[int],
    *,
    splits: Sequence[str] | None = None,
    batch_size: int | None = None,
    device: str = "auto",
) -> None:
    """Do what `evaluate_offline` does, in a folder that is open already."""
    full = whole(workload)
    wanted = [s for s in ("validation", "test") if s in full.splits] if splits is None else list(splits)
    for split in wanted:
        full.data(split)
    if batch_size is not None:
        check_integer("batch_size", batch_size, error=UsageError, hint="; None is the config's evaluation batch")
    place = resolve_device(device)
    study = writer.record
    evals = study.evals
    offline = evals[evals["setting"] == "offline"]
    done = set(zip(offline["trial"], offline["step"], offline["split"], strict=True))
    checkpoints = [(study.trial(number), path) for number in trials for path in study.trial(number).checkpoints]
    if not checkpoints:
        raise RecordError(
            f"no checkpoint is there in trials {', '.join(map(str, trials)) or 'none'} of {study.path}: train with keep_best=... first."
        )
    for trial, path in checkpoints:
        step = int(path.name.removeprefix("step-"))
        missing = [split for split in wanted if (trial.number, step, split) not in done]
        if not missing:
            continue
        model = load_trained(full, path, device=str(place))
        precision = trained_with(full, path).precision
        for split in missing:
            size = batch_size or evaluation_batch(full, full.config, place)
            found = evaluate(full, model, split=split, batch_size=size, device=place, precision=precision)
            _add_rows(writer, found, trial=trial.number, step=step, split=split, setting="offline")
        writer.flush()


def _add_rows(writer: StudyWriter, found: Sequence[Evaluation], **place: Any) -> None:
    """Add the evaluations of one model to `.evals`; `place` is their trial, step, split and setting."""
    writer.evals.add(evaluation_columns([{**place, **evaluation._asdict(), "subset": ""} for evaluation in found]))


def serve_requests(
    workload: Workload,
    trial: TrialRecord,
    requests: Sequence[tuple[float, int]],
    *,
    step: int | None = None,
    split: str = "validation",
    max_batch: int = 8,
    max_wait_s: float = 0.01,
    label_delay_s: float = 0.0,
    until_s: float | None = None,
) -> pd.DataFrame:
    """Serve a stream of requests with a checkpoint, add rows with the setting "online" to the study, and return what was served.

    Time is the requests' own: nothing waits. A batch is served when it is full or when its oldest request has waited for
    `max_wait_s`. A request counts once its label is there.

    Args:
        trial: whose checkpoint serves.
        requests: (time in seconds, index of an example of the split) in the order of time.
        step: of the checkpoint; None is the best one (P4.5).
        max_batch: requests served together, at most.
        max_wait_s: that a request waits for others.
        label_delay_s: from a request to its label.
        until_s: labels that come later do not count; None waits for all.

    Returns:
        One row a request: time_s, example, batch, served_s, label_s, loss, and every metric.

    Raises:
        UsageError: no request, or one out of order or for an example that is not there; or no label came in time.
        DataError: the split cannot be indexed.
        CheckpointError: there is no such checkpoint.
    """
    full = whole(workload)
    data = full.data(split)
    if in_its_own_order(data):
        raise DataError(
            f"workload {workload.name!r}: requests ask for examples by index, and the {split} split is iterable only."
        )
    if not len(requests):
        raise UsageError("requests is empty: give at least one (time in seconds, index of an example).")
    times, examples = [float(at) for at, _ in requests], [int(example) for _, example in requests]
    for place, (at, example) in enumerate(zip(times, examples, strict=True)):
        if not math.isfinite(at) or (place and at < times[place - 1]):
            raise UsageError(f"requests[{place}] comes at {at} s, before the one ahead of it: sort them by time.")
        if not 0 <= example < len(data):
            raise UsageError(f"requests[{place}] asks for example {example}; there are 0 to {len(data) - 1}.")
    if max_batch < 1 or not max_wait_s >= 0 or not label_delay_s >= 0:
        raise UsageError(
            f"max_batch={max_batch} must be at least 1, max_wait_s={max_wait_s} and label_delay_s={label_delay_s} at least 0."
        )
    path = best_checkpoint(trial) if step is None else trial.folder / "checkpoints" / f"step-{step:08d}"
    model = load_trained(full, path)
    precision = trained_with(full, path).precision
    start = time.perf_counter()
    served, weights = [], []
    for number, (first, end, at) in enumerate(_batches(times, max_batch=max_batch, max_wait_s=max_wait_s)):
        part = full.replace(**{f"{split}_data": Subset(data, examples[first:end])})
        ((columns, weight),) = values_each(
            part, [model], split=split, batch_size=end - first, device=torch.device("cpu"), precision=precision
        )
        rows = {"time_s": times[first:end], "example": examples[first:end], "batch": number, "served_s": at}
        served.append(pd.DataFrame(rows | {name: values.numpy() for name, values in columns.items()}))
        weights.append(weight)
    table = pd.concat(served, ignore_index=True)
    table.insert(4, "label_s", table["time_s"] + label_delay_s)
    known = np.ones(len(table), dtype=bool) if until_s is None else (table["label_s"] <= until_s).to_numpy(copy=True)
    kept = torch.from_numpy(known) & (torch.cat(weights) > 0)
    if not bool(kept.any()):
        raise UsageError(
            f"no label came until {until_s} s: the first comes at {table['label_s'].min():g} s. Wait longer."
        )
    seconds = time.perf_counter() - start
    found: list[Evaluation] = []
    for name in ("loss", *full.metrics):
        values = torch.from_numpy(table[name].to_numpy(dtype=np.float64, copy=True))[kept]
        found += weighted_means(name, values.unsqueeze(0), torch.cat(weights)[kept], seconds)
    with closing(StudyWriter.reopen(trial.path, when_closed=pusher())) as writer:
        made = int(path.name.removeprefix("step-"))
        _add_rows(writer, found, trial=trial.number, step=made, split=split, setting="online")
    return table


def _batches(times: Sequence[float], *, max_batch: int, max_wait_s: float) -> Iterator[tuple[int, int, float]]:
    """Yield (first, end, time) of the batches as they are served."""
    first = 0
    while first < len(times):
        closes = times[first] + max_wait_s
        end = first
        while end < len(times) and end - first < max_batch and times[end] <= closes:
            end += 1
        yield first, end, times[end - 1] if end - first == max_batch else closes
        first = end
