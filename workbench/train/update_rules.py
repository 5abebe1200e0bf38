"""The seven update rules, over tensors of shape (lanes, parameters).

A rule reads the gradient and returns the update that the trainer subtracts, so a hook sees the real step. Two forms
are kept where the playbook's FAQ and `torch.optim` differ (F7): "playbook" is written as the source writes it,
"torch" is the arithmetic of `torch.optim` 2.x with its defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from workbench.config import TrainConfig
from workbench.train.torch_optimizer import TorchOptimizer

__all__ = ["RULES", "Constants", "Rule", "UpdateRule", "Updater", "make_updater"]

State = dict[str, Tensor]


@dataclass(frozen=True)
class Constants:
    """Optimizer constants: plain numbers, or tensors of shape (lanes, 1) that differ between lanes."""

    momentum: float
    rho: float
    beta1: float
    beta2: float
    eps: float


@dataclass(frozen=True)
class Rule:
    """One update rule: the initial value of each state tensor, and the step.

    Attributes:
        initial: state name -> value that fills it before the first step.
        update: (state, gradient (lanes, parameters), lr (lanes, 1), t from 1, constants) -> update to subtract.
    """

    initial: Mapping[str, float]
    update: Callable[[State, Tensor, Tensor, int, Constants], Tensor]


def _sgd(state: State, g: Tensor, lr: Tensor, t: int, c: Constants) -> Tensor:  # noqa: ARG001
    return lr * g


def _momentum(state: State, g: Tensor, lr: Tensor, t: int, c: Constants) -> Tensor:  # noqa: ARG001
    return lr * state["v"].mul_(c.momentum).add_(g)


def _nesterov(state: State, g: Tensor, lr: Tensor, t: int, c: Constants) -> Tensor:  # noqa: ARG001
    return lr * (c.momentum * state["v"].mul_(c.momentum).add_(g) + g)


def _rmsprop_playbook(state: State, g: Tensor, lr: Tensor, t: int, c: Constants) -> Tensor:  # noqa: ARG001
    v = state["v"].lerp_(g * g, 1 - c.rho)
    return state["m"].mul_(c.momentum).add_(lr * g / (v + c.eps).sqrt())


def _rmsprop_torch(state: State, g: Tensor, lr: Tensor, t: int, c: Constants) -> Tensor:  # noqa: ARG001
    v = state["v"].lerp_(g * g, 1 - c.rho)
    step: Tensor = lr * state["m"].mul_(c.momentum).add_(g / (v.sqrt() + c.eps))
    return step


def _moments(state: State, g: Tensor, c: Constants) -> tuple[Tensor, Tensor]:
    return state["m"].lerp_(g, 1 - c.beta1), state["v"].lerp_(g * g, 1 - c.beta2)


def _bias(t: int, c: Constants) -> float:
    return float((1 - c.beta2**t) ** 0.5 / (1 - c.beta1**t))


def _adam_playbook(state: State, g: Tensor, lr: Tensor, t: int, c: Constants) -> Tensor:
    m, v = _moments(state, g, c)
    return (lr * _bias(t, c)) * m / (v.sqrt() + c.eps)


def _adam_torch(state: State, g: Tensor, lr: Tensor, t: int, c: Constants) -> Tensor:
    m, v = _moments(state, g, c)
    return (lr / (1 - c.beta1**t)) * m / v.sqrt().div_((1 - c.beta2**t) ** 0.5).add_(c.eps)


def _nadam_playbook(state: State, g: Tensor, lr: Tensor, t: int, c: Constants) -> Tensor:
    m, v = _moments(state, g, c)
    return (lr * _bias(t, c)) * (c.beta1 * m + (1 - c.beta1) * g) / (v.sqrt() + c.eps)


def _nadam_torch(state: State, g: Tensor, lr: Tensor, t: int, c: Constants, *, psi: float = 4e-3) -> Tensor:
    m, v = _moments(state, g, c)
    mu, mu_next = (c.beta1 * (1 - 0.5 * 0.96 ** (k * psi)) for k in (t, t + 1))
    product = state["mu_product"].mul_(mu)
    denominator = v.sqrt().div_((1 - c.beta2**t) ** 0.5).add_(c.eps)
    step: Tensor = (1 - mu) / (1 - product) * g + mu_next / (1 - product * mu_next) * m
    return lr * step / denominator


_ZERO_MV = {"m": 0.0, "v": 0.0}
RULES: dict[tuple[str, str], Rule] = {
    ("sgd", "playbook"): Rule({}, _sgd),
    ("momentum", "playbook"): Rule({"v": 0.0}, _momentum),
    ("nesterov", "playbook"): Rule({"v": 0.0}, _nesterov),
    ("rmsprop", "playbook"): Rule({"v": 1.0, "m": 0.0}, _rmsprop_playbook),
    ("rmsprop", "torch"): Rule(_ZERO_MV, _rmsprop_torch),
    ("adam", "playbook"): Rule(_ZERO_MV, _adam_playbook),
    ("adam", "torch"): Rule(_ZERO_MV, _adam_torch),
    ("nadam", "playbook"): Rule(_ZERO_MV, _nadam_playbook),
    ("nadam", "torch"): Rule(_ZERO_MV | {"mu_product": 1.0}, _nadam_torch),
    ("adamw", "playbook"): Rule(_ZERO_MV, _adam_playbook),
    ("adamw", "torch"): Rule(_ZERO_MV, _adam_torch),
}
"""(optimizer, form) -> rule; sgd, momentum and nesterov are the same in both forms (F7.1 to F7.3)."""


class Updater(Protocol):
    """What the trainer asks of an optimizer: one update of all lanes, and a state that can be saved lane by lane."""

    def update(self, params: Tensor, grad: Tensor, lr: Tensor, step: int, host_lr: Any = None) -> Tensor:
        """Return the update (lanes, parameters) that step `step` (from 0) subtracts.

        Args:
            params: flat parameters, shape (lanes, parameters).
            grad: flat gradient after clipping, same shape.
            lr: shape (lanes, 1), on the device.
            step: from 0.
            host_lr: the lrs as numbers, for who needs them: reading them from `lr` would make the device wait.
        """
        ...

    def state(self, lane: int) -> dict[str, Tensor]:
        """Return the state tensors of one lane by name."""
        ...

    def plain_state(self, lane: int) -> dict[str, Any]:
        """Return the rest of its state as JSON values."""
        ...

    def load(self, lane: int, state: Mapping[str, Tensor], plain: Mapping[str, Any]) -> None:
        """Put a saved state back."""
        ...

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all lanes but these."""
        ...


class UpdateRule:
    """One of `RULES` with its state, weight decay included.

    Weight decay is coupled L2 as in `torch.optim`, and decoupled for adamw. A parameter that receives no gradient is
    treated as having gradient 0, where `torch.optim` skips it.
    """

    def __init__(self, config: TrainConfig, params: Tensor) -> None:
        name = str(config.optimizer)
        self._rule = RULES.get((name, config.rules)) or RULES[name, "playbook"]
        self._constants = Constants(config.momentum, config.rho, config.beta1, config.beta2, config.eps)
        self._coupled = config.weight_decay if name != "adamw" else 0.0
        self._decoupled = config.weight_decay if name == "adamw" else 0.0
        self._state = {key: self._filled(key, value, params) for key, value in self._rule.initial.items()}

    @staticmethod
    def _filled(key: str, value: float, params: Tensor) -> Tensor:
        if key == "mu_product":
            return torch.full((params.shape[0], 1), value, dtype=params.dtype, device=params.device)
        return torch.full_like(params, value)

    def update(
        self, params: Tensor, grad: Tensor, lr: Tensor, step: int, host_lr: float | None = None  # noqa: ARG002
    ) -> Tensor:  # fmt: skip
        """Return the update of this step; see `Updater`."""
        if self._coupled:
            grad = grad.add(params, alpha=self._coupled)
        update = self._rule.update(self._state, grad, lr, step + 1, self._constants)
        return update + (lr * self._decoupled) * params if self._decoupled else update

    def state(self) -> dict[str, Tensor]:
        """Return the state tensors by name."""
        return dict(self._state)

    def plain_state(self) -> dict[str, Any]:
        """Return nothing: a rule's state is tensors."""
        return {}

    def load(self, state: Mapping[str, Tensor], plain: Mapping[str, Any]) -> None:  # noqa: ARG002
        """Put saved state tensors back."""
        for key, tensor in self._state.items():
            tensor.copy_(state[key])


class LaneUpdaters:
    """One updater per lane."""

    def __init__(self, configs: Sequence[TrainConfig], params: Tensor, parameters: Sequence[list[torch.nn.Parameter]]):
        self._lanes = [
            TorchOptimizer(config, own) if callable(config.optimizer) else UpdateRule(config, params[lane : lane + 1])
            for lane, (config, own) in enumerate(zip(configs, parameters, strict=True))
        ]

    def update(self, params: Tensor, grad: Tensor, lr: Tensor, step: int, host_lr: Any = None) -> Tensor:
        """Return the update of all lanes."""
        return torch.cat([
            updater.update(
                params[k : k + 1], grad[k : k + 1], lr[k : k + 1], step, None if host_lr is None else float(host_lr[k])
            )
            for k, updater in enumerate(self._lanes)
        ])  # fmt: skip

    def state(self, lane: int) -> dict[str, Tensor]:
        """Return the state tensors of one lane by name."""
        return self._lanes[lane].state()

    def plain_state(self, lane: int) -> dict[str, Any]:
        """Return the rest of its state as JSON values."""
        return self._lanes[lane].plain_state()

    def load(self, lane: int, state: Mapping[str, Tensor], plain: Mapping[str, Any]) -> None:
        """Put a saved state back."""
        self._lanes[lane].load(state, plain)

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all lanes but these."""
        self._lanes = [self._lanes[row] for row in rows]


def make_updater(
    configs: Sequence[TrainConfig], params: Tensor, parameters: Sequence[list[torch.nn.Parameter]]
) -> Updater:
    """Return the updater of K lanes: a rule by name, or the user's own torch optimizer.

    Args:
        configs: of the lanes.
        params: flat parameters, shape (lanes, parameters).
        parameters: each lane's parameters, views of `params`, each with a `.grad` that is a view of the gradient.
    """
    return LaneUpdaters(configs, params, parameters)
