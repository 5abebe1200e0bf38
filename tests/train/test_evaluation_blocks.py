"""Training and evaluation take turns in one process, and leave a curve and checkpoints to choose from (P2.5, P2.6, P2.8)."""

from __future__ import annotations

import itertools
import multiprocessing
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.helpers.workloads import small_workload
from workbench.record import TrialRecord, open_record
from workbench.train.hooks.base import Hook, Step
from workbench.train.hooks.pause import Pause
from workbench.train.trainer import Trainer


class Log(Hook):
    """Writes down what happens, and in which process."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.processes: set[int] = set()

    def on_step(self, step: Step) -> None:
        self.events.append("train")
        self.processes.add(os.getpid())

    def on_evaluation(self, row: Mapping[str, Any]) -> None:
        self.events.append("evaluate")
        self.processes.add(os.getpid())


CONFIG = {"total_steps": 20, "eval_every_steps": 5, "keep_best": 9}


def test_blocks_of_training_and_evaluation_alternate_in_one_process(tmp_path: Path) -> None:
    log = Log()
    Trainer(hooks=[log]).run(small_workload(config=CONFIG), out=tmp_path / "study")
    blocks = [(kind, len(list(group))) for kind, group in itertools.groupby(log.events)]
    assert blocks == [("evaluate", 2), *([("train", 5), ("evaluate", 2)] * 4)]
    assert log.processes == {os.getpid()}
    assert multiprocessing.active_children() == []


def test_a_pause_moves_no_evaluation_and_no_value(tmp_path: Path) -> None:
    calm, held_up = (
        Trainer(hooks=hooks).run(small_workload(config=CONFIG), out=tmp_path / str(len(hooks)))
        for hooks in ([], [Pause(7, 0.05)])
    )
    assert held_up.steps["step_time_s"].max() >= 0.05
    assert calm.evals.drop(columns="seconds").equals(held_up.evals.drop(columns="seconds"))


def test_the_curve_and_the_checkpoints_are_there_for_another_reader(tmp_path: Path) -> None:
    Trainer().run(small_workload(config=CONFIG), out=tmp_path / "study")
    record = open_record(tmp_path / "study")
    assert isinstance(record, TrialRecord)
    curve = record.evals[record.evals["metric"] == "loss"].set_index("step")["value"]
    assert [int(path.name[-8:]) for path in record.checkpoints] == curve.index.tolist() == [0, 5, 10, 15, 20]
    assert record.best().value == curve.min()
