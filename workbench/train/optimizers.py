"""What makes the update of K lanes, with a state that is saved lane by lane: a rule by its name, a torch optimizer of the user's own, or both side by side."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from workbench.config import TrainConfig
from workbench.errors import ConfigError, UsageError
from workbench.train.forward import all_finite
from workbench.train.update_rules import RULES, Constants, HostLr, Memory

_OURS = ("params", "lr")  # of a parameter group: set by the trainer, so never saved


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


class TorchOptimizer:
    """The optimizer of one lane, from a factory `(params, lr)`; its state is saved as tensors and plain values.

    The factory is called once with the parameters and `peak_lr`; from then on each parameter group's lr is scaled by the schedule, so
    groups with different rates keep their proportions. Only `state` and `param_groups` are saved, as by `state_dict`.

    Raises:
        ConfigError: no optimizer came back, its `step` needs a closure, or its state can not be saved.
    """

    def __init__(self, config: TrainConfig, parameters: list[torch.nn.Parameter]) -> None:
        factory = config.optimizer
        assert callable(factory)
        self._name = f"optimizer={config.to_dict()['optimizer']!r}"
        self._optimizer: Any = factory(parameters, config.peak_lr)
        if not isinstance(self._optimizer, torch.optim.Optimizer):
            raise ConfigError(
                f"{self._name} returned {type(self._optimizer).__name__}; a factory takes (params, lr) and returns a "
                "torch.optim.Optimizer."
            )
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        arguments = inspect.signature(self._optimizer.step).parameters.values()
        if any(p.kind in positional and p.default is inspect.Parameter.empty for p in arguments):
            raise ConfigError(
                f"{self._name} returned {type(self._optimizer).__name__}, whose step needs a closure that computes the loss "
                "again; this trainer computes one gradient per step. Take an optimizer whose step() works alone."
            )
        self._ratios = [float(group["lr"]) / config.peak_lr for group in self._optimizer.param_groups]

    def update(
        self,
        params: Tensor,
        grad: Tensor,
        lr: Tensor,
        step: int,
        host_lr: Sequence[float] | NDArray[np.float64] | None = None,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """Let the optimizer step, and give back what it did; the parameters are put back for the trainer."""
        value = float(lr) if host_lr is None else float(host_lr[0])
        for group, ratio in zip(self._optimizer.param_groups, self._ratios, strict=True):
            group["lr"] = value * ratio
        before = params.clone()
        try:
            self._optimizer.step()
        except Exception:
            if all_finite([before, grad]):
                raise
            params.fill_(math.nan)  # it has diverged, and the optimizer minds
        update = torch.sub(before, params, out=out)
        params.copy_(before)
        if step == 0:  # say before the second step, not at the first checkpoint, that it could not be saved
            self.state(0), self.plain_state(0)
        return update

    def state(self, lane: int) -> dict[str, Tensor]:  # noqa: ARG002
        """Return the optimizer's tensors as `state/<parameter>/<name>` and `group/<number>/<name>`."""
        return {key: value for key, value in self._entries().items() if isinstance(value, Tensor)}

    def plain_state(self, lane: int) -> dict[str, Any]:  # noqa: ARG002
        """Return everything else that the optimizer keeps, by the same names, as JSON values."""
        return {k: self._encoded(k, v) for k, v in self._entries().items() if not isinstance(v, Tensor)}

    def keep(self, rows: Sequence[int]) -> None:
        """Keep the only lane, whose parameters are the same objects wherever their values lie now."""
        if list(rows) != [0]:
            raise UsageError(f"TorchOptimizer has one lane, 0; it can not keep {list(rows)}.")

    def load(self, lane: int, state: Mapping[str, Tensor], plain: Mapping[str, Any]) -> None:  # noqa: ARG002
        """Put a copy of saved state back."""
        entries: dict[str, Any] = {key: value.clone() for key, value in state.items()}
        entries |= {key: _decoded(value) for key, value in plain.items()}
        stored: dict[int, dict[str, Any]] = {}
        groups = self._optimizer.state_dict()["param_groups"]
        for key, value in entries.items():
            kind, number, name = key.split("/", 2)
            if kind == "group":
                here = groups[int(number)].get(name)
                on_device = isinstance(here, Tensor) and isinstance(value, Tensor)
                groups[int(number)][name] = value.to(here.device) if on_device else value
            else:
                stored.setdefault(int(number), {})[name] = value
        self._optimizer.load_state_dict({"state": stored, "param_groups": groups})
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        for index, values in stored.items():
            loaded = self._optimizer.state[parameters[index]]
            for name, value in values.items():  # torch casts to the parameter's type; bit for bit means: it does not
                if isinstance(value, Tensor) and loaded[name].dtype != value.dtype:
                    loaded[name] = value.to(loaded[name].device)

    def _entries(self) -> dict[str, Any]:
        stored = self._optimizer.state_dict()
        entries = {
            f"group/{i}/{name}": value
            for i, group in enumerate(stored["param_groups"])
            for name, value in group.items()
            if name not in _OURS
        }
        for number, values in stored["state"].items():
            if not isinstance(number, int) or not isinstance(values, Mapping):
                raise self._cannot_save(f"state[{number!r}]", "an entry that belongs to no parameter")
            entries |= {f"state/{number}/{name}": value for name, value in values.items()}
        return entries

    def _encoded(self, key: str, value: Any) -> Any:
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, bool | int | str | None):
            return value
        if isinstance(value, float):
            return {"float": value.hex()}  # exact, and JSON has no word for NaN and infinities
        if isinstance(value, tuple | list):
            return {type(value).__name__: [self._encoded(key, v) for v in value]}
        raise self._cannot_save(key, type(value).__name__)

    def _cannot_save(self, where: str, what: str) -> ConfigError:
        return ConfigError(
            f"{self._name}: {type(self._optimizer).__name__} keeps {what} in {where}, which a checkpoint can not hold, so a "
            "killed run could not go on. Allowed are tensors, numbers, strings, None, and lists or tuples of plain values."
        )


def _decoded(value: Any) -> Any:
    if isinstance(value, dict):
        ((kind, inside),) = value.items()
        if kind == "float":
            return float.fromhex(inside)
        return (tuple if kind == "tuple" else list)(_decoded(v) for v in inside)
    return value


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
