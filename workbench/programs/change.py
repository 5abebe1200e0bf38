"""`Change`: what is done to a program's updates, on top of what it does itself."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from workbench.instruments.norms import clip_to


class Stopped(SystemExit):
    """The program has made the updates that it was asked for."""

    def __init__(self) -> None:
        super().__init__(0)


@dataclass
class Change:
    """Learning rates times a factor and a linear warmup, constants of the rule replaced, other clipping of gradients, an end after so many updates.

    A factor of 1 without the rest changes nothing: the program runs as it does alone.

    Attributes:
        factor: on the learning rate of every group of every optimizer, on top of the program's own schedule.
        constants: name in a parameter group -> what it is in every group that has it, such as `{"weight_decay": 0.0}`.
        warmup_steps: update k of the first so many has its learning rate times k / warmup_steps.
        unclipped: whether the program's own clipping leaves the gradients as they are.
        max_grad_norm: threshold of the L2 norm of each optimizer's gradients, after the program's own clipping; None is off.
        stop_after: updates; None lets the program end by itself.
        stop_s: seconds from the first update on, after which it ends with the update it is at; None is without a limit.
        at_end: called once before the program is ended.
        at_update: called after each update with how many were made.
        optimizers: those that stepped, the first one first.
    """

    factor: float = 1.0
    constants: Mapping[str, Any] = field(default_factory=dict)
    warmup_steps: int = 0
    unclipped: bool = False
    max_grad_norm: float | None = None
    stop_after: int | None = None
    stop_s: float | None = None
    at_end: Callable[[], None] = lambda: None
    at_update: Callable[[int], None] = lambda _: None
    optimizers: list[Optimizer] = field(default_factory=list)
    diverged: bool = False
    _learned: bool = False
    _began: float | None = None
    _kept: list[tuple[dict[str, Any], str, Any]] = field(default_factory=list)

    def is_none(self) -> bool:
        """Tell whether the program trains as it does alone, to whatever end."""
        return self.factor == 1.0 and not (self.constants or self.warmup_steps or self.unclipped or self.max_grad_norm)

    def set_lr(self, optimizer: Optimizer, update: int) -> None:
        """Change the learning rates and constants of an update that is about to be made."""
        if not any(each is optimizer for each in self.optimizers):
            self.optimizers.append(optimizer)
        for group in optimizer.param_groups:
            for name in self.constants.keys() & group.keys():
                self._kept.append((group, name, group[name]))
                value = self.constants[name]
                group[name] = tuple(value) if isinstance(value, list) else value
        factor = self.factor
        if update < self.warmup_steps:
            factor *= update / self.warmup_steps
        if factor == 1.0:
            return
        for group in optimizer.param_groups:
            lr = group.get("lr")
            if isinstance(lr, Tensor):
                self._kept.append((group, "lr", lr.clone()))
                lr.mul_(factor)
            elif lr is not None:
                self._kept.append((group, "lr", lr))
                group["lr"] = lr * factor

    def clip(self, gradients: Sequence[Tensor], scale: Tensor | None = None) -> Tensor | None:
        """Shorten the gradients, `scale` times the true ones, in place to `max_grad_norm`; return whether they were longer."""
        return None if self.max_grad_norm is None else clip_to(gradients, self.max_grad_norm, scale)

    def reset_lr(self, optimizer: Optimizer) -> None:  # noqa: ARG002
        """Put the program's own values back, as its schedulers go on from them."""
        for group, name, value in self._kept:
            if isinstance(value, Tensor):
                group[name].copy_(value)
            else:
                group[name] = value
        self._kept.clear()

    def saw(self, losses: Sequence[float]) -> None:
        """Take in the losses of updates in a row: a training that was finite and ends in non-finite ones has diverged."""
        self._learned = self._learned or any(map(math.isfinite, losses))
        self.diverged = self._learned and len(losses) > 2 and not any(map(math.isfinite, losses[-3:]))

    def updated(self, updates: int) -> None:
        """End the program where it has made its updates, or where its loss has been non-finite."""
        self.at_update(updates)
        if self.stop_s is not None:
            self._began = self._began or time.perf_counter()
            if self.stop_after is None and time.perf_counter() - self._began > self.stop_s:
                self.stop_after = updates
        if self.diverged or (self.stop_after is not None and updates >= self.stop_after):
            self.at_end()
            raise Stopped
