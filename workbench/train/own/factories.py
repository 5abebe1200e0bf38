"""A person's own optimizer, from a factory that is handed what it asks for by the name of its first parameter."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from workbench.config import TrainConfig
from workbench.errors import ConfigError
from workbench.schedules import first_parameter

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
