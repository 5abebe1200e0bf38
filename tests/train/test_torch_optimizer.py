"""The user's own optimizer: proportions of its groups, state that survives a kill, and what is refused early."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.workloads import small_workload
from workbench.config import TrainConfig
from workbench.errors import ConfigError
from workbench.train.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from workbench.train.optimizers import make_updater
from workbench.train.trainer import Trainer


class Counting(torch.optim.Optimizer):
    """Keeps every kind of state: a counter and a sum in the group, plain values and a wider tensor per parameter."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "k": 0, "weight_sum": 0.0, "largest": math.inf, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] += 1
            group["weight_sum"] += group["lr"] / 3
            group["largest"] = min(group["largest"], 1 / group["k"])
            group["scale"] = torch.tensor(float(group["k"]))
            for p in group["params"]:
                state = self.state[p]
                state["calls"] = state.get("calls", 0) + 1
                state["wide"] = state.get("wide", torch.zeros_like(p, dtype=torch.float64)) + p.grad.double() / 3
                state["nothing"] = None
                assert isinstance(group["betas"], tuple)
                direction = state["wide"].to(p.dtype) / state["calls"] * (1 - group["betas"][0] ** group["k"])
                p.sub_(group["lr"] * (1 + group["largest"] + group["weight_sum"] / group["scale"]) * direction)


def config(**changes: object) -> TrainConfig:
    return TrainConfig.from_dict({"peak_lr": 0.1, "total_steps": 100, "batch_size": 1} | changes)


class Odd(torch.optim.SGD):
    """Keeps something that no checkpoint can hold."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        if self.param_groups[0]["lr"] > 1:
            self.param_groups[0]["history"] = [{"a": 1}]
        else:
            self.state["shared"] = torch.zeros(1)


@pytest.mark.parametrize(("factory", "peak_lr", "said"), [
    (torch.optim.LBFGS, 0.1, r"LBFGS.* whose step needs a closure.*whose step\(\) works alone"),
    (lambda params, lr: None, 0.1, r"returned NoneType.*returns a torch.optim.Optimizer"),
    (Odd, 2.0, r"Odd keeps dict in group/0/history.*Allowed are tensors, numbers"),
    (Odd, 0.1, r"Odd keeps .*belongs to no parameter in state\['"),
])  # fmt: skip
def test_what_cannot_train_here_is_refused_at_the_first_step(
    tmp_path: Path, factory: Any, peak_lr: float, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        Trainer().run(small_workload(config={"optimizer": factory, "peak_lr": peak_lr}), out=tmp_path / "run")


FACTORIES: list[Callable[[Any, float], Any]] = [
    torch.optim.SGD,
    lambda params, lr: torch.optim.SGD([{"params": params[0], "lr": 10 * lr}, {"params": params[1]}], lr=lr),
    torch.optim.Adam,
    Counting,
    *(torch.optim.NAdam, torch.optim.ASGD, torch.optim.Rprop, torch.optim.Adafactor),
]


class Stack:
    """Two parameters of length 2 per lane, views of rows; the gradient is the value itself plus the step."""

    def __init__(self, configs: list[TrainConfig]) -> None:
        self.configs = configs
        self.parameters = [[torch.nn.Parameter(torch.zeros(2)) for _ in range(2)] for _ in configs]
        self.bind(torch.arange(4.0).repeat(len(configs), 1) / 10)
        self.updater = make_updater(configs, self.values, self.parameters)

    def bind(self, values: Tensor) -> None:
        self.values, self.grad = values, torch.zeros_like(values)
        for row, own in enumerate(self.parameters):
            for i, p in enumerate(own):
                p.data, p.grad = (t[row, 2 * i : 2 * i + 2] for t in (self.values, self.grad))

    def train(self, first: int, last: int) -> Stack:
        for number in range(first, last):
            torch.add(self.values, number, out=self.grad)
            host = [c.peak_lr / (1 + number) for c in self.configs]
            before = self.values.clone()
            update = self.updater.update(self.values, self.grad, torch.tensor(host).unsqueeze(1), number, host)
            assert torch.equal(self.values, before), "the trainer applies the update, not the optimizer"
            self.values.sub_(update)
        return self

    def keep(self, rows: list[int]) -> None:
        self.configs, self.parameters = ([old[row] for row in rows] for old in (self.configs, self.parameters))
        self.bind(self.values[rows])
        self.updater.keep(rows)


def lanes_of_all_kinds() -> list[TrainConfig]:
    own = [config(optimizer=factory, peak_lr=0.1 / (k + 1)) for k, factory in enumerate(FACTORIES)]
    return [own[0], config(optimizer="adam", peak_lr=0.05), own[1], own[2], config(optimizer="adam"), *own[3:]]


@pytest.mark.parametrize("rows", [list(range(10)), [5, 3, 0], [2]])
def test_lanes_with_optimizers_of_their_own_stay_when_others_leave(rows: list[int]) -> None:
    configs = lanes_of_all_kinds()
    stack = Stack(configs).train(0, 7)
    stack.keep(rows)
    stack.train(7, 20)
    for lane, row in enumerate(rows):
        assert torch.equal(stack.values[lane], Stack([configs[row]]).train(0, 20).values[0])


def test_the_state_of_an_own_optimizer_moves_through_checkpoints_between_a_lane_and_a_trial_alone(
    tmp_path: Path,
) -> None:
    def moved(source: Stack, lane: int, target: Stack, row: int) -> None:
        state = source.updater.state(lane), {"optimizer": source.updater.plain_state(lane)}
        stored = load_checkpoint(
            save_checkpoint(tmp_path / f"{len(list(tmp_path.iterdir()))}", Checkpoint(1, {}, *state))
        )
        target.values[row] = source.values[lane]
        target.updater.load(row, stored.trainer, stored.meta["optimizer"])

    configs = lanes_of_all_kinds()
    stack = Stack(configs).train(0, 5)
    back = Stack(configs)
    for row, c in enumerate(configs):
        single = Stack([c])
        moved(stack, row, single, 0)
        moved(single.train(5, 10), 0, back, row)
    assert torch.equal(back.train(10, 20).values, stack.train(5, 20).values)
    assert back.updater.plain_state(5) == stack.updater.plain_state(5)
