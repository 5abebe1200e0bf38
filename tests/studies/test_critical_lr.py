"""The critical lr by forward passes alone, against 2 (g.u) / (u.H.u) on quadratics."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.workloads import small_net, small_workload
from workbench.topics.lr_sweep.critical_lr import CriticalLR, measure_critical_lr
from workbench.train.lane_stack import build_model
from workbench.workloads.analytic import eigenvalues, quadratic

CPU = torch.device("cpu")


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "nesterov", "adam"])
@pytest.mark.parametrize("scale", [1e-2, 1.0, 1e4])
@pytest.mark.parametrize("seed", [0, 1])
def test_within_ten_percent_of_the_parabola(optimizer: Any, scale: float, seed: int) -> None:
    """Along u the loss of a quadratic is a parabola that is back at its start at 2 (g.u) / (u.H.u)."""
    workload = quadratic(optimizer=optimizer, loss_scale=scale)
    config = workload.config.replace(shared_seed=seed)
    found = measure_critical_lr(workload, config, CPU)
    curvature = eigenvalues(loss_scale=scale).numpy()
    gradient = curvature * build_model(workload, config, CPU).theta.detach().numpy()
    update = gradient / (np.abs(gradient) + config.eps) if optimizer == "adam" else gradient
    update = (1.9 if optimizer == "nesterov" else 1.0) * update
    exact = 2 * (gradient @ update) / (update @ (curvature * update))
    assert found.value == pytest.approx(exact, rel=0.1)
    assert found.below <= exact <= found.above
    assert found.forwards < 20


def test_lr_schedule_and_warmup_of_the_config_play_no_part() -> None:
    workload = quadratic()
    expected = measure_critical_lr(workload, workload.config, CPU).value
    changed = workload.config.replace(peak_lr=1e3, schedule="cosine", warmup_steps=50)
    assert measure_critical_lr(workload, changed, CPU).value == pytest.approx(expected, rel=1e-9)


def test_the_callers_random_state_is_untouched() -> None:
    torch.manual_seed(3), np.random.seed(3), random.seed(3)
    before = (torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate())
    workload = small_workload(build_model=lambda: small_net(0.5))
    assert measure_critical_lr(workload, workload.config, CPU).value is not None
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (np.random.get_state()[1].tolist(), random.getstate())


def test_random_state_is_put_back_also_after_an_error() -> None:
    calls = []

    def breaks(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        calls.append(torch.rand(1))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return (outputs.squeeze(-1) - batch[1]) ** 2

    before = torch.get_rng_state()
    workload = small_workload(loss=breaks)
    with pytest.raises(KeyboardInterrupt):
        measure_critical_lr(workload, workload.config, CPU)
    assert torch.equal(before, torch.get_rng_state())


def test_a_linear_loss_has_no_critical_lr() -> None:
    def linear(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return outputs.flatten(1).sum(1)

    workload = small_workload(build_model=lambda: torch.nn.Linear(3, 1), loss=linear)
    found = measure_critical_lr(workload, workload.config, CPU)
    assert found.value is None
    assert math.isinf(found.above)
    assert found.forwards < 40


@pytest.mark.parametrize("factor", [0.0, math.nan])
def test_without_a_slope_there_is_nothing_to_measure(factor: float) -> None:
    workload = small_workload(loss=lambda outputs, batch: factor * (outputs.squeeze(-1) - batch[1]) ** 2)
    assert measure_critical_lr(workload, workload.config, CPU) == CriticalLR(0.0, math.inf, 0)


def test_accumulated_micro_batches_give_the_same() -> None:
    whole, parts = (small_workload(config={"accumulate_steps": k}) for k in (1, 4))
    values = [measure_critical_lr(w, w.config, CPU).value for w in (whole, parts)]
    assert values[0] == pytest.approx(values[1], rel=1e-9)
