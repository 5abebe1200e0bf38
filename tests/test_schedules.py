"""Schedules: exact values at the joints, and the example of the playbook."""

from __future__ import annotations

import math

import numpy as np
import pytest

from workbench.config import TrainConfig
from workbench.errors import ConfigError
from workbench.schedules import join, linear_warmup, lr_values, prepend_warmup, shaped


def config(**changes: object) -> TrainConfig:
    return TrainConfig.from_dict({"peak_lr": 0.4, "total_steps": 100, "batch_size": 8} | changes)


def test_prepending_1000_steps_to_10000_makes_11000_and_leaves_the_rest_alone() -> None:
    before = config(total_steps=10_000, schedule="cosine")
    after = prepend_warmup(before, 1_000)
    assert after.total_steps == 11_000
    old, new = lr_values(before), lr_values(after)
    np.testing.assert_allclose(new[1_000:], old, rtol=1e-14)
    np.testing.assert_allclose(new[:1_000], 0.4 * np.arange(1_000) / 1_000, rtol=1e-14)


@pytest.mark.parametrize(
    ("schedule", "at_quarter"), [("constant", 1.0), ("linear", 0.75), ("cosine", 0.5 * (1 + math.cos(math.pi / 4)))]
)
def test_shapes_at_a_quarter_of_the_way(schedule: str, at_quarter: float) -> None:
    assert lr_values(config(schedule=schedule))[25] == pytest.approx(0.4 * at_quarter)


def test_cosine_equals_torch() -> None:
    torch = pytest.importorskip("torch")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
    theirs = []
    for _ in range(100):
        theirs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    np.testing.assert_allclose(lr_values(config(schedule="cosine")), theirs, rtol=1e-6, atol=1e-9)


def test_a_schedule_of_the_users_own_gets_progress() -> None:
    lrs = lr_values(config(schedule=lambda progress: 1 - progress**2, warmup_steps=20))
    assert lrs[60] == pytest.approx(0.4 * (1 - 0.5**2))


def test_join_counts_the_second_from_the_joint() -> None:
    falling = shaped(lambda progress: 1 - progress, 10)
    both = join(linear_warmup(5), falling, at=5)
    assert [both(k) for k in (0, 4, 5, 10, 15)] == pytest.approx([0, 0.8, 1.0, 0.5, 0.0])
    assert join(falling, lambda step: 5.0 + step, at=3)(3) == 5.0, "the joint is the second's"
    assert falling(25) == 0.0, "progress stays within [0, 1]"


@pytest.mark.parametrize("factor", [-1.0, math.nan, math.inf])
def test_a_schedule_that_returns_nonsense_is_named_with_its_step(factor: float) -> None:
    with pytest.raises(ConfigError, match=r"at step 50"):
        lr_values(config(schedule=lambda progress: factor if progress >= 0.5 else 1.0))


def test_more_steps_than_anybody_trains_are_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="total_steps=1,000,000,000,000 is more than"):
        lr_values(TrainConfig(peak_lr=0.1, total_steps=10**12, batch_size=8))
