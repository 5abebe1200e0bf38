"""`TorchOptimizer`: an optimizer, and scheduler, of a person, as the updater of one lane, whose state is saved with it; made by a factory that is handed what it asks for by the name of its first parameter."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from workbench.config import TrainConfig
from workbench.errors import ConfigError, UsageError
from workbench.lr_schedulers import scheduled_groups
from workbench.schedules import first_parameter, lr_values, takes_optimizer
from workbench.train.forward import all_finite

SCALE = "lr_scale"  # what timm's layer decay writes into a group, for whoever sets its lr to multiply with


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that are trained, in order."""
    return [p for p in model.parameters() if p.requires_grad]


def build_optimizer(config: TrainConfig, model: nn.Module | None, parameters: Sequence[nn.Parameter]) -> Any:
    """Return what `config.optimizer` makes of the trained parameters, of the model, or of the parameters with their names.

    `(model, lr)` and `(named_parameters, lr)` ask for the last two; under any other name a factory is given the parameters.
    """
    name, optimizer = _name(config), _made(config, model, parameters)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"{name} returned {type(optimizer).__name__}; a factory takes (params, lr), (model, lr) or (named_parameters, lr) and "
            "returns a torch.optim.Optimizer. Several take a step of your own: Workload(step=...)."
        )
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    arguments = inspect.signature(optimizer.step).parameters.values()
    if any(p.kind in positional and p.default is inspect.Parameter.empty for p in arguments):
        raise ConfigError(
            f"{name} returned {type(optimizer).__name__}, whose step needs a closure that computes the loss "
            "again; this trainer computes one gradient per step. Take an optimizer whose step() works alone, make the update in a "
            "function of your own, Workload(step=...), or leave your loop as it is: wb.watch records it, and `workbench diagnose -- "
            "python train.py` diagnoses it."
        )
    return optimizer


def build_optimizers(config: TrainConfig, model: nn.Module) -> Any:
    """Return what `config.optimizer` makes for a custom step: an optimizer, a list, a tuple or a mapping of some."""
    if not callable(config.optimizer):
        raise ConfigError(
            f"optimizer={config.optimizer!r} is the name of a rule, and a custom step, Workload(step=...), steps optimizers of "
            "torch. Write optimizer=lambda model, lr: torch.optim.Adam(model.parameters(), lr), or return a list of optimizers."
        )
    made = _made(config, model, trained_parameters(model))
    wrong = [type(each).__name__ for each in listed(made) if not isinstance(each, torch.optim.Optimizer)]
    if wrong or not listed(made):
        raise ConfigError(
            f"{_name(config)} returned {wrong[0] if wrong else 'no optimizer'}; for a custom step a factory returns a "
            "torch.optim.Optimizer, or a list, a tuple or a dict of some."
        )
    return made


def listed(made: Any) -> list[Any]:
    """Return the optimizers that a factory made, in order."""
    return list(made.values()) if isinstance(made, dict) else list(made) if isinstance(made, (list, tuple)) else [made]


def _name(config: TrainConfig) -> str:
    return f"optimizer={config.to_dict()['optimizer']!r}"


def _made(config: TrainConfig, model: nn.Module | None, parameters: Sequence[nn.Parameter]) -> Any:
    factory = config.optimizer
    assert callable(factory)
    wanted = first_parameter(factory)
    given: Any = list(parameters)
    if wanted in ("model", "named_parameters"):
        if model is None:
            raise ConfigError(
                f"{_name(config)} asks for {wanted}, and here are only parameters; take (params, lr) instead."
            )
        given = model if wanted == "model" else [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    return factory(given, config.peak_lr)


Make = Callable[[], torch.optim.Optimizer]
_OURS = ("params", "lr")  # of a parameter group: set by the trainer, so never saved


class _Scheduled(NamedTuple):
    """What a scheduler of torch puts into the groups of a person's optimizer, and the lr that the record has at these steps."""

    first: int
    lrs: Sequence[float]
    groups: Sequence[Sequence[dict[str, Any]]]

    @classmethod
    def of(cls, config: TrainConfig, make: Make) -> _Scheduled:
        """Read it off a second optimizer of the same factory; nothing is in it without such a scheduler."""
        factory, first = config.schedule, config.warmup_steps
        if not takes_optimizer(factory):
            return cls(first, (), ())
        assert callable(factory)
        groups = scheduled_groups(factory, make(), config.total_steps - first)
        return cls(first, lr_values(config)[first:].tolist(), groups)

    def at(self, step: int, lr: float) -> Sequence[dict[str, Any]] | None:
        """Return what each group has at a step; None where another lr is asked for than the schedule's."""
        place = step - self.first
        return self.groups[place] if 0 <= place < len(self.lrs) and self.lrs[place] == lr else None


class TorchOptimizer:
    """An optimizer of one lane, that `make` makes from a person's factory; its state is saved as tensors and plain values.

    The factory is called once with the parameters and `peak_lr`; from then on each parameter group's lr is scaled by the schedule, so
    groups with different rates keep their proportions, and one with an `lr_scale` has that part of it. Only `state` and `param_groups` are saved, as by `state_dict`.
    """

    def __init__(self, config: TrainConfig, make: Make, made: torch.optim.Optimizer | None = None) -> None:
        self._name = f"optimizer={config.to_dict()['optimizer']!r}"
        self._optimizer = make() if made is None else made
        groups = self._optimizer.param_groups
        self._scales = [float(group.get(SCALE, 1.0)) for group in groups]
        ratios = [float(group["lr"]) / config.peak_lr for group in groups]
        self._ratios = [ratio * scale for ratio, scale in zip(ratios, self._scales, strict=True)]
        self._scheduled = _Scheduled.of(config, make)

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
        self.set_lr(step, float(lr) if host_lr is None else float(host_lr[0]))
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

    def set_lr(self, step: int, lr: float) -> None:
        """Give each group its learning rate, and what else the scheduler moves, at a step of which the schedule says `lr`."""
        scheduled = self._scheduled.at(step, lr)
        for place, group in enumerate(self._optimizer.param_groups):
            group["lr"] = lr * self._ratios[place]
            if scheduled is not None:
                group.update(scheduled[place], lr=scheduled[place]["lr"] * self._scales[place])

    def state(self, lane: int) -> dict[str, Tensor]:  # noqa: ARG002
        """Return the optimizer's tensors as `state/<parameter>/<name>` and `group/<number>/<name>`; those in a list, as LBFGS keeps them, as `item/...`."""
        entries = self._entries()
        own = {key: value for key, value in entries.items() if isinstance(value, Tensor)}
        lists = {key: value for key, value in entries.items() if isinstance(value, (list, tuple))}
        return own | {_item(k, i): t for k, v in lists.items() for i, t in enumerate(v) if isinstance(t, Tensor)}

    def plain_state(self, lane: int) -> dict[str, Any]:  # noqa: ARG002
        """Return everything else that the optimizer keeps, by the same names, as JSON values."""
        return {k: self._encoded(k, v) for k, v in self._entries().items() if not isinstance(v, Tensor)}

    def skip(self, lane: int) -> None:
        """Do nothing: the optimizer counts its own steps."""

    def keep(self, rows: Sequence[int]) -> None:
        """Keep the only lane, whose parameters are the same objects wherever their values lie now."""
        if list(rows) != [0]:
            raise UsageError(f"TorchOptimizer has one lane, 0; it can not keep {list(rows)}.")

    def load(self, lane: int, state: Mapping[str, Tensor], plain: Mapping[str, Any]) -> None:  # noqa: ARG002
        """Put a copy of saved state back."""
        entries: dict[str, Any] = {key: t.clone() for key, t in state.items() if not key.startswith("item/")}
        entries |= {key: _decoded(value, state) for key, value in plain.items()}
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

    def _encoded(self, key: str, value: Any, *, whole: bool = True) -> Any:
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, bool | int | str | None):
            return value
        if isinstance(value, float):
            return {"float": value.hex()}  # exact, and JSON has no word for NaN and infinities
        if isinstance(value, tuple | list):
            parts = [
                {"item": _item(key, i)} if whole and isinstance(v, Tensor) else self._encoded(key, v, whole=False)
                for i, v in enumerate(value)
            ]
            return {type(value).__name__: parts}
        raise self._cannot_save(key, type(value).__name__)

    def _cannot_save(self, where: str, what: str) -> ConfigError:
        return ConfigError(
            f"{self._name}: {type(self._optimizer).__name__} keeps {what} in {where}, which a checkpoint can not hold, so a "
            "killed run could not go on. Allowed are tensors, numbers, strings, None, and lists or tuples of plain values."
        )


def _item(key: str, place: int) -> str:
    return f"item/{key}/{place}"


def _decoded(value: Any, state: Mapping[str, Tensor]) -> Any:
    if isinstance(value, dict):
        ((kind, inside),) = value.items()
        if kind == "float":
            return float.fromhex(inside)
        if kind == "item":
            return state[inside].clone()
        return (tuple if kind == "tuple" else list)(_decoded(v, state) for v in inside)
    return value
