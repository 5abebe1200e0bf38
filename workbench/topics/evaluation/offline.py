"""Checkpoints after training: loaded (P2.13), evaluated on whole splits (P2.2)."""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from torch import nn

from workbench.checks import check_integer
from workbench.config import TrainConfig
from workbench.errors import CheckpointError, RecordError, UsageError
from workbench.record.folder import read_json
from workbench.record.read import StudyRecord, TrialRecord, open_record
from workbench.record.write import StudyWriter
from workbench.train.batches import resolve_device
from workbench.train.checkpoint import load_model
from workbench.train.evaluation import evaluate, evaluation_columns
from workbench.train.example_values import evaluation_batch
from workbench.train.rng import isolated_rng
from workbench.train.stacked_weights import build_model
from workbench.workloads.base import Workload
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
    with closing(StudyWriter.reopen(opened.path)) as writer:
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
            place_of = {"trial": trial.number, "step": step, "split": split, "setting": "offline", "subset": ""}
            writer.evals.add(evaluation_columns([{**place_of, **evaluation._asdict()} for evaluation in found]))
        writer.flush()


def load_trained(workload: Workload, checkpoint: str | Path | TrialRecord, *, device: str = "cpu") -> nn.Module:
    """Return the model of a checkpoint, built anew, in evaluation mode.

    Evaluated with the config's precision it gives the metric that was logged.

    Args:
        checkpoint: folder of the checkpoint, or a trial, whose best one is taken (P4.5).
        device: where to put it.

    Raises:
        CheckpointError: there is no such checkpoint, it is damaged, or it does not fit the model.
    """
    if isinstance(checkpoint, TrialRecord):
        trial, best = checkpoint, checkpoint.best()
        if best.checkpoint is None:
            raise CheckpointError(
                f"trial {trial.number} keeps no checkpoint of its best step {best.step}; give the folder of another one, or train "
                "with a larger keep_best."
            )
        checkpoint = best.checkpoint
    config = trained_with(workload, Path(checkpoint))
    with isolated_rng():
        model = build_model(workload, config, resolve_device(device))
    return load_model(model, checkpoint).eval()


def trained_with(workload: Workload, checkpoint: Path) -> TrainConfig:
    """Return the workload's config with the precision and the seeds that a checkpoint was trained with."""
    try:
        stored = read_json(checkpoint.resolve().parents[1] / "config.json")["config"]
        return workload.config.replace(**{name: stored[name] for name in ("precision", "shared_seed", "per_host_seed")})
    except (RecordError, IndexError, KeyError) as error:
        raise CheckpointError(
            f"{checkpoint} is not a checkpoint of a study. Give a folder like runs/study/trials/0/checkpoints/step-00000100, "
            "as `record.trial(0).checkpoints` lists them."
        ) from error
