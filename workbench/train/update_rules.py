"""Clipping, and the updates of K lanes: one of seven rules with its state, or a torch optimizer of the user's own per lane.

Lanes may differ in every optimizer constant and in the rule itself; constants that they share stay plain numbers, others become
tensors (lanes, 1). Two forms are kept where the playbook's FAQ and `torch.optim` differ (F7): "playbook" is written as the source
writes it, "torch" is the arithmetic of `torch.optim` 2.x with its defaults. A rule writes into memory that is there already: for 32
lanes of 26,122 float32 parameters on one core adam takes 0.8 ms that way, and 4.8 ms with fresh tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from workbench.config import TrainConfig
from workbench.errors import UsageError
from workbench.train.torch_optimizer import TorchOptimizer

Number = float | NDArray[np.float64]
"""A number that all lanes share, or one for each, shape (lanes, 1); arithmetic on it is in double precision."""
HostLr = Sequence[float] | NDArray[np.float64] | None
"""The lr of each lane as a number of the host."""


def global_norm(grad: Tensor) -> Tensor:
    """Return the L2 norm of each lane's whole gradient: (lanes, parameters) -> (lanes,) (F1.9)."""
    norm: Tensor = torch.linalg.vector_norm(grad, dim=1)
    return norm


def clip_by_norm(
    grad: Tensor, norm: Tensor, max_grad_norm: float | Tensor, *, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return (clipped gradient, whether it was clipped) by the rule g' = threshold * g / |g| where |g| > threshold.

    A non-finite norm is left as it is, so that it shows in the record. `torch.nn.utils.clip_grad_norm_` adds 1e-6 to the norm.

    Args:
        grad: shape (lanes, parameters).
        norm: its unclipped norm, shape (lanes,), which is the one that the trainer records (F4.7).
        max_grad_norm: threshold, a number or shape (lanes,); infinite is off.
        out: takes the clipped gradient; it may be `grad`.
    """
    clipped = (norm > max_grad_norm) & (norm < math.inf)
    scale = torch.where(clipped, norm.reciprocal() * max_grad_norm, 1.0)
    return torch.mul(grad, scale.unsqueeze(1), out=out), clipped


def clip_thresholds(configs: Sequence[TrainConfig], like: Tensor) -> Tensor | None:
    """Return the threshold of each lane, shape (lanes,), infinite where a lane does not clip; None where none does."""
    if all(config.max_grad_norm is None for config in configs):
        return None
    values = [math.inf if config.max_grad_norm is None else config.max_grad_norm for config in configs]
    return torch.tensor(values, dtype=like.dtype, device=like.device)


class Memory(NamedTuple):
    """What a rule writes to: its state, the update (lanes, parameters), and room of that shape where it needs some."""

    state: dict[str, Tensor]
    out: Tensor
    scratch: Tensor


class Constants:
    """Optimizer constants of the lanes; a factor of the step is computed from them as a `Number`, then cast."""

    def __init__(self, configs: Sequence[TrainConfig], like: Tensor) -> None:
        self._dtype, self._device = like.dtype, like.device

        def number(name: str) -> Number:
            values = [float(getattr(config, name)) for config in configs]
            return values[0] if len(set(values)) == 1 else np.array(values, dtype=np.float64)[:, None]

        self.momentum, self.rho = number("momentum"), number("rho")
        self.beta1, self.beta2 = number("beta1"), number("beta2")
        self.eps, self.weight_decay = number("eps"), number("weight_decay")

    def cast(self, number: Number) -> float | Tensor:
        """Return a number as it is, and one for each lane as a tensor of the parameters' type on their device."""
        if isinstance(number, float):
            return number
        return torch.from_numpy(number).to(self._dtype).to(self._device, non_blocking=True)


@dataclass(frozen=True)
class Rule:
    """One update rule: the initial value of each state tensor, and the step.

    Attributes:
        initial: state name -> value that fills it before the first step.
        update: (memory, gradient, which may be `memory.out`, lr (lanes, 1), t from 1, constants) -> update to subtract.
        scratch: whether it uses `memory.scratch`.
    """

    initial: Mapping[str, float]
    update: Callable[[Memory, Tensor, Tensor, int, Constants], Tensor]
    scratch: bool = True


def _sgd(to: Memory, g: Tensor, lr: Tensor, t: int, c: Constants) -> Tensor:  # noqa: ARG001
    return torch.mul(lr, g, out=to.out)


def _momentum(to: Memory, g: Tensor, lr: Tensor, t: int, c: Constants) -> Tensor:  # noqa: ARG001
    v = to.state["v"].mul_(c.cast(c.momentum)).add_(g)
    return torch.mul(lr, v, out=to.out)


def _nesterov(to: Memory, g: Tensor, lr: Tensor, t: int, c: Constants) -> Tensor:  # noqa: ARG001
    gamma = c.cast(c.momentum)
    v = to.state["v"].mul_(gamma).add_(g)
    return torch.mul(lr, torch.mul(v, gamma, out=to.scratch).add_(g), out=to.out)


def _rmsprop_playbook(to: Memory, g: Tensor, lr: Tensor, t: int, c: Constants) -> Tensor:  # noqa: ARG001
    v = to.state["v"].lerp_(torch.mul(g, g, out=to.scratch), c.cast(1 - c.rho))
    root = torch.add(v, c.cast(c.eps), out=to.scratch).sqrt_()
    step = torch.mul(lr, g, out=to.out).div_(root)
    return to.out.copy_(to.state["m"].mul_(c.cast(c.momentum)).add_(step))


def _rmsprop_torch(to: Memory, g: Tensor, lr: Tensor, t: int, c: Constants) -> Tensor:  # noqa: ARG001
    v = to.state["v"].lerp_(torch.mul(g, g, out=to.scratch), c.cast(1 - c.rho))
    root = torch.sqrt(v, out=to.scratch).add_(c.cast(c.eps))
    m = to.state["m"].mul_(c.cast(c.momentum)).add_(torch.div(g, root, out=to.out))
    return torch.mul(lr, m, out=to.out)


def _moments(to: Memory, g: Tensor, c: Constants) -> tuple[Tensor, Tensor]:
    m = to.state["m"].lerp_(g, c.cast(1 - c.beta1))
    v = to.state["v"].lerp_(torch.mul(g, g, out=to.scratch), c.cast(1 - c.beta2))
    return m, v


def _root_playbook(to: Memory, v: Tensor, c: Constants) -> Tensor:
    return torch.sqrt(v, out=to.scratch).add_(c.cast(c.eps))


def _root_torch(to: Memory, v: Tensor, t: int, c: Constants) -> Tensor:
    return torch.sqrt(v, out=to.scratch).div_(c.cast((1 - c.beta2**t) ** 0.5)).add_(c.cast(c.eps))


def _bias(t: int, c: Constants) -> float | Tensor:
    return c.cast((1 - c.beta2**t) ** 0.5 / (1 - c.beta1**t))


def _adam_playbook(to: Memory, g: Tensor, lr: Tensor, t: int, c: Constants) -> Tensor:
    m, v = _moments(to, g, c)
    return torch.mul(lr * _bias(t, c), m, out=to.out).div_(_root_playbook(to, v, c))


def _adam_torch(to: Memory, g: Tensor, lr: Tensor, t: int, c: Constants) -> Tensor:
    m, v = _moments(to, g, c)
    return torch.mul(lr / c.cast(1 - c.beta1**t), m, out=to.out).div_(_root_torch(to, v, t, c))


def _nadam_playbook(to: Memory, g: Tensor, lr: Tensor, t: int, c: Constants) -> Tensor:
    m, v = _moments(to, g, c)
    ahead = torch.mul(m, c.cast(c.beta1), out=to.scratch)
    step = torch.mul(g, c.cast(1 - c.beta1), out=to.out).add_(ahead)
    return step.mul_(lr * _bias(t, c)).div_(_root_playbook(to, v, c))


def _nadam_torch(to: Memory, g: Tensor, lr: Tensor, t: int, c: Constants, *, psi: float = 4e-3) -> Tensor:
    m, v = _moments(to, g, c)
    mu, mu_next = (c.beta1 * (1 - 0.5 * 0.96 ** (k * psi)) for k in (t, t + 1))
    product = to.state["mu_product"].mul_(c.cast(mu))
    ahead = torch.mul(m, c.cast(mu_next) / (1 - product * c.cast(mu_next)), out=to.scratch)
    step = torch.mul(g, c.cast(1 - mu) / (1 - product), out=to.out).add_(ahead)
    return step.mul_(lr).div_(_root_torch(to, v, t, c))


_ZERO_MV = {"m": 0.0, "v": 0.0}
RULES: dict[tuple[str, str], Rule] = {
    ("sgd", "playbook"): Rule({}, _sgd, scratch=False),
    ("momentum", "playbook"): Rule({"v": 0.0}, _momentum, scratch=False),
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


class UpdateRule:
    """One of `RULES` with its state, weight decay included, for lanes that share the rule.

    Weight decay is coupled L2 as in `torch.optim`, and decoupled for adamw. A parameter that receives no gradient is
    treated as having gradient 0, where `torch.optim` skips it.
    """

    def __init__(self, configs: Sequence[TrainConfig], params: Tensor) -> None:
        keys = sorted({_rule_key(config) for config in configs})
        if len(keys) != 1 or len(configs) != params.shape[0]:
            raise UsageError(
                f"UpdateRule takes lanes of one rule with a config each; given: {len(configs)} configs, rules {keys}, and "
                f"{params.shape[0]} rows of parameters. make_updater takes lanes of several rules."
            )
        self._rule, self._decoupled = RULES[keys[0]], keys[0][0] == "adamw"
        each = {"mu_product": params.new_empty((params.shape[0], 1))}  # one number a lane, not one a parameter
        self._state = {k: torch.full_like(each.get(k, params), value) for k, value in self._rule.initial.items()}
        self._none = params.new_empty((0,))
        self._set(configs)

    def update(
        self, params: Tensor, grad: Tensor, lr: Tensor, step: int, host_lr: HostLr = None, *, out: Tensor | None = None  # noqa: ARG002
    ) -> Tensor:  # fmt: skip
        """Return the update (lanes, parameters) that step `step` (from 0) subtracts.

        Args:
            params: flat parameters, shape (lanes, parameters).
            grad: flat gradient after clipping, same shape.
            lr: shape (lanes, 1), on the device.
            host_lr: the lrs as numbers, for optimizers that need them: reading them from `lr` would make the device wait.
            out: takes the update; without it, memory that the next update overwrites.
        """
        c, to = self._constants, self._memory(params, out)
        if not self._decays:
            return self._rule.update(to, grad, lr, step + 1, c)
        decay = c.cast(c.weight_decay)
        if self._decoupled:
            update = self._rule.update(to, grad, lr, step + 1, c)
            return update.add_(torch.mul(lr * decay, params, out=to.scratch))
        if isinstance(decay, Tensor):
            decayed = torch.addcmul(grad, params, decay, out=to.out)
        else:
            decayed = torch.add(grad, params, alpha=decay, out=to.out)
        return self._rule.update(to, decayed, lr, step + 1, c)

    def state(self, lane: int) -> dict[str, Tensor]:
        """Return the state tensors of one lane by name, each with a lane axis of length 1."""
        return {key: tensor[lane : lane + 1] for key, tensor in self._state.items()}

    def plain_state(self, lane: int) -> dict[str, Any]:  # noqa: ARG002
        """Return nothing: a rule's state is tensors."""
        return {}

    def load(self, lane: int, state: Mapping[str, Tensor], plain: Mapping[str, Any]) -> None:  # noqa: ARG002
        """Put the saved state tensors of one lane back."""
        for key, tensor in self.state(lane).items():
            tensor.copy_(state[key])

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all lanes but these."""
        self._state = {key: tensor[list(rows)] for key, tensor in self._state.items()}
        self._set([self._configs[row] for row in rows])

    def _set(self, configs: Sequence[TrainConfig]) -> None:
        self._configs, self._constants = list(configs), Constants(configs, self._none)
        self._decays = any(config.weight_decay for config in configs)
        self._out: Tensor | None = None
        self._scratch: Tensor | None = None

    def _memory(self, params: Tensor, out: Tensor | None) -> Memory:
        if self._scratch is None:
            self._scratch = torch.empty_like(params) if self._rule.scratch else self._none
        if out is None:
            out = self._out = torch.empty_like(params) if self._out is None else self._out
        return Memory(self._state, out, self._scratch)


class MixedUpdater:
    """Lanes of several rules or of the user's own optimizers: each part updates its rows of one tensor."""

    def __init__(self, parts: Sequence[tuple[Sequence[int], Updater]]) -> None:
        self._out: Tensor | None = None
        self._set([(list(rows), updater) for rows, updater in parts])

    def update(
        self, params: Tensor, grad: Tensor, lr: Tensor, step: int, host_lr: HostLr = None, *, out: Tensor | None = None
    ) -> Tensor:
        """Return the update of this step; see `UpdateRule`."""
        if out is None:
            out = self._out = torch.empty_like(params) if self._out is None else self._out
        for rows, updater in self._parts:
            first, end = rows[0], rows[-1] + 1
            if rows == list(range(first, end)):  # a slice costs no copy
                part = slice(first, end)
                numbers = None if host_lr is None else host_lr[part]
                updater.update(params[part], grad[part], lr[part], step, numbers, out=out[part])
            else:
                out[rows] = updater.update(params[rows], grad[rows], lr[rows], step)
        return out

    def state(self, lane: int) -> dict[str, Tensor]:
        """Return the state tensors of one lane by name."""
        updater, row = self._places[lane]
        return updater.state(row)

    def plain_state(self, lane: int) -> dict[str, Any]:
        """Return the rest of its state as JSON values."""
        updater, row = self._places[lane]
        return updater.plain_state(row)

    def load(self, lane: int, state: Mapping[str, Tensor], plain: Mapping[str, Any]) -> None:
        """Put a saved state of one lane back."""
        updater, row = self._places[lane]
        updater.load(row, state, plain)

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all lanes but these."""
        parts = []
        for before, updater in self._parts:
            kept = [lane for lane, row in enumerate(rows) if row in before]
            if kept:
                updater.keep([before.index(rows[lane]) for lane in kept])
                parts.append((kept, updater))
        self._set(parts)

    def _set(self, parts: list[tuple[list[int], Updater]]) -> None:
        self._parts = parts
        self._places = {lane: (updater, row) for rows, updater in parts for row, lane in enumerate(rows)}
        self._out = None


Updater = UpdateRule | TorchOptimizer | MixedUpdater
"""What makes one update of all lanes, and has a state that can be saved lane by lane."""


def make_updater(
    configs: Sequence[TrainConfig], params: Tensor, parameters: Sequence[Sequence[nn.Parameter]]
) -> Updater:
    """Return the updater of K lanes, each by a rule's name or the user's own torch optimizer.

    Args:
        params: flat parameters, shape (lanes, parameters).
        parameters: each lane's, views of its row, each with a `.grad` that is a view of the gradient.

    Raises:
        UsageError: no lane, or not the same number of them in all three.
        ConfigError: an optimizer of the user's own can not be used here; see `TorchOptimizer`.
    """
    counts = (len(configs), params.shape[0], len(parameters))
    if len(set(counts)) != 1 or not configs:
        raise UsageError(
            f"make_updater got {counts[0]} configs, {counts[1]} rows of parameters and {counts[2]} lists of parameters: "
            "give one of each per lane, and at least one lane."
        )
    groups: dict[tuple[str, str] | int, list[int]] = {}
    for lane, config in enumerate(configs):
        groups.setdefault(lane if callable(config.optimizer) else _rule_key(config), []).append(lane)
    parts: list[tuple[Sequence[int], Updater]] = [
        (rows, TorchOptimizer(configs[key], list(parameters[key])))
        if isinstance(key, int)
        else (rows, UpdateRule([configs[row] for row in rows], params[rows]))
        for key, rows in groups.items()
    ]
    return parts[0][1] if len(parts) == 1 else MixedUpdater(parts)


def _rule_key(config: TrainConfig) -> tuple[str, str]:
    name = str(config.optimizer)
    return (name, config.rules) if (name, config.rules) in RULES else (name, "playbook")
