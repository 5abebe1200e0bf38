"""`Passing`: what is taken in of the updates that are passed over."""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from workbench.instruments.norms import gradients_of, total_norm
from workbench.instruments.rows import Value, learning_rates, summed
from workbench.instruments.taps import TAPS

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
    Each returns whether it took the call, and a fault of theirs is the observer's. Gradient norms are taken at the pace of `Attention`, while
    the version of one small gradient shows that nothing has changed it.

    Attributes:
        held: what the model was given.
    """

    __slots__ = (
        "_backwards", "_draws", "_few", "_group", "_highest", "_left", "_losses", "_modes", "_norm", "_norm_at", "_observer", "_optimizer", "_param", "_probes",
        "_rows", "_steepest", "_version", "held",
    )  # fmt: skip

    def __init__(self, observer: Any, optimizer: Optimizer, updates: int) -> None:
        self._observer, self._optimizer = observer, optimizer
        self._draws, self._modes = observer.facts.loaders.last is not None, observer.facts.modes
        self._left = updates  # to pass over
        self._losses: list[Value] = []  # of the update in progress
        self._rows: list[tuple[list[Value], Any, float, float | None, Tensor | None]] = []
        self._probes: list[float] = []  # norms of one small gradient
        self._backwards = 0  # that were not told of
        self._group = optimizer.param_groups[0] if len(optimizer.param_groups) == 1 else {"lr": None}
        self._param = observer.samples.probe()
        grad = None if self._param is None else self._param.grad
        self._few = grad is not None and grad.ndim == 1 and len(grad) <= _FEW
        self._version = None if grad is None or observer.needs_exit_norm else grad._version
        self._norm: Tensor | None = None
        self._norm_at = updates - observer.attention.norms_every  # updates that are left when the next one is taken
        self._limit()
        self.held: Any = None

    def _limit(self) -> None:
        attention = self._observer.attention
        self._highest, self._steepest = attention.losses.most, attention.probes.most

    def end(self, *, plain: bool = True) -> None:
        """Have the observer go on with the update in progress; where that is not `plain`, it takes all others, too."""
        self.settle()
        self._observer.take_back(self._losses, self.held, plain=plain)

    def backward(
        self, tensors: Any = None, _gradient: Any = None, retain_graph: Any = None, *_: Any, **__: Any
    ) -> bool:
        """Take in a backward pass, given the arguments of `torch.autograd.backward`."""
        loss = tensors
        try:
            if retain_graph or type(loss) is not Tensor or (loss.ndim and loss.numel() != 1):
                self.end(plain=False)
                return False
            if len(self._losses) >= _MOST:
                self.end()
                return False
            if not loss.is_cpu:
                self._losses.append(loss.detach())
            else:
                number = loss.item()
                if type(number) is not float or not number <= self._highest:  # a NaN is not, either
                    self.end(plain=type(number) is float)
                    return False
                self._losses.append(number)
            if self._draws or self._modes.passes:
                self._observer.facts.passed_backward()
            else:
                self._backwards += 1
            return True
        except Exception as error:
            TAPS.fails(error)
            return False

    def zeroed(self, *_: Any, **__: Any) -> bool:
        """Take in that gradients are zeroed, unless a loss waits: its update may have been skipped."""
        if self._losses:
            TAPS.end_passing()
            return False
        return True

    def step_begins(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Take in that a step begins, given the arguments of its hook."""
        try:
            if optimizer is not self._optimizer or len(args) > 1 or kwargs:
                self.end(plain=optimizer is self._optimizer)
                return False
            grad = None if self._param is None else self._param.grad
            if grad is not None:
                # torch costs more than so few numbers
                number = math.hypot(*grad.tolist()) if self._few else torch.linalg.vector_norm(grad).item()
                if not number <= self._steepest:
                    self.end()
                    return False
                self._probes.append(number)
                if self._left <= self._norm_at and grad._version == self._version and not self._observer.norms:
                    self._take_norm()
            return True
        except Exception as error:
            TAPS.fails(error)
            return False

    def _take_norm(self) -> None:
        attention, began = self._observer.attention, time.perf_counter()
        self._norm = total_norm(gradients_of(self._optimizer))
        self._norm_at = self._left - attention.paced_norms(time.perf_counter() - began)

    def step_ends(self) -> bool:
        """Take in that the step has ended."""
        try:
            observer = self._observer
            if observer.norms or observer.logged:
                self.settle()
                observer.passed(self._optimizer, self._losses)
            else:
                lr, waited = self._group.get("lr"), None
                if type(lr) is not float:
                    lr = learning_rates(self._optimizer.param_groups, "", observer.rows.names)
                if self._draws:
                    waited, observer.waited = observer.waited, 0.0
                    observer.facts.batches.stepped(whole=False)
                self._rows.append((self._losses, lr, time.perf_counter(), waited, self._norm))
                observer.updates += 1
            self._losses, self._norm, self.held = [], None, None
            self._left -= 1
            if self._left <= 0 or len(self._rows) >= _BLOCK:
                self.settle()
        except Exception as error:
            TAPS.fails(error)
        return True

    def settle(self) -> None:
        """Hand on what was kept of the updates so far."""
        observer, rows, self._rows = self._observer, self._rows, []
        attention = observer.attention
        seen = [loss for losses, *_ in rows for loss in losses if type(loss) is float]
        attention.losses.take(seen)
        attention.probes.take(self._probes)
        self._limit()
        attention.sees = attention.sees or bool(seen)
        unnoted = 0 if self._draws else len(rows)
        told = {"unnoted": unnoted, "backwards": self._backwards, "open_passes": len(self._losses)}
        self._probes, self._backwards = [], 0
        for losses, lr, now, waited, norm in rows:
            row: dict[str, Value] = {"looked": 0.0 if norm is None else 1.0, "step_time_s": now - observer.last}
            observer.last = now
            if losses:
                row["loss"] = losses[0] if len(losses) == 1 else summed(losses)
            if norm is not None:
                row["grad_norm"] = norm
            if waited is not None:
                row["data_wait_s"] = waited
            row.update({"lr": lr} if type(lr) is float else lr)
            observer.rows.add(row)
        if self._left <= 0 or attention.roused:
            observer.decide(self._optimizer, observer.updates, 0.0)
        observer.facts.passed(observer.updates, self._optimizer, **told)
