"""How many lanes fit in memory; stacks that do not are halved, and nothing that was trained is trained twice for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.lane_models import MODELS, lane_workload
from tests.helpers.lane_stacks import lane_stack, updates
from tests.helpers.workloads import small_workload
from workbench.errors import WorkloadError
from workbench.record.read import StudyRecord
from workbench.record.write import StudyWriter
from workbench.train.forward import is_out_of_memory
from workbench.train.gradients import LoopGradients
from workbench.train.hooks import Hook, Run, Step
from workbench.train.lane import lane_bytes
from workbench.train.lanes.vmap_gradients import VmapGradients
from workbench.train.trainer import Trainer
from workbench.workloads.base import Workload


def wide() -> Workload:
    return lane_workload(lambda: nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4)))


def peak(lanes: int) -> int:
    """The bytes of a call, as its program knows them."""
    way = VmapGradients(wide(), lane_stack(wide(), lanes), lanes_per_call=lanes)
    way.prepare(updates(wide(), 1)[0])
    return way._calls[0].planned[0][0].peak_bytes


def test_a_lane_counts_parameters_gradient_optimizer_frozen_ones_and_buffers() -> None:
    frozen, buffered = (lane_stack(lane_workload(MODELS[name]), 2) for name in ("frozen", "batch_norm"))
    for stack, more in ((frozen, 16 * 8 + 8), (buffered, 8 + 8 + 1)):
        trained = sum(p.numel() for p in stack.models[0].parameters() if p.requires_grad)
        assert lane_bytes(stack) == 8 * (trained * 6 + more)


@pytest.mark.parametrize(("lanes_of_room", "threads", "expected"), [(8.5, 1, 8), (3.5, 1, 3), (3.5, 2, 1), (0.1, 1, 1)])
def test_calls_take_as_many_lanes_as_there_is_room_for(lanes_of_room: float, threads: int, expected: int) -> None:
    workload = wide()
    stack, (step,) = lane_stack(workload, 8), updates(workload, 1)
    way = VmapGradients(workload, stack, lanes_per_call=8, threads=threads, room=int(lanes_of_room * peak(1)))
    loop = LoopGradients(workload, stack)
    try:
        way(step)
        assert way.describe()["lanes_per_call"] == expected
        found, evaluated = stack.grad.clone(), way.evaluate("validation", 8, rows=range(8))
    finally:
        way.close()
    loop(step)
    torch.testing.assert_close(found, stack.grad, rtol=1e-10, atol=1e-12)
    expected_values = [[pytest.approx(e.value, rel=1e-9) for e in lane] for lane in loop.evaluate("validation", 8, rows=range(8))]  # fmt: skip
    assert [[e.value for e in lane] for lane in evaluated] == expected_values


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


def run(out: Path, hook: Hook, lanes: int, *, first: int = 40, **trainer: Any) -> StudyRecord:
    given = small_workload(config={"eval_every_steps": 10})
    study = StudyWriter.open(out, kind="lr_sweep", workload=given.name, config=given.config.to_dict())
    configs = [given.config.replace(peak_lr=0.01 * (k + 1), total_steps=40 if k else first) for k in range(lanes)]
    try:
        Trainer(hooks=[hook], **trainer).run_trials(given, configs, study, stage="lr_sweep")
    finally:
        study.close()
    return StudyRecord(out)


def test_out_of_memory_halves_the_stack_and_goes_on_from_its_checkpoints(tmp_path: Path) -> None:
    full = Full(fit=2)
    record, whole = run(tmp_path / "full", full, 5), run(tmp_path / "whole", Full(fit=5), 5)
    assert list(record.trials["state"]) == ["complete"] * 5
    assert full.began == [(5, 0), (2, 20), (3, 20), (1, 20), (2, 20)]
    assert record.steps["loss"].tolist() == pytest.approx(whole.steps["loss"].tolist(), rel=1e-10)
    assert (record.steps.groupby("trial").size() == 40).all()
    one = Full(fit=1)
    run(tmp_path / "one has ended", one, 3, first=20)
    assert one.began == [(3, 0), (2, 20), (1, 20), (1, 20)], "what is complete does not begin again"
    with pytest.raises(torch.OutOfMemoryError, match="planted"):
        run(tmp_path / "none", Full(fit=0), 2)
    assert "failed" in set(StudyRecord(tmp_path / "none").trials["state"])


def test_a_bound_on_memory_divides_the_lanes_into_stacks(tmp_path: Path) -> None:
    lane = 41 * 8 * 6  # parameters, gradient and four tensors of the optimizer, in float64; half of the bound is theirs
    for name, lanes, bound, stacks in (("run", 5, 2 * 2.5 * lane / 1e9, [1, 2, 2]), ("tight", 2, 1e-9, [1, 1])):
        seen = Full(fit=99)
        record = run(tmp_path / name, seen, lanes, memory_gb=bound)
        assert [size for size, _ in seen.began] == stacks
        assert set(record.trials["state"]) == {"complete"}


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate"), True),
        (ValueError("out of memory is what I named my column"), False),
        (None, False),
    ],
)
def test_what_counts_as_out_of_memory(error: BaseException | None, is_one: bool) -> None:
    assert is_out_of_memory(error) is is_one
    wrapped = WorkloadError("workload 'w', at step 3: forward or loss raised")
    wrapped.__cause__ = error
    assert is_out_of_memory(wrapped) is is_one
