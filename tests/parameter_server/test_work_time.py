"""What workers do with their time, and which loads belong to which module, against sums worked out by hand (T13.5)."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from workbench.config import TrainConfig
from workbench.parameter_server.coordinator.coordinator import ClusterCoordinator
from workbench.parameter_server.strategy import ParameterServerStrategy
from workbench.parameter_server.trials.load import load_facts
from workbench.parameter_server.trials.work_time import Update, WorkTime


def update(step: int, worker: int, wait_s: float, pull_s: float, compute_s: float, push_s: float) -> Update:
    return Update(step, worker, 1.0, 0.1, 1.0, False, 0, wait_s, pull_s, compute_s, push_s)


def test_sums_and_what_is_left_of_the_workers_time() -> None:
    time = WorkTime(3)
    assert (time.updates, time.step_s) == (0, [])
    assert math.isnan(time.dispatch_s)
    time.add(1.0, 2, [update(0, 0, 0.1, 0.1, 0.2, 0.1), update(1, 1, 0.0, 0.0, 0.4, 0.1)])
    time.add(0.5, 1, [update(2, 0, 0.0, 0.1, 0.3, 0.1)])
    assert time.updates == 3
    assert time.step_s == pytest.approx([0.5, 0.5])
    assert time.dispatch_s == pytest.approx((3 * 1.5 - 1.5) / 3)
    found = time.to_dict()
    assert (found["training_s"], found["closures_timed"], found["stretches"], found["updates"]) == (1.5, 3, 2, 3)
    assert found["work"][0] == pytest.approx(
        {"data_wait_s": 0.1, "pull_s": 0.2, "compute_s": 0.5, "push_s": 0.2, "updates": 2}
    )
    assert found["work"][2]["updates"] == 0


def test_the_ages_of_gradients_are_those_of_the_module_in_question(strategy: ParameterServerStrategy) -> None:
    coordinator = ClusterCoordinator(strategy)
    fields = TrainConfig(peak_lr=0.1, total_steps=9, batch_size=1, optimizer="sgd")
    one, other = (strategy.place(nn.Linear(2, 2), fields) for _ in range(2))
    for placed, pushes in ((one, 3), (other, 5)):
        for _ in range(pushes):
            with placed.step() as module:
                module(torch.ones(1, 2)).sum().backward()
    for placed, pushes in ((one, 3), (other, 5)):
        facts = load_facts(coordinator, placed, seconds=1.0)
        assert facts["steps"] == pushes
        assert facts["staleness_steps"] == [{"0": pushes}, {"0": pushes}]
        placed.delete()
    coordinator.shutdown()
