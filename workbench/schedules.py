"""Learning-rate schedules as functions of the step; drawn and tested without a model.

A schedule maps a step to a factor of `peak_lr`. Warmup is prepended by joining two schedules, so the one that was
there before stays untouched (F3.11): 10,000 steps with 1,000 of warmup become 11,000 (F3.13).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable

import numpy as np

from workbench.config import TrainConfig
from workbench.errors import ConfigError, in_one_line

__all__ = ["lr_values", "prepend_warmup"]

Schedule = Callable[[int], float]
MAX_STEPS = 10**8  # rule of thumb: the learning rates of more than these fill a memory before training begins
_SHAPES: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,  # noqa: ARG005
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),  # Loshchilov and Hutter, 2017
}


def shaped(shape: Callable[[float], float], total_steps: int) -> Schedule:
    """Return `shape(step / total_steps)` as a schedule; progress stays within [0, 1]."""
    return lambda step: float(shape(min(max(step / total_steps, 0.0), 1.0)))


def linear_warmup(warmup_steps: int) -> Schedule:
    """Return the ramp k / warmup_steps: exactly 0 at step 0, 1 at `warmup_steps` (O4)."""
    return lambda step: min(step / warmup_steps, 1.0)


def join(first: Schedule, second: Schedule, *, at: int) -> Schedule:
    """Return `first` before step `at` and `second`, counted from `at`, afterwards."""
    return lambda step: first(step) if step < at else second(step - at)


def _by_place(factory: Callable[..., object]) -> list[inspect.Parameter]:
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p for p in parameters if p.kind in kinds]


def first_parameter(factory: Callable[..., object]) -> str:
    """Return the name of the first positional parameter of a function, "" where it has none or does not say."""
    return next((p.name for p in _by_place(factory)), "")


def takes_optimizer(schedule: object) -> bool:
    """Tell whether a schedule is a factory of a torch scheduler: its first parameter is called so (`optimizer`, `opt`, `optim`), or it needs a second one."""
    if not callable(schedule):
        return False
    needed = [p for p in _by_place(schedule) if p.default is inspect.Parameter.empty]
    return first_parameter(schedule) in ("optimizer", "opt", "optim") or len(needed) == 2


def schedule_of(config: TrainConfig) -> Schedule:
    """Return the learning rate of every step of `config`, in absolute units.

    The shape, or the scheduler, runs over the `total_steps - warmup_steps` steps after the ramp.
    """
    peak, warmup, steps = config.peak_lr, config.warmup_steps, config.total_steps - config.warmup_steps
    if takes_optimizer(config.schedule):
        from workbench.lr_schedulers import scheduled_lrs  # torch: nothing else about a schedule needs it

        assert callable(config.schedule)
        lrs = scheduled_lrs(config.schedule, peak, steps, named_rule=not callable(config.optimizer))
        after: Schedule = lambda step: lrs[min(step, steps - 1)]  # noqa: E731
        return join(lambda step: peak * step / warmup, after, at=warmup)
    shape = config.schedule if callable(config.schedule) else _SHAPES[config.schedule]
    factor = shaped(shape, steps)
    if warmup:
        factor = join(linear_warmup(warmup), factor, at=warmup)
    return lambda step: peak * factor(step)


def lr_values(config: TrainConfig) -> np.ndarray:
    """Return the lr of steps 0 ... total_steps - 1, float64, shape (total_steps,).

    Raises:
        ConfigError: a schedule of the user's own returned a negative or non-finite factor; the step is named. Or `total_steps` is above
            `MAX_STEPS`.
    """
    if config.total_steps > MAX_STEPS:
        raise ConfigError(
            f"total_steps={config.total_steps:,} is more than the {MAX_STEPS:,} updates that one trial may have: give the number after which training is to end."
        )
    lr = schedule_of(config)
    try:
        values = np.array([lr(step) for step in range(config.total_steps)], dtype=np.float64)
    except ConfigError:
        raise
    except Exception as error:  # of the person's own function
        raise ConfigError(
            f"schedule={config.to_dict()['schedule']!r} raised {in_one_line(error)}. A function of progress in [0, 1] returns a factor of the learning rate; one "
            "that makes a scheduler of torch has a parameter called optimizer: schedule=lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, ...)."
        ) from error
    bad = np.flatnonzero(~np.isfinite(values) | (values < 0))
    if bad.size:
        step = int(bad[0])
        raise ConfigError(
            f"schedule={config.to_dict()['schedule']!r} gives lr {values[step]} at step {step}: a schedule maps progress "
            "in [0, 1] to a finite factor of at least 0."
        )
    return values


def cap_steps(total_steps: int, cap_frac: float) -> int:
    """Return the longest warmup that a baseline of `total_steps` may get (F3.10)."""
    return math.floor(cap_frac * total_steps * (1 + 1e-9))


def prepend_warmup(config: TrainConfig, warmup_steps: int) -> TrainConfig:
    """Return `config` lengthened by a ramp of `warmup_steps`; what came after it is untouched (F3.11, F3.13)."""
    return config.replace(
        warmup_steps=config.warmup_steps + warmup_steps, total_steps=config.total_steps + warmup_steps
    )
