"""Of several trainings that a program makes one after the other, the longest is judged and changed; the others stay as they are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from workbench.programs.command import Outcome
from workbench.programs.function import Function, FunctionRun
from workbench.programs.trainer import UNCHANGED, first_run

UPDATES = 60


def net(width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    inputs = torch.randn(16, 4)
    loss = F.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def train(
    model: nn.Module, updates: int = UPDATES, lr: float = 0.02, kind: Any = torch.optim.SGD
) -> torch.optim.Optimizer:
    optimizer = kind((p for p in model.parameters() if p.requires_grad), lr=lr)
    for _ in range(updates):
        step(model, optimizer)
    return optimizer


def ramp(model: nn.Module, optimizer: torch.optim.Optimizer, updates: int = 20) -> None:
    """Raise the learning rate until the loss is gone."""
    for k in range(updates):
        optimizer.param_groups[0]["lr"] = 1e-4 * 10 ** (0.6 * k)
        step(model, optimizer)


def finder_on_a_copy(run: FunctionRun) -> None:
    model = net()
    twin = copy.deepcopy(model)
    ramp(twin, torch.optim.SGD(twin.parameters(), lr=1.0), 25)
    train(model)


def finder_that_puts_back(run: FunctionRun) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    rises = torch.optim.lr_scheduler.ExponentialLR(optimizer, 4.0)
    for _ in range(20):
        step(model, optimizer)
        rises.step()
    model.load_state_dict(kept[0])
    optimizer.load_state_dict(kept[1])
    for _ in range(UPDATES):
        step(model, optimizer)


def head_first(run: FunctionRun) -> None:
    model = net()
    model[0].requires_grad_(False)
    train(model, 20, 0.1)
    run.log(validation_loss=7.0)
    model[0].requires_grad_(True)
    train(model)
    run.log(validation_loss=1.0)


def pretrained(run: FunctionRun) -> None:
    model = net()
    train(model, 20, kind=torch.optim.Adam)
    train(model, UPDATES, kind=torch.optim.Adam)


def folds(run: FunctionRun) -> None:
    for fold in range(4):
        model = net()
        train(model, UPDATES - fold)
        run.log(validation_loss=float(fold))


def folds_that_start_over(run: FunctionRun) -> None:
    model = net()
    for _ in range(4):
        for part in (model[0], model[2]):
            part.reset_parameters()
        train(model)


def built_anew(run: FunctionRun) -> None:
    model = net()
    for _ in range(6):
        train(model, UPDATES // 6)


def probes(run: FunctionRun) -> None:
    """A probe of its own at each evaluation is part of the training."""
    model, optimizer = net(), None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for k in range(UPDATES):
        step(model, optimizer)
        if k % 20 == 10:
            train(nn.Linear(4, 1), 5)


def in_turn(run: FunctionRun) -> None:
    first, second = net(), net()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.02) for model in (first, second)]
    unused = torch.optim.Adam(first.parameters())
    for _ in range(UPDATES):
        step(first, optimizers[0])
        for _ in range(3):
            step(second, optimizers[1])
    del unused


def inner_steps(run: FunctionRun) -> None:
    model = net()
    outer = torch.optim.SGD(model.parameters(), lr=0.02)
    for _ in range(UPDATES):
        train(copy.deepcopy(model), 2)
        step(model, outer)


def clamped(run: FunctionRun) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for k in range(UPDATES):
        optimizer.param_groups[0]["lr"] = 0.01 if k > 3 else 0.0
        step(model, optimizer)
        with torch.no_grad():
            for p in model.parameters():
                p.clamp_(-1, 1)


CASES: list[tuple[Callable[[FunctionRun], None], str]] = [
    (finder_on_a_copy, "judged: the second of 2 trainings one after the other, 60 of 85 updates"),
    (finder_that_puts_back, "judged: the second of 2 trainings one after the other, 60 of 80 updates"),
    (head_first, "judged: the second of 2 trainings one after the other, 60 of 80 updates"),
    (pretrained, "judged: the second of 2 trainings one after the other, 60 of 80 updates"),
    (folds, "judged: the first of 4 trainings one after the other, 60 of 234 updates"),
    (folds_that_start_over, "judged: the first of 4 trainings one after the other, 60 of 240 updates"),
    (built_anew, "judged: 60 updates, with an optimizer that is built anew 5 times"),
    (inner_steps, "judged: the second of 2 trainings one after the other, 60 of 62 updates"),
    (probes, ""),
    (in_turn, ""),
    (clamped, ""),
]


@pytest.mark.parametrize(("function", "said"), CASES, ids=[function.__name__ for function, _ in CASES])
def test_the_longest_training_is_judged(tmp_path: Path, function: Any, said: str) -> None:
    outcome = first_run(Function(train=function), tmp_path / "0", steps=None, threads=1)
    assert outcome.updates == UPDATES
    assert outcome.facts["loop"].get("judged", {}).get("said", "").partition(" (")[0] == said
    if said and function is not inner_steps:
        assert not [name for name in outcome.columns if "optimizer" in name]
        assert not outcome.facts["loop"]["schedulers"]


def losses_of(function: Any, tmp_path: Path, **trial: Any) -> Outcome:
    own = first_run(Function(train=function), tmp_path / "0", steps=None, threads=1)
    wanted = own.facts["loop"]["judged"]["wanted"]
    return Function(train=function).run(tmp_path, UNCHANGED | {"stop_after": None, "training": wanted} | trial)


@pytest.mark.parametrize("function", [head_first, finder_that_puts_back])
def test_what_comes_before_is_not_changed(tmp_path: Path, function: Any) -> None:
    own, other = (losses_of(function, tmp_path, factor=factor) for factor in (1.0, 2.0))
    assert own.columns["loss"][0] == other.columns["loss"][0]  # what came before has left the same weights
    assert own.columns["loss"][1] != other.columns["loss"][1]
    assert (own.columns["lr"][0], other.columns["lr"][0]) == (0.02, 0.04)
    stopped = losses_of(function, tmp_path, stop_after=7, warmup_steps=4)
    np.testing.assert_allclose(stopped.columns["lr"], [0.0, 0.005, 0.01, 0.015, 0.02, 0.02, 0.02])


@pytest.mark.parametrize(("function", "value"), [(head_first, 1.0), (folds, 0.0)])
def test_metrics_of_other_trainings_are_left_out(tmp_path: Path, function: Any, value: float) -> None:
    assert [row["value"] for row in losses_of(function, tmp_path).metrics] == [value]


def test_a_first_training_that_diverges_for_good_is_ended(tmp_path: Path) -> None:
    def diverges(run: FunctionRun) -> None:
        train(net(), 5000, lr=1e9)

    outcome = first_run(Function(train=diverges), tmp_path / "0", steps=None, threads=1)
    assert outcome.facts["diverged"]
    assert outcome.updates == 200


def test_a_limit_of_updates_is_one_for_each_training(tmp_path: Path) -> None:
    outcome = first_run(Function(train=finder_on_a_copy), tmp_path / "0", steps=40, threads=1)
    assert outcome.updates == 40
    assert outcome.facts["loop"]["judged"]["said"].startswith(
        "judged: the second of 2 trainings one after the other, 40 of 65"
    )
