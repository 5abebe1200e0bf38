"""`Passing`: what is taken in of the updates that are passed over."""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from workbench.instruments.rows import Value, kept, learning_rates, summed

_BLOCK = 16
"""Updates after which what was kept of them is handed on (rule of thumb)."""
_MOST = 64
"""Backward passes that one update may have to be taken (rule of thumb)."""
_FEW = 64
"""Numbers whose norm is faster taken by Python (measured on a CPU in a loop: 10 of them in 3 us against 8)."""


class Passing:
    """Takes the calls of the plain updates that an observer passes over, and ends where one of them stands out, or is not plain.

    A plain update is made by the one optimizer that is observed, on losses that are run backward one by one and not scaled. These few
    functions are all that most updates of a long training cost: they keep a few numbers, and what follows from those is done a block at a time.

    Attributes:
        held: what the model was given.
    """

    __slots__ = ("_backwards", "_group", "_highest", "_left", "_losses", "_observer", "_optimizer", "_param", "_probes", "_rows", "_seen", "_steepest", "_unnoted", "held")  # fmt: skip

    def __init__(self, observer: Any, optimizer: Optimizer, updates: int) -> None:
        self._observer, self._optimizer = observer, optimizer
        self._left = updates  # to pass over
        self._losses: list[Value] = []  # of the update in progress
        self._rows: list[tuple[list[Value], Any, float, float | None]] = []
        self._seen: list[float] = []  # losses, and norms of one small gradient
        self._probes: list[float] = []
        self._backwards = self._unnoted = 0  # passes, and updates, that were not told of
        self._group = optimizer.param_groups[0] if len(optimizer.param_groups) == 1 else None
        self._param = observer.samples.probe()
        self._limit()
        self.held: Any = None

    def _limit(self) -> None:
        attention = self._observer.attention
        self._highest, self._steepest = attention.losses.most, attention.probes.most

    def end(self, *, plain: bool = True) -> None:
        """Have the observer go on with the update in progress; where that is not `plain`, it takes all others, too."""
        self.settle()
        self._observer.take_back(self._losses, self.held, plain=plain)

    def backward(self, loss: Any, retained: bool) -> bool:  # a keyword costs more
        """Take in a backward pass, or return False."""
        if retained or type(loss) is not Tensor or loss.numel() != 1 or loss.is_complex():
            self.end(plain=False)
            return False
        if len(self._losses) >= _MOST:
            self.end()
            return False
        if loss.is_cpu:
            number = loss.item()
            if not number <= self._highest:  # a NaN is not, either
                self.end()
                return False
            self._seen.append(number)
            self._losses.append(number)
        else:
            self._losses.append(loss.detach())
        facts = self._observer.facts
        if facts.loaders.last is not None or facts.modes.passes:
            facts.passed_backward()
        else:
            self._backwards += 1
        return True

    def zeroed(self) -> bool:
        """Take in that gradients are zeroed, or return False where a loss waits: its update may have been skipped."""
        if self._losses:
            self.end()
            return False
        return True

    def step_begins(self, optimizer: Optimizer) -> bool:
        """Take in that a step begins, or return False."""
        if optimizer is not self._optimizer:
            self.end(plain=False)
            return False
        grad = None if self._param is None else self._param.grad
        if grad is not None:
            few = grad.numel() <= _FEW  # torch costs more than so few numbers
            number = math.hypot(*grad.flatten().tolist()) if few else torch.linalg.vector_norm(grad).item()
            if not number <= self._steepest:
                self.end()
                return False
            self._probes.append(number)
        return True

    def step_ends(self) -> None:
        """Take in that the step has ended."""
        observer, group, now = self._observer, self._group, time.perf_counter()
        if observer.norms or observer.logged:
            self.settle()
            observer.passed(self._optimizer, self._losses)
        else:
            lr = learning_rates(self._optimizer.param_groups, "", observer.rows.names) if group is None else kept(group.get("lr"))  # fmt: skip
            self._rows.append((self._losses, lr, now - observer.last, observer.waited if observer.waits else None))
            observer.last, observer.waited = now, 0.0
            observer.updates += 1
            if observer.facts.loaders.last is None:
                self._unnoted += 1
            else:
                observer.facts.batches.stepped(whole=False)
        self._losses, self.held = [], None
        self._left -= 1
        if self._left <= 0 or len(self._rows) >= _BLOCK:
            self.settle()

    def settle(self) -> None:
        """Hand on what was kept of the updates so far."""
        observer, rows, self._rows = self._observer, self._rows, []
        attention = observer.attention
        attention.losses.take(self._seen)
        attention.probes.take(self._probes)
        self._limit()
        attention.sees = attention.sees or bool(self._seen)
        told = {"unnoted": self._unnoted, "backwards": self._backwards, "open_passes": len(self._losses)}
        self._seen, self._probes, self._backwards, self._unnoted = [], [], 0, 0
        for losses, lr, seconds, waited in rows:
            row: dict[str, Value] = {"looked": 0.0, "step_time_s": seconds}
            if losses:
                row["loss"] = losses[0] if len(losses) == 1 else summed(losses)
            if waited is not None:
                row["data_wait_s"] = waited
            row.update({"lr": lr} if isinstance(lr, (float, Tensor)) else lr)
            observer.rows.add(row)
        if self._left <= 0 or attention.roused:
            observer.decide(self._optimizer, observer.updates, 0.0)
        observer.facts.passed(observer.updates, self._optimizer, **told)
