"""Training and evaluation take turns in one process, and leave a curve and checkpoints to choose from (P2.5, P2.6, P2.8, P5.8)."""

from __future__ import annotations

import itertools
import multiprocessing
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from tests.helpers.workloads import small_workload
from workbench.ledger.studies import list_studies
from workbench.record.read import TrialRecord, open_record
from workbench.topics.lr_sweep.figures import plot_loss_curves
from workbench.train.hooks import Hook, Pause, Step
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


def test_a_reader_sees_the_curve_grow_while_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a live picture is made of: the folder, read again; here its rows are written at every step, not every five seconds."""
    monkeypatch.setattr("workbench.train.loop.FLUSH_SECONDS", -1.0)
    seen: list[tuple[list[int], int]] = []

    class Reader(Hook):
        def on_step(self, step: Step) -> None:
            if step.index % 5 == 1:
                record = open_record(tmp_path / "study")
                evaluated = sorted(set(record.evals["step"]))
                ax = plot_loss_curves(record, ax=Figure().subplots())
                seen.append((evaluated, max((len(line.get_xdata()) for line in ax.lines), default=0)))

    Trainer(hooks=[Reader()]).run(small_workload(config=CONFIG), out=tmp_path / "study")
    assert [steps for steps, _ in seen] == [[0], [0], [0, 5], [0, 5, 10]], (
        "an evaluation is written with the rows after it"
    )
    drawn = [points for _, points in seen]
    assert drawn == sorted(set(drawn)), "each picture has more points than the one before"
    assert drawn[-1] == 15


def test_the_row_of_a_study_is_there_before_its_first_update(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = []

    class First(Hook):
        def on_step(self, step: Step) -> None:
            if not step.index:
                rows.extend(list_studies(tmp_path, extra=["unfinished"]).to_dict("records"))
                raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        Trainer(hooks=[First()]).run(small_workload(config=CONFIG), out=tmp_path / "study", note="why")
    (row,) = rows
    assert (row["study"], row["note"], row["trials"], row["unfinished"]) == ("study", "why", 1, 1)
    (after,) = list_studies(tmp_path, extra=["failed"]).to_dict("records")
    assert (after["trials"], after["failed"]) == (1, 1)
