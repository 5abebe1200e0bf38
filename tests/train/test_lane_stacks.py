"""Stacks that do not fit are halved, and nothing that was trained is trained twice for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.workloads import small_workload
from workbench.errors import ConfigError, WorkloadError
from workbench.record.read import StudyRecord
from workbench.record.write import StudyWriter
from workbench.train.diverged_errors import is_out_of_memory
from workbench.train.hooks import Hook, Run, Step
from workbench.train.lanes.memory import train_stacks
from workbench.train.trainer import Trainer


class Full(Hook):
    """Runs out of memory at step 25 whenever more than `fit` lanes train together."""

    def __init__(self, fit: int) -> None:
        self.fit = fit
        self.began: list[tuple[int, int]] = []

    def on_start(self, run: Run) -> None:
        self.began.append((len(run.trials), run.step))

    def on_step(self, step: Step) -> None:
        if step.index == 25 and len(step.trials) > self.fit:
            raise torch.OutOfMemoryError("planted: out of memory")


def run(out: Path, hook: Hook, lrs: list[float], **trainer: Any) -> StudyRecord:
    given = small_workload(config={"eval_every_steps": 10})
    study = StudyWriter.open(out, kind="lr_sweep", workload=given.name, config=given.config.to_dict())
    try:
        configs = [given.config.replace(peak_lr=lr) for lr in lrs]
        Trainer(hooks=[hook], **trainer).run_trials(given, configs, study, stage="lr_sweep")
    finally:
        study.close()
    return StudyRecord(out)


def test_out_of_memory_halves_the_stack_and_goes_on_from_its_checkpoints(tmp_path: Path) -> None:
    lrs = [0.01 * (k + 1) for k in range(5)]
    full = Full(fit=2)
    record = run(tmp_path / "full", full, lrs)
    whole = run(tmp_path / "whole", Full(fit=5), lrs)
    assert list(record.trials["state"]) == ["complete"] * 5
    assert full.began == [(5, 0), (2, 20), (3, 20), (1, 20), (2, 20)]
    assert record.steps["loss"].tolist() == pytest.approx(whole.steps["loss"].tolist(), rel=1e-10)
    assert (record.steps.groupby("trial").size() == 40).all()


def test_a_bound_on_memory_divides_the_lanes_into_stacks(tmp_path: Path) -> None:
    seen = Full(fit=99)
    lane = 41 * 8 * 6  # parameters, gradient and four tensors of the optimizer, in float64
    record = run(
        tmp_path / "run", seen, [0.01 * (k + 1) for k in range(5)], memory_gb=2 * 2.5 * lane / 1e9
    )  # half of it
    assert [lanes for lanes, _ in seen.began] == [1, 2, 2]
    assert list(record.trials["state"]) == ["complete"] * 5
    seen = Full(fit=99)
    run(tmp_path / "tight", seen, [0.01, 0.02], memory_gb=1e-9)
    assert [lanes for lanes, _ in seen.began] == [1, 1], "one lane is always tried"


@pytest.mark.parametrize("memory_gb", [0, -1.0, float("nan"), float("inf"), "4", True])
def test_a_bound_that_is_none_is_refused(memory_gb: float) -> None:
    with pytest.raises(ConfigError, match="memory_gb=.* must be above 0"):
        Trainer(memory_gb=memory_gb)


def test_a_single_lane_that_does_not_fit_says_so(tmp_path: Path) -> None:
    with pytest.raises(torch.OutOfMemoryError, match="planted"):
        run(tmp_path / "run", Full(fit=0), [0.01, 0.02])
    assert "failed" in set(StudyRecord(tmp_path / "run").trials["state"])


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
            True,
        ),
        (MemoryError(), True),
        (RuntimeError("shapes do not match"), False),
        (ValueError("out of memory is what I named my column"), False),
        (None, False),
    ],
)
def test_what_counts_as_out_of_memory(error: BaseException | None, is_one: bool) -> None:
    assert is_out_of_memory(error) is is_one
    wrapped = WorkloadError("workload 'w', at step 3: forward or loss raised")
    wrapped.__cause__ = error
    assert is_out_of_memory(wrapped) is is_one


@pytest.mark.parametrize(("lanes", "fit", "sizes"), [(7, 7, [7]), (7, 3, [2, 2, 3]), (4, 1, [1] * 4), (3, 0, [1] * 3)])
def test_pieces_are_as_equal_as_can_be(lanes: int, fit: int, sizes: list[int]) -> None:
    seen: list[Any] = []
    train_stacks(list(range(lanes)), seen.append, fit=fit)  # type: ignore[arg-type]
    assert [len(piece) for piece in seen] == sizes
    assert [lane for piece in seen for lane in piece] == list(range(lanes))
