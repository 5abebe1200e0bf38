"""Lanes in one updater: each equals a trial of its own, whatever the others are, also after some of them left."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from workbench.config import OPTIMIZERS, TrainConfig
from workbench.errors import UsageError
from workbench.train.update_rules import RULES, Updater, UpdateRule, make_updater

SIZE, STEPS = 13, 50
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


def start(lanes: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(lanes, SIZE, dtype=dtype, generator=torch.Generator().manual_seed(3))


def gradient(values: Tensor, step: int) -> Tensor:
    """Of a bowl whose centre moves."""
    curvature = torch.linspace(0.1, 2.0, values.shape[1], dtype=values.dtype)
    return curvature * values + math.sin(step)


def lrs(configs: Sequence[TrainConfig], step: int) -> list[float]:
    return [config.peak_lr * (1 - step / 80) for config in configs]


def follow(updater: Updater, values: Tensor, configs: Sequence[TrainConfig], first: int, last: int) -> None:
    """Train the rows of `values` in place."""
    for step in range(first, last):
        now = lrs(configs, step)
        lr = torch.tensor(now, dtype=values.dtype).unsqueeze(1)
        values.sub_(updater.update(values, gradient(values, step), lr, step, now))


def alone(config: TrainConfig, row: Tensor, last: int = STEPS) -> Tensor:
    values = row.unsqueeze(0).clone()
    follow(make_updater([config], values, [[]]), values, [config], 0, last)
    return values[0]


def together(configs: Sequence[TrainConfig], values: Tensor, last: int = STEPS) -> Updater:
    updater = make_updater(configs, values, [[] for _ in configs])
    follow(updater, values, configs, 0, last)
    return updater


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize(("name", "form"), FORMS)
def test_lanes_with_constants_of_their_own_equal_separate_trials(
    name: str, form: str, dtype: torch.dtype, rtol: float
) -> None:
    configs = [config(optimizer=name, rules=form, **lane) for lane in LANES]
    values = start(len(configs), dtype)
    expected = torch.stack([alone(c, row) for c, row in zip(configs, values, strict=True)])
    together(configs, values)
    assert values.dtype == dtype
    torch.testing.assert_close(values, expected, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("name", "form"), FORMS)
def test_lanes_that_differ_in_lr_alone_equal_separate_trials_bit_for_bit(
    name: str, form: str, dtype: torch.dtype
) -> None:
    configs = [config(optimizer=name, rules=form, weight_decay=0.05, peak_lr=lr) for lr in (1e-3, 1e-2, 3e-2)]
    values = start(3, dtype)
    expected = torch.stack([alone(c, row) for c, row in zip(configs, values, strict=True)])
    together(configs, values)
    assert torch.equal(values, expected)


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


def mixed(order: str) -> list[TrainConfig]:
    """Every rule twice, the two with other constants: side by side, or as far from each other as they can lie."""
    pairs = [[config(optimizer=n, rules=f, **LANES[k]) for k in (1, 2)] for n, f in RULES]
    firsts, seconds = zip(*pairs, strict=True)
    return [c for pair in pairs for c in pair] if order == "sorted" else [*firsts, *seconds]


@pytest.mark.parametrize("order", ["sorted", "scattered"])
def test_lanes_of_all_rules_train_in_one_stack(order: str) -> None:
    configs = mixed(order)
    values = start(len(configs))
    expected = torch.stack([alone(c, row) for c, row in zip(configs, values, strict=True)])
    together(configs, values)
    torch.testing.assert_close(values, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rows", [[0, 2, 5, 11, 16], [16, 5, 0, 11, 2], [7], list(range(1, 22))])
@pytest.mark.parametrize("order", ["sorted", "scattered"])
def test_lanes_that_are_kept_go_on_as_separate_trials(order: str, rows: list[int]) -> None:
    configs = mixed(order)
    values = start(len(configs))
    expected = torch.stack([alone(configs[row], values[row]) for row in rows])
    updater = together(configs, values, 20)
    updater.keep(rows)
    values = values[rows]
    follow(updater, values, [configs[row] for row in rows], 20, STEPS)
    torch.testing.assert_close(values, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_kept_lanes_of_one_rule_with_equal_constants_go_on(name: str, form: str) -> None:
    """What differed before is a plain number afterwards."""
    configs = [config(optimizer=name, rules=form, **LANES[k]) for k in (1, 0, 1, 2)]
    values = start(4)
    expected = torch.stack([alone(configs[row], values[row]) for row in (2, 0)])
    updater = together(configs, values, 20)
    updater.keep([2, 0])
    values = values[[2, 0]]
    follow(updater, values, [configs[2], configs[0]], 20, STEPS)
    torch.testing.assert_close(values, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("order", ["sorted", "scattered"])
def test_the_state_of_a_lane_is_that_of_a_separate_trial(order: str) -> None:
    """Lane by lane into updaters of one lane, on, and back into a stack."""
    configs = mixed(order)
    values = start(len(configs))
    expected = torch.stack([alone(c, row) for c, row in zip(configs, values, strict=True)])
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


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_state_put_back_goes_on_bit_for_bit(name: str, form: str) -> None:
    configs = [config(optimizer=name, rules=form, **lane) for lane in LANES]
    values = start(4)
    updater = together(configs, values, 10)
    fresh = make_updater(configs, values, [[] for _ in configs])
    for lane in (2, 0, 3, 1):
        stored = {key: tensor.clone() for key, tensor in updater.state(lane).items()}
        fresh.load(lane, stored, updater.plain_state(lane))
    again = values.clone()
    follow(updater, values, configs, 10, 15)
    follow(fresh, again, configs, 10, 15)
    assert torch.equal(values, again)


def test_nadam_keeps_a_product_of_its_own_for_each_lane() -> None:
    configs = [config(optimizer="nadam", beta1=beta1) for beta1 in (0.5, 0.9, 0.99)]
    updater = together(configs, start(3), 8)
    for lane, c in enumerate(configs):
        product = math.prod(c.beta1 * (1 - 0.5 * 0.96 ** (t * 0.004)) for t in range(1, 9))
        assert updater.state(lane)["mu_product"].shape == (1, 1)
        assert float(updater.state(lane)["mu_product"]) == pytest.approx(product, rel=1e-13)


@pytest.mark.parametrize("form", ["torch", "playbook"])
def test_factors_of_a_late_step_are_computed_in_double_precision(form: str) -> None:
    """1 - 0.99999^1 in float32 is off by 2e-3: beta2 itself can not be told from its neighbours there."""
    configs = [config(optimizer="adam", rules=form, beta2=beta2, eps=0.0) for beta2 in (0.99999, 0.9)]
    values = torch.ones(2, 5)
    lr = torch.full((2, 1), 0.25)
    update = make_updater(configs, values, [[], []]).update(values, torch.full((2, 5), 3.0), lr, 0)
    assert update.dtype == torch.float32
    torch.testing.assert_close(update, torch.full((2, 5), 0.25), rtol=1e-6, atol=0)  # the first step of adam is lr


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_a_lane_of_nan_does_not_touch_its_neighbours(name: str, form: str) -> None:
    configs = [config(optimizer=name, rules=form, **lane) for lane in LANES]
    paths = []
    for broken in (False, True):
        values = start(4)
        values[1] = math.nan if broken else values[1]
        together(configs, values, 10)
        assert bool(values[1].isnan().all()) == broken
        paths.append(values[[0, 2, 3]])
    assert torch.equal(*paths)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize(("name", "form"), FORMS)
def test_only_the_update_and_the_state_are_written(name: str, form: str, weight_decay: float) -> None:
    c = config(optimizer=name, rules=form, weight_decay=weight_decay)
    values, grad, lr = start(2), start(2).cos(), torch.full((2, 1), 0.1, dtype=torch.float64)
    updater = make_updater([c, c], values, [[], []])
    before = [t.clone() for t in (values, grad, lr)]
    first = updater.update(values, grad, lr, 0)
    kept = first.clone()
    assert all(torch.equal(a, b) for a, b in zip(before, (values, grad, lr), strict=True))
    assert updater.update(values, 2 * grad, lr, 1).data_ptr() == first.data_ptr(), "no new memory every step"
    own = torch.empty_like(values)
    given = make_updater([c, c], values, [[], []]).update(values, grad, lr, 0, out=own)
    assert given.data_ptr() == own.data_ptr()
    assert torch.equal(own, kept)


def test_what_does_not_fit_together_is_refused() -> None:
    c, values = config(), start(2)
    with pytest.raises(UsageError, match="3 configs, 2 rows of parameters and 2 lists.*one of each per lane"):
        make_updater([c, c, c], values, [[], []])
    with pytest.raises(UsageError, match="2 configs, 2 rows of parameters and 1 lists"):
        make_updater([c, c], values, [[]])
    with pytest.raises(UsageError, match="0 configs.*at least one lane"):
        make_updater([], values[:0], [])
    with pytest.raises(UsageError, match=r"lanes of one rule.*'adam', 'torch'.*make_updater takes lanes of several"):
        UpdateRule([c, config(optimizer="adam")], values)
    with pytest.raises(UsageError, match="1 configs.*2 rows"):
        UpdateRule([c], values)
    with pytest.raises(KeyError):
        make_updater([c, c], values, [[], []]).load(0, {}, {})
