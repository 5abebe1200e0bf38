"""`evaluate_offline`: every checkpoint on whole splits, elaborate and after training, its cost beside the metric (P2.2)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from workbench.errors import RecordError, UsageError
from workbench.ledger.push import pusher
from workbench.record.read import StudyRecord, TrialRecord, open_record
from workbench.record.write import StudyWriter
from workbench.train.artifacts import load_trained, trained_with
from workbench.train.coupled_losses import evaluation_batch
from workbench.train.device import resolve_device
from workbench.train.evaluation import Evaluation, evaluate
from workbench.workloads.base import Workload
from workbench.workloads.subsets import whole

__all__ = ["add_rows", "evaluate_checkpoints", "evaluate_offline"]


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
    if batch_size is not None and (isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1):
        raise UsageError(
            f"batch_size={batch_size!r} must be an integer of at least 1; None is the config's evaluation batch."
        )
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
            add_rows(writer, found, trial=trial.number, step=step, split=split, setting="offline")
        writer.flush()


def add_rows(
    writer: StudyWriter,
    found: Sequence[Evaluation],
    *,
    trial: int,
    step: int,
    split: str,
    setting: str,
    subset: str = "",
) -> None:
    """Add the evaluations of one model to `.evals`."""
    columns: dict[str, Any] = {
        "trial": [trial] * len(found),
        "step": [step] * len(found),
        "split": [split] * len(found),
        "setting": [setting] * len(found),
    }
    columns |= {name: [getattr(e, name) for e in found] for name in Evaluation._fields}
    columns["num_correct"] = [float("nan") if e.num_correct is None else float(e.num_correct) for e in found]
    writer.evals.add(columns | {"subset": [subset] * len(found)})
