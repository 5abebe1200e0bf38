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
from workbench.instruments.observer import LoopObserver
from workbench.instruments.taps import TAPS
from workbench.programs.trainings import Trainings

_BLOCK = 100
"""Updates that are handed on together."""
_PATIENCE = 1000
"""Updates at most that a first loss which has left the finite goes on, as many as it had at least: it may be a search for a learning rate that training comes after (rule of thumb)."""


class Stopped(SystemExit):
    """The program has made the updates that it was asked for."""

    def __init__(self) -> None:
        super().__init__(0)


@dataclass
class Change:
    """Learning rates times a factor and a linear warmup, constants of the rule replaced, other clipping of gradients, an end after so many updates.

    A factor of 1 without the rest changes nothing: the program runs as it does alone. Of several trainings one after the other, only the one that is wanted is changed.

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
        anew: called after each update of a training before the one that is wanted.
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
    anew: Callable[[], None] = lambda: None
    trainings: Trainings = field(default_factory=Trainings)
    optimizers: list[Optimizer] = field(default_factory=list)
    diverged: bool = False
    _learned: bool = False
    _began: float | None = None
    _diverged_at: int | None = None
    _kept: list[tuple[dict[str, Any], str, Any]] = field(default_factory=list)

    def is_on(self) -> bool:
        """Tell whether the update in progress is one that is changed."""
        return self.trainings.is_on

    def is_none(self) -> bool:
        """Tell whether the program trains as it does alone, to whatever end."""
        return self.factor == 1.0 and not (self.constants or self.warmup_steps or self.unclipped or self.max_grad_norm)

    def set_lr(self, optimizer: Optimizer, update: int) -> None:
        """Change the learning rates and constants of an update that is about to be made."""
        self.trainings.begins(optimizer)
        self._end_if(self.trainings.is_over)
        if not self.is_on():
            return
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
        limit = self.max_grad_norm if self.is_on() else None
        return None if limit is None else clip_to(gradients, limit, scale)

    def takes_over(self, optimizer: Optimizer) -> bool:
        """Tell whether an optimizer that is new goes on for the first one; may end the program."""
        self.trainings.begins(optimizer)
        self._end_if(self.trainings.is_over)
        return self.trainings.takes_over()

    def reset_lr(self, optimizer: Optimizer) -> None:
        """Put the program's own values back, as its schedulers go on from them."""
        for group, name, value in self._kept:
            if isinstance(value, Tensor):
                group[name].copy_(value)
            else:
                group[name] = value
        self._kept.clear()
        self.trainings.ended(optimizer)
        if not self.is_on():
            self.anew()
        elif (
            self.trainings.wanted is None and len(self.trainings.found) > 1
        ):  # updates of the first optimizer are counted by `updated`
            self._end_if(self._is_due(self.trainings.found[-1].updates))

    def saw(self, losses: Sequence[float]) -> None:
        """Take in the losses of updates in a row: a training that was finite and ends in non-finite ones has diverged."""
        self._learned = self._learned or any(map(math.isfinite, losses))
        self.diverged = self._learned and len(losses) > 2 and not any(map(math.isfinite, losses[-3:]))

    def updated(self, updates: int) -> None:
        """End the program where it has made its updates, or where its loss has been non-finite."""
        self.at_update(updates)
        if not self.is_on():
            return
        self._diverged_at = (self._diverged_at or updates) if self.diverged else None
        last = (self._diverged_at or 0) + (
            min(self._diverged_at or 0, _PATIENCE) if self.trainings.wanted is None else 0
        )
        self._end_if(self._is_due(updates) or (self.diverged and updates >= last))

    def _is_due(self, updates: int) -> bool:
        """Tell whether a training has made its updates, or its time is up."""
        if self.stop_s is not None:
            self._began = self._began or time.perf_counter()
            if self.stop_after is None and time.perf_counter() - self._began > self.stop_s:
                self.stop_after = updates
        return self.stop_after is not None and updates >= self.stop_after

    def _end_if(self, due: bool) -> None:
        if due:
            self.at_end()
            raise Stopped


class Observing:
    """Observes a program under a change: from its first update, or anew from that of the training that counts."""

    _change: Change
    _observer: LoopObserver
    _take: Callable[[Mapping[str, list[float]]], None]
    _on_fault: Callable[[Exception], None]

    def _observe(self) -> None:
        """Begin to observe, and forget what was seen so far."""
        before, self._observer = self._observer, self._fresh()
        TAPS.add(self._observer, self._on_fault)
        TAPS.remove(before)

    def _fresh(self) -> LoopObserver:
        observer = LoopObserver(self._take, intervention=self._change)
        observer.rows.block, observer.facts.judged = _BLOCK, self._change.is_none()
        return observer
