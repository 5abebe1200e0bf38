"""Running trials through an executor, and hooks that do to a worker what the world does."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch.utils.data import Dataset

from workbench.config import TrainConfig
from workbench.progress import Progress
from workbench.record.read import StudyRecord, TrialRecord, read_events
from workbench.record.write import StudyWriter
from workbench.studies.executors.on_ray import RayExecutor
from workbench.train import checkpoint
from workbench.train.hooks import Hook, Run, Step
from workbench.train.trainer import Trainer
from workbench.workloads.base import Workload


def train(
    executor: RayExecutor | None,
    workload: Workload,
    configs: Sequence[TrainConfig],
    out: Path,
    *,
    hooks: Sequence[Hook] = (),
    progress: Progress | None = None,
) -> list[TrialRecord]:
    """Run one study of these trials, None is in this process, and give the executor back whatever happens."""
    study = StudyWriter.open(out, kind="sweep", workload=workload.name, config=workload.config.to_dict())
    trainer, how = Trainer(device="cpu", hooks=hooks), {"stage": "lr_sweep", "progress": progress}
    with closing(study):
        if executor is None:
            return trainer.run_trials(workload, configs, study, **how)
        with executor:
            return executor.run(workload, configs, study, trainer=trainer, **how)


def train_alone(workload: Workload, configs: Sequence[TrainConfig], out: Path) -> None:
    """Run the same study without an executor: one trial after the other by plain autograd."""
    study = StudyWriter.open(out, kind="sweep", workload=workload.name, config=workload.config.to_dict())
    for config in configs:
        Trainer(device="cpu", gradients="loop").run_trials(workload, [config], study, stage="lr_sweep")
    study.close()


def rates(config: TrainConfig, *lrs: float, **changes: Any) -> list[TrainConfig]:
    return [config.replace(peak_lr=lr, **changes) for lr in lrs]


def assert_same_study(one: Path, other: Path) -> None:
    """Same trials, same curves, same checkpoints; times differ, and how many train together."""
    mine, theirs = StudyRecord(one), StudyRecord(other)
    volatile = {"seconds", "data_wait_s", "step_time_s", "lanes", "gradients", "gradients_reason"}
    for name in ("trials", "steps", "evals"):
        a, b = (getattr(r, name).drop(columns=volatile, errors="ignore") for r in (mine, theirs))
        pd.testing.assert_frame_equal(a[sorted(a)], b[sorted(b)], rtol=1e-5, check_dtype=False)
    for a, b in zip(mine, theirs, strict=True):
        assert [p.name for p in a.checkpoints] == [p.name for p in b.checkpoints]


def assert_whole(path: Path) -> None:
    """Every trial has ended, and every row is there once."""
    study = StudyRecord(path)
    assert len(study.trials) > 0
    for row in study.trials.itertuples():
        assert row.state in ("complete", "diverged")
        assert study.steps["step"][study.steps["trial"] == row.trial].tolist() == list(range(row.steps_run))
    assert not study.evals.duplicated(["trial", "step", "split", "metric"]).any()


def begins(path: Path, trial: int) -> list[dict[str, Any]]:
    """The events that say where a trial began to train, or to train again."""
    return [e for e in read_events(path / "trials" / str(trial)) if e["event"] in ("started", "resumed")]


def gone(session: int, within_s: float = 150.0) -> bool:
    """Whether the processes of this session have ended, or do so in time."""
    end = time.monotonic() + within_s
    while True:
        there = [stat for stat in Path("/proc").glob("[0-9]*/stat") if _belongs(stat, session)]
        if not there or time.monotonic() > end:
            return not there
        time.sleep(0.2)


def _belongs(stat: Path, session: int) -> bool:
    try:
        fields = stat.read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return int(fields[3]) == session and fields[0] != "Z"


class Durable(Hook):
    """Lets checkpoints reach the disk at once, in whichever process the run is."""

    def on_start(self, run: Run) -> None:
        checkpoint.WRITE_SECONDS = -1.0

    def on_end(self, record: Any) -> None:
        checkpoint.WRITE_SECONDS = 5.0


class Dies(Hook):
    """Kills the process that it runs in, at a step, a number of times in all; first waits for files to have arrived."""

    def __init__(self, folder: Path, at: int, times: int = 1, *, arrived: tuple[str, int] = ("", 0)) -> None:
        self.folder, self.at, self.times, self.arrived = folder, at, times, arrived

    def on_step(self, step: Step) -> None:
        if step.index == self.at:
            died = len(list(self.folder.glob("died-*")))
            if died < self.times:
                self._wait()
                (self.folder / f"died-{died}").touch()
                os.kill(os.getpid(), signal.SIGKILL)

    def _wait(self) -> None:
        pattern, count = self.arrived
        end = time.monotonic() + 60
        while count and len(list(self.folder.glob(pattern))) < count and time.monotonic() < end:
            time.sleep(0.01)


class Slow(Hook):
    """Takes its time for every step; a loss that sleeps would do so once, when it is traced."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_step(self, step: Step) -> None:
        time.sleep(self.seconds)


class Meets(Hook):
    """Begins when so many processes are there to begin."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self.count = folder, count

    def on_start(self, run: Run) -> None:
        (self.folder / f"met-{os.getpid()}").touch()
        end = time.monotonic() + 120
        while len(list(self.folder.glob("met-*"))) < self.count:
            assert time.monotonic() < end
            time.sleep(0.05)


class Notes(Hook):
    """Writes down what it was shown at the end, and in which process."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_evaluation(self, row: Mapping[str, Any]) -> None:
        assert np.isfinite(row["value"])

    def on_end(self, record: Any) -> None:
        with self.file.open("a") as file:
            file.write(f"{os.getpid()} {len(record.trials)} {len(record.steps)} {len(record.evals)}\n")


class Holding(Dataset[Any]):
    """Data with something in it that belongs to this process."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> Any:
        return torch.ones(3, dtype=torch.float64) * index / 48, torch.ones((), dtype=torch.float64)
