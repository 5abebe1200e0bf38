"""What makes the update of K lanes, with a state that is saved lane by lane: a rule by its name, a torch optimizer of the user's own, or both side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from workbench.config import TrainConfig
from workbench.errors import UsageError
from workbench.train.own.torch_optimizer import TorchOptimizer, build_optimizer
from workbench.train.update_rules import RULES, Constants, HostLr, Memory


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
        self._none, self._skipped = params.new_empty((0,)), 0
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
        c, to, step = self._constants, self._memory(params, out), step - self._skipped
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
        """Return how many steps made no update, where any did; the rest of a rule's state is tensors."""
        return {"skipped": self._skipped} if self._skipped else {}

    def skip(self, lane: int) -> None:  # noqa: ARG002
        """Count a step that makes no update; only a lane alone skips."""
        self._skipped += 1

    def load(self, lane: int, state: Mapping[str, Tensor], plain: Mapping[str, Any]) -> None:
        """Put the saved state of one lane back."""
        self._skipped = int(plain.get("skipped", 0))
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

    def skip(self, lane: int) -> None:
        """Let a step pass without an update."""
        updater, row = self._places[lane]
        updater.skip(row)

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
    configs: Sequence[TrainConfig],
    params: Tensor,
    parameters: Sequence[Sequence[nn.Parameter]],
    models: Sequence[nn.Module] = (),
) -> Updater:
    """Return the updater of K lanes, each by a rule's name or the user's own torch optimizer.

    Args:
        params: flat parameters, shape (lanes, parameters).
        parameters: each lane's, views of its row, each with a `.grad` that is a view of the gradient.
        models: each lane's, for a factory that asks for it.
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
        (
            rows,
            TorchOptimizer(
                configs[key], partial(build_optimizer, configs[key], models[key] if models else None, parameters[key])
            ),
        )
        if isinstance(key, int)
        else (rows, UpdateRule([configs[row] for row in rows], params[: len(rows)]))
        for key, rows in groups.items()
    ]
    return parts[0][1] if len(parts) == 1 else MixedUpdater(parts)


def _rule_key(config: TrainConfig) -> tuple[str, str]:
    name = str(config.optimizer)
    return (name, config.rules) if (name, config.rules) in RULES else (name, "playbook")
