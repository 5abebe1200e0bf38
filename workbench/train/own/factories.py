"""A person's own optimizer, from a factory that is handed what it asks for by the name of its first parameter."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from workbench.config import TrainConfig
from workbench.errors import ConfigError
from workbench.schedules import first_parameter

SCALE = "lr_scale"
"""What timm's layer decay writes into a group, for whoever sets its lr to multiply with."""


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that are trained, in order."""
    return [p for p in model.parameters() if p.requires_grad]


def build_optimizer(config: TrainConfig, model: nn.Module | None, parameters: Sequence[nn.Parameter]) -> Any:
    """Return what `config.optimizer` makes of the trained parameters, of the model, or of the parameters with their names.

    `(model, lr)` and `(named_parameters, lr)` ask for the last two; under any other name a factory is given the parameters.

    Raises:
        ConfigError: no `torch.optim.Optimizer` came back, its `step` needs a closure, or the model is asked for where there is none.
    """
    factory, name = config.optimizer, f"optimizer={config.to_dict()['optimizer']!r}"
    assert callable(factory)
    wanted = first_parameter(factory)
    given: Any = list(parameters)
    if wanted in ("model", "named_parameters"):
        if model is None:
            raise ConfigError(f"{name} asks for {wanted}, and here are only parameters; take (params, lr) instead.")
        given = model if wanted == "model" else [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    optimizer = factory(given, config.peak_lr)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"{name} returned {type(optimizer).__name__}; a factory takes (params, lr), (model, lr) or (named_parameters, lr) and "
            "returns a torch.optim.Optimizer."
        )
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    arguments = inspect.signature(optimizer.step).parameters.values()
    if any(p.kind in positional and p.default is inspect.Parameter.empty for p in arguments):
        raise ConfigError(
            f"{name} returned {type(optimizer).__name__}, whose step needs a closure that computes the loss "
            "again; this trainer computes one gradient per step. Take an optimizer whose step() works alone, or leave your loop as it "
            "is: wb.watch records it, and `workbench diagnose -- python train.py` diagnoses it."
        )
    return optimizer
