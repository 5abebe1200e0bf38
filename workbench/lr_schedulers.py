"""Learning rates of a scheduler of torch, read off before training: it is stepped once an update, on an optimizer that nothing is trained with.

So the lr of every step is known in advance, to the record, to a resumed run and to lanes that train together.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from workbench.config import code_name
from workbench.errors import ConfigError, in_one_line

MOVED = ("lr", "momentum", "betas")
"""What schedulers change in a group."""
Values = tuple[dict[str, Any], ...]
"""What one step has in each group."""


def scheduled_groups(factory: Callable[..., Any], optimizer: torch.optim.Optimizer, steps: int) -> list[Values]:
    """Return what each step finds in the groups of an optimizer whose scheduler is stepped after every one; the optimizer is used up."""
    name, found = f"schedule={code_name(factory)!r}", []
    parameters = inspect.signature(factory).parameters
    needed = [
        p
        for p in parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    how = {"total_steps": steps} if "total_steps" in parameters else {}
    also = (steps,) if len(needed) > 1 and not how else ()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
        try:
            scheduler = factory(optimizer, *also, **how)
        except Exception as error:
            raise ConfigError(
                f"{name} raised {in_one_line(error)} It is given an optimizer with one group of lr peak_lr first, whose lr the record keeps."
            ) from error
        if not isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler):
            raise ConfigError(
                f"{name} returned {type(scheduler).__name__}; a function of an optimizer returns a scheduler of "
                "torch.optim.lr_scheduler, and a function of progress in [0, 1] a factor: call its parameter progress."
            )
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise ConfigError(
                f"{name} returned ReduceLROnPlateau, whose lr depends on losses: it has no schedule that could be compared. Take one that "
                "depends on the step, or leave your loop as it is: wb.watch records it."
            )
        for step in range(steps):
            found.append(tuple({k: group[k] for k in MOVED if k in group} for group in optimizer.param_groups))
            try:
                if step + 1 < steps:
                    scheduler.step()
            except Exception as error:
                raise ConfigError(
                    f"{name} raised {in_one_line(error)} This was at step {step + 1} of {steps}; trials may be longer than yours: let the "
                    "factory take their length, as schedule=lambda optimizer, total_steps: ... does."
                ) from error
    return found


@lru_cache(maxsize=64)
def scheduled_lrs(factory: Callable[..., Any], peak_lr: float, steps: int, *, named_rule: bool) -> tuple[float, ...]:
    """Return the lr of each step, of a single group that begins with `peak_lr`."""
    name = f"schedule={code_name(factory)!r}"
    rows = [values for (values,) in scheduled_groups(factory, _plain(peak_lr), steps)]
    lrs = tuple(float(values["lr"]) for values in rows)
    twice = [float(values["lr"]) for (values,) in scheduled_groups(factory, _plain(2 * peak_lr), steps)]
    if math.isclose(max(lrs), max(twice), rel_tol=1e-9):
        raise ConfigError(
            f"{name} has the same learning rates whatever peak_lr is (at most {max(lrs):g}): take the peak from the optimizer, as in "
            "max_lr=optimizer.param_groups[0]['lr'], so that trials can differ in it."
        )
    if named_rule and any(values["momentum"] != rows[0]["momentum"] for values in rows):
        raise ConfigError(
            f"{name} moves the momentum beside the lr, which takes an optimizer of your own: optimizer=lambda params, lr: "
            "torch.optim.SGD(params, lr, momentum=0.9). Or give it cycle_momentum=False."
        )
    return lrs


def _plain(lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr, momentum=0.9)
