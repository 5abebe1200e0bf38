"""Update rules and clipping: the source's formulas, torch's own optimizers as twins, and lanes that equal trials of their own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from workbench.config import OPTIMIZERS, TrainConfig
from workbench.errors import UsageError
from workbench.train.optimizers import Updater, UpdateRule, make_updater
from workbench.train.update_rules import clip_by_norm, clip_thresholds, global_norm

STEPS = 50
FORMS = [(name, form) for name in OPTIMIZERS for form in ("torch", "playbook")]
LANES: list[dict[str, Any]] = [
    {"peak_lr": 1e-2},
    {"peak_lr": 3e-2, "momentum": 0.5, "beta1": 0.5, "rho": 0.99, "weight_decay": 0.3},
    {"peak_lr": 1e-3, "beta2": 0.9999, "eps": 1e-3, "weight_decay": 0.01},
    {"peak_lr": 2e-2, "momentum": 0, "beta1": 0.0, "beta2": 0.9, "rho": 0.0, "eps": 1e-6},
]
"""Constants that differ in every field; the last lane has zeros, one of them an integer."""


def config(**changes: object) -> TrainConfig:
    return TrainConfig.from_dict({"peak_lr": 0.1, "total_steps": 100, "batch_size": 1} | changes)


# Clipping (F4.6)


def test_each_lane_is_rescaled_to_its_threshold_or_left_alone() -> None:
    """A non-finite gradient stays visible, and an infinite threshold is off."""
    grad = torch.tensor([[3.0, 4.0]] * 4 + [[math.nan, 1.0], [math.inf, 1.0], [math.inf, 1.0]])
    given = grad.clone()
    thresholds = clip_thresholds([config(max_grad_norm=t) for t in (2.0, 5.0, 7.0, None, 1.0, 1.0, None)], grad)
    clipped, was = clip_by_norm(grad, global_norm(grad), thresholds)  # type: ignore[arg-type]
    assert was.tolist() == [True, *[False] * 6]
    torch.testing.assert_close(clipped[0], grad[0] * 2 / 5)
    assert torch.equal(clipped[1:4], grad[1:4])
    torch.testing.assert_close(clipped[4:], grad[4:], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(grad, given, rtol=0, atol=0, equal_nan=True)
    in_place, _ = clip_by_norm(grad, global_norm(grad), thresholds, out=grad)  # type: ignore[arg-type]
    assert in_place is grad
    torch.testing.assert_close(grad, clipped, rtol=0, atol=0, equal_nan=True)
    assert clip_thresholds([config(), config()], grad) is None


# Formulas (F7)
def gradient(values: Tensor, step: int) -> Tensor:
    """Of a bowl whose centre moves."""
    return torch.linspace(0.1, 2.0, values.shape[1], dtype=values.dtype) * values + math.sin(step)


def lrs(configs: Sequence[TrainConfig], step: int) -> list[float]:
    """They rise for 20 steps, then fall."""
    return [c.peak_lr * min((step + 1) / 20, 1 - step / 80) for c in configs]


TWINS: dict[str, Callable[[Any, TrainConfig], torch.optim.Optimizer]] = {
    "sgd": lambda p, c: torch.optim.SGD(p, c.peak_lr, weight_decay=c.weight_decay),
    "momentum": lambda p, c: torch.optim.SGD(p, c.peak_lr, momentum=c.momentum, weight_decay=c.weight_decay),
    "nesterov": lambda p, c: torch.optim.SGD(
        p, c.peak_lr, momentum=c.momentum, nesterov=c.momentum > 0, weight_decay=c.weight_decay
    ),
    "rmsprop": lambda p, c: torch.optim.RMSprop(
        p, c.peak_lr, alpha=c.rho, momentum=c.momentum, eps=c.eps, weight_decay=c.weight_decay
    ),
    "adam": lambda p, c: torch.optim.Adam(p, c.peak_lr, (c.beta1, c.beta2), c.eps, c.weight_decay),
    "nadam": lambda p, c: torch.optim.NAdam(p, c.peak_lr, (c.beta1, c.beta2), c.eps, c.weight_decay),
    "adamw": lambda p, c: torch.optim.AdamW(p, c.peak_lr, (c.beta1, c.beta2), c.eps, c.weight_decay),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_lane_equals_torchs_own_optimizer_with_its_constants(name: str) -> None:
    configs = [config(optimizer=name, **lane) for lane in LANES]
    values = start(len(configs))
    twins = [torch.nn.Parameter(row.clone()) for row in values]
    optimizers = [TWINS[name]([p], c) for p, c in zip(twins, configs, strict=True)]
    together(configs, values)
    for step in range(STEPS):
        for p, optimizer, lr in zip(twins, optimizers, lrs(configs, step), strict=True):
            optimizer.param_groups[0]["lr"] = lr
            p.grad = gradient(p.detach().unsqueeze(0), step)[0]
            optimizer.step()
    rtol = 1e-7 if name == "nadam" else 1e-10  # torch keeps nadam's product of betas in float32
    torch.testing.assert_close(values, torch.stack([p.detach() for p in twins]), rtol=rtol, atol=1e-2 * rtol)


# Lanes


def start(lanes: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(lanes, 13, dtype=dtype, generator=torch.Generator().manual_seed(3))


def follow(updater: Updater, values: Tensor, configs: Sequence[TrainConfig], first: int, last: int) -> None:
    """Train the rows of `values` in place."""
    for step in range(first, last):
        now = lrs(configs, step)
        lr = torch.tensor(now, dtype=values.dtype).unsqueeze(1)
        values.sub_(updater.update(values, gradient(values, step), lr, step, now))


def together(configs: Sequence[TrainConfig], values: Tensor, last: int = STEPS) -> Updater:
    updater = make_updater(configs, values, [[] for _ in configs])
    follow(updater, values, configs, 0, last)
    return updater


def alone(configs: Sequence[TrainConfig], values: Tensor) -> Tensor:
    """Each row trained by an updater of its own."""
    rows = values.unsqueeze(1).clone()
    for c, row in zip(configs, rows, strict=True):
        together([c], row)
    return rows.squeeze(1)


def mixed(order: str) -> list[TrainConfig]:
    """Every rule twice, the two with other constants: side by side, or as far from each other as they can lie."""
    pairs = [[config(optimizer=name, rules=form, **LANES[k]) for k in (0, 1)] for name, form in FORMS]
    if order == "sorted":
        return [c for pair in pairs for c in pair]
    return [pair[0] for pair in pairs] + [pair[1] for pair in pairs]


@pytest.mark.parametrize("rows", [[0, 2, 5, 11, 16], [16, 5, 0, 11, 2], [7], list(range(1, 22))])
@pytest.mark.parametrize("order", ["sorted", "scattered"])
def test_lanes_of_all_rules_that_are_kept_go_on_as_separate_trials(order: str, rows: list[int]) -> None:
    configs = mixed(order)
    values = start(len(configs))
    kept = [configs[row] for row in rows]
    expected = alone(kept, values[rows])
    updater = together(configs, values, 20)
    updater.keep(rows)
    values = values[rows]
    follow(updater, values, kept, 20, STEPS)
    torch.testing.assert_close(values, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("order", ["sorted", "scattered"])
def test_the_state_of_a_lane_is_that_of_a_separate_trial(order: str) -> None:
    """Lane by lane into updaters of one lane, on, and back into a stack."""
    configs = mixed(order)
    values = start(len(configs))
    expected = alone(configs, values)
    first = together(configs, values, 10)
    second = make_updater(configs, values, [[] for _ in configs])
    for lane, c in enumerate(configs):
        own = values[lane : lane + 1]
        single = make_updater([c], own, [[]])
        fresh = {key: tensor.shape for key, tensor in single.state(0).items()}
        assert {key: tensor.shape for key, tensor in first.state(lane).items()} == fresh
        single.load(0, first.state(lane), first.plain_state(lane))
        follow(single, own, [c], 10, 20)
        second.load(lane, single.state(0), single.plain_state(0))
    follow(second, values, configs, 20, STEPS)
    torch.testing.assert_close(values, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("configs", "rows", "lists", "said"), [
    (3, 2, 2, "3 configs, 2 rows of parameters and 2 lists.*one of each per lane"),
    (2, 2, 1, "2 configs, 2 rows of parameters and 1 lists"),
    (0, 0, 0, "0 configs.*at least one lane"),
])  # fmt: skip
def test_what_does_not_fit_together_is_refused(configs: int, rows: int, lists: int, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        make_updater([config()] * configs, start(2)[:rows], [[]] * lists)
    with pytest.raises(UsageError, match=r"lanes of one rule.*'adam', 'torch'.*make_updater takes lanes of several"):
        UpdateRule([config(), config(optimizer="adam")], start(2))
