"""Updates of K lanes: a rule by name with its state, or a `torch.optim.Optimizer` of the user's own per lane.

Lanes may differ in every optimizer constant and in the rule itself; lanes of one rule are updated together. What they
share stays a plain number, what differs becomes a tensor of shape (lanes, 1).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from workbench.config import TrainConfig
from workbench.errors import UsageError
from workbench.train.torch_optimizer import TorchOptimizer
from workbench.train.update_formulas import RULES, Constants, Memory, add_decay

__all__ = ["RULES", "HostLr", "MixedUpdater", "UpdateRule", "Updater", "make_updater"]

HostLr = Sequence[float] | NDArray[np.float64] | None
"""The lr of each lane as a number of the host."""


class Updater(Protocol):
    """What the trainer asks of an optimizer: one update of all lanes, and a state that can be saved lane by lane."""

    def update(
        self, params: Tensor, grad: Tensor, lr: Tensor, step: int, host_lr: HostLr = None, *, out: Tensor | None = None
    ) -> Tensor:
        """Return the update (lanes, parameters) that step `step` (from 0) subtracts.

        Args:
            params: flat parameters, shape (lanes, parameters).
            grad: flat gradient after clipping, same shape.
            lr: shape (lanes, 1), on the device.
            step: from 0.
            host_lr: the lrs as numbers, for who needs them: reading them from `lr` would make the device wait.
            out: takes the update; without it, memory that the next update overwrites.
        """
        ...

    def state(self, lane: int) -> dict[str, Tensor]:
        """Return the state tensors of one lane by name, as if it were trained alone."""
        ...

    def plain_state(self, lane: int) -> dict[str, Any]:
        """Return the rest of its state as JSON values."""
        ...

    def load(self, lane: int, state: Mapping[str, Tensor], plain: Mapping[str, Any]) -> None:
        """Put a saved state of one lane back."""
        ...

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all lanes but these, which become lanes 0, 1, ... in this order."""
        ...


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
        self._state = {key: _filled(key, value, params) for key, value in self._rule.initial.items()}
        self._none = params.new_empty((0,))
        self._set(configs)

    def update(
        self, params: Tensor, grad: Tensor, lr: Tensor, step: int, host_lr: HostLr = None, *, out: Tensor | None = None  # noqa: ARG002
    ) -> Tensor:  # fmt: skip
        """Return the update of this step; see `Updater`."""
        c, to = self._constants, self._memory(params, out)
        if not self._decays:
            return self._rule.update(to, grad, lr, step + 1, c)
        decay = c.cast(c.weight_decay)
        if self._decoupled:
            update = self._rule.update(to, grad, lr, step + 1, c)
            return update.add_(torch.mul(lr * decay, params, out=to.scratch))
        return self._rule.update(to, add_decay(grad, params, decay, out=to.out), lr, step + 1, c)

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


@dataclass
class _Part:
    """Some of the lanes and what updates them; rows that lie together are a slice, which costs no copy."""

    rows: list[int]
    updater: Updater
    where: slice | list[int] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        together = self.rows == list(range(self.rows[0], self.rows[0] + len(self.rows)))
        self.where = slice(self.rows[0], self.rows[0] + len(self.rows)) if together else self.rows


class MixedUpdater:
    """Lanes of several rules or of the user's own optimizers: each part updates its rows of one tensor."""

    def __init__(self, parts: Sequence[tuple[Sequence[int], Updater]]) -> None:
        self._out: Tensor | None = None
        self._set([_Part(list(rows), updater) for rows, updater in parts])

    def update(
        self, params: Tensor, grad: Tensor, lr: Tensor, step: int, host_lr: HostLr = None, *, out: Tensor | None = None
    ) -> Tensor:
        """Return the update of this step; see `Updater`."""
        if out is None:
            out = self._out = torch.empty_like(params) if self._out is None else self._out
        for part in self._parts:
            rows = part.where
            if isinstance(rows, slice):
                numbers = None if host_lr is None else host_lr[rows]
                part.updater.update(params[rows], grad[rows], lr[rows], step, numbers, out=out[rows])
            else:
                out[rows] = part.updater.update(params[rows], grad[rows], lr[rows], step)
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
        for part in self._parts:
            kept = [lane for lane, row in enumerate(rows) if row in part.rows]
            if kept:
                part.updater.keep([part.rows.index(rows[lane]) for lane in kept])
                parts.append(_Part(kept, part.updater))
        self._set(parts)

    def _set(self, parts: list[_Part]) -> None:
        self._parts = parts
        self._places = {lane: (part.updater, row) for part in parts for row, lane in enumerate(part.rows)}
        self._out = None


def make_updater(
    configs: Sequence[TrainConfig], params: Tensor, parameters: Sequence[Sequence[nn.Parameter]]
) -> Updater:
    """Return the updater of K lanes, each by a rule's name or the user's own torch optimizer.

    Lanes of the same rule cost least where they lie together: the rule then works on a slice instead of copies.

    Args:
        configs: one per lane.
        params: flat parameters, shape (lanes, parameters).
        parameters: each lane's parameters, views of its row, each with a `.grad` that is a view of the gradient.

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


def _filled(key: str, value: float, params: Tensor) -> Tensor:
    if key == "mu_product":
        return torch.full((params.shape[0], 1), value, dtype=params.dtype, device=params.device)
    return torch.full_like(params, value)
