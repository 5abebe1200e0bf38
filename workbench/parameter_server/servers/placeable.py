"""`check_placeable`: which modules can live on parameter servers, said before anything is trained."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from workbench.config import TrainConfig
from workbench.errors import UsageError

__all__ = ["check_placeable", "trained_parameters"]


def trained_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that need a gradient, by name; tied ones once."""
    return {key: parameter for key, parameter in module.named_parameters() if parameter.requires_grad}


def check_placeable(module: Any, config: Any) -> None:
    """Refuse what servers cannot train.

    Raises:
        UsageError: no module; nothing to train in it; parameters without a shape, or of several dtypes; tensors that cannot be copied;
            no config, or an optimizer that has no name.
    """
    if not isinstance(module, nn.Module):
        raise UsageError(f"place takes a torch.nn.Module, not {type(module).__name__}. Give the module itself.")
    if not isinstance(config, TrainConfig):
        raise UsageError(
            f"config is {type(config).__name__} and must be a TrainConfig: the servers update what they hold by a rule that they know. For example "
            'TrainConfig(optimizer="adam", peak_lr=1e-3, total_steps=1000, batch_size=32).'
        )
    if callable(config.optimizer):
        raise UsageError(
            f"optimizer={config.to_dict()['optimizer']!r} is a factory: on servers a rule by its name is needed, such as 'momentum'."
        )
    name = type(module).__name__
    lazy = [key for key, parameter in module.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise UsageError(
            f"{name} has parameters without a shape: {', '.join(lazy[:3])}. Call the module once on one batch before it is placed, or "
            "give its layers their sizes."
        )
    trained = trained_parameters(module)
    if not trained:
        raise UsageError(
            f"{name} has {len(list(module.parameters()))} parameters and none that needs a gradient, so there is nothing to train. Place "
            "a module with something to train; layers in a plain list are not found, use nn.ModuleList."
        )
    kinds = sorted({str(parameter.dtype) for parameter in trained.values()})
    if len(kinds) > 1 or any(parameter.is_complex() for parameter in trained.values()):
        raise UsageError(
            f"{name} has trained parameters of {', '.join(kinds)}; one real dtype is needed, as they lie together on a server. Call "
            ".float() on the module, and torch.autocast in the step for a forward pass in another precision."
        )
    for place, part in module.named_modules():
        for key, value in vars(part).items():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                raise UsageError(
                    f"{name} keeps {'.'.join(filter(None, (place, key)))}, a tensor that was computed from parameters: a worker cannot "
                    "copy it, and it would not follow them. Compute it in forward."
                )
