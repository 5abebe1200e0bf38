"""`Passing`: what is taken in of the updates that are passed over."""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from workbench.instruments.batches import Draws
from workbench.instruments.norms import gradients_of, total_norm
from workbench.instruments.rows import Value, learning_rates, summed
from workbench.instruments.taps import TAPS

_BLOCK = 64
"""Updates after which what was kept of them is handed on (rule of thumb)."""
_MOST = 64
"""Backward passes that one update may have to be taken (rule of thumb)."""
_CALLS = 512
"""Calls that are kept at most (rule of thumb)."""
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

    def __init__(self, observer: Any, optimizer: Optimizer, updates: int) -> None:
        self._observer, self._optimizer = observer, optimizer
        self._draws, self._modes = observer.facts.loaders.last is not None, observer.facts.modes
        self.left = updates
        self._losses: list[Value] = []  # of the update in progress
        self._rows: list[tuple[list[Value], Any, float, float, Tensor | None]] = []
        self._probes: list[float] = []  # norms of one small gradient
        self._backwards = 0  # that were not told of
        self._calls: list[Any] = []  # where batches are drawn: those, "backward" and "step"
        self._batch: Any = None  # the last one
        self._group = optimizer.param_groups[0] if len(optimizer.param_groups) == 1 else {"lr": None}
        self._param = observer.samples.probe()
        grad = None if self._param is None else self._param.grad
        self._few = grad is not None and grad.ndim == 1 and len(grad) <= _FEW
        self._version = None if grad is None or observer.needs_exit_norm else grad._version
        self._norm_at = updates - observer.attention.norms_every  # updates that are left when the next one is taken
        self._level, self._slope = observer.attention.losses, observer.attention.probes
        self.held: Any = None

    @property
    def begun(self) -> bool:
        """Tell whether a backward pass of the update in progress was taken."""
        return bool(self._losses)

    def end(self, *, plain: bool = True) -> None:
        """Have the observer go on with the update in progress; where that is not `plain`, it takes all others, too."""
        self.settle()
        self._observer.take_back(self._losses, self.held, plain=plain)

    def forward(self, module: Any, *args: Any, **kwargs: Any) -> bool:
        """Take in a forward pass that is trained on, given the arguments of `forward`."""
        if id(module) in TAPS.wholes:
            if not torch.is_grad_enabled():
                return False
            self.held = args or kwargs
        return True

    def drew(self, loader: Any, waited: float, draws: Draws, batch: Any) -> bool:
        """Take in that a batch was drawn."""
        if not self._draws or len(self._calls) >= _CALLS:
            TAPS.end_passing()
            return False
        self._observer.waited += waited
        self._observer.waits = True
        self._calls.append((loader, draws, draws.current))
        self._batch = batch
        return True

    def replay(self) -> None:
        """Tell of the batches that were drawn, and of what was done with them, in their order."""
        calls, self._calls = self._calls, []
        facts = self._observer.facts
        for call in calls:
            if call == "backward":
                facts.passed_backward()
            elif call == "step":
                facts.batches.stepped(whole=False)
            else:
                loader, draws, examples = call
                facts.drew(loader, draws, self._batch, examples)

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
                if type(number) is not float or not number <= self._level.most:  # a NaN is not, either
                    self.end(plain=type(number) is float)
                    return False
                self._losses.append(number)
            if self._draws:
                self._calls.append("backward")
            elif self._modes.passes:
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
        """Take in an update, given the arguments of the hook before its step: nothing is wanted of what comes after."""
        try:
            if optimizer is not self._optimizer or len(args) > 1 or kwargs:
                self.end(plain=optimizer is self._optimizer)
                return False
            norm = None
            grad = None if self._param is None else self._param.grad
            if grad is not None:
                # torch costs more than so few numbers
                number = math.hypot(*grad.tolist()) if self._few else torch.linalg.vector_norm(grad).item()
                if not number <= self._slope.most:
                    self.end()
                    return False
                self._probes.append(number)
                if self.left <= self._norm_at and grad._version == self._version and not self._observer.norms:
                    attention, began = self._observer.attention, time.thread_time()
                    norm = total_norm(gradients_of(optimizer))
                    self._norm_at = self.left - attention.paced_norms(time.thread_time() - began)
            self._add(norm)
            return True
        except Exception as error:
            TAPS.fails(error)
            return False

    def _add(self, norm: Tensor | None) -> None:
        observer, losses = self._observer, self._losses
        self._losses, self.held = [], None
        self.left -= 1
        if observer.norms or observer.logged:
            self.settle()
            observer.passed(self._optimizer, losses)
            return
        lr, waited = self._group.get("lr"), math.nan
        if type(lr) is not float:
            lr = learning_rates(self._optimizer.param_groups, "", observer.rows.columns)
        if self._draws:
            waited, observer.waited = observer.waited, 0.0
            self._calls.append("step")
        self._rows.append((losses, lr, time.perf_counter(), waited, norm))
        observer.updates += 1
        if len(self._rows) >= _BLOCK:
            self.settle()

    def step_ended(self) -> None:
        """Decide on the next update, after the last one that is passed over."""
        if self.left <= 0:
            began = time.thread_time()
            try:
                self.settle()
                self._observer.last = time.perf_counter()
                self._observer.decide(self._optimizer, self._observer.updates)
                self._observer.attention.around += time.thread_time() - began
            except Exception as error:
                TAPS.fails(error)

    def settle(self) -> None:
        """Hand on what was kept of the updates so far."""
        self.replay()
        observer, rows, self._rows = self._observer, self._rows, []
        attention = observer.attention
        unnoted = 0 if self._draws else len(rows)
        told = {"unnoted": unnoted, "backwards": self._backwards, "open_passes": len(self._losses)}
        attention.probes.take(self._probes)
        self._probes, self._backwards = [], 0
        if rows:
            losses, lrs, ends, waits, norms = map(list, zip(*rows, strict=True))
            seen = [loss for each in losses for loss in each if type(loss) is float]
            attention.losses.take(seen)
            attention.sees = attention.sees or bool(seen)
            columns = {"step_time_s": [now - last for last, now in zip([observer.last, *ends], ends, strict=False)]}
            columns["looked"] = [0.0 if norm is None else 1.0 for norm in norms]
            observer.last = ends[-1]
            if any(losses):
                columns["loss"] = [each[0] if len(each) == 1 else summed(each) if each else math.nan for each in losses]
            if any(columns["looked"]):
                columns["grad_norm"] = [math.nan if norm is None else norm for norm in norms]
            if self._draws:
                columns["data_wait_s"] = waits
            if set(map(type, lrs)) == {float}:
                columns["lr"] = lrs
            else:
                rates = [{"lr": lr} if type(lr) is float else lr for lr in lrs]
                names = dict.fromkeys(name for each in rates for name in each)
                columns |= {name: [each.get(name, math.nan) for each in rates] for name in names}
            observer.rows.extend(columns, len(rows))
        if attention.roused:
            self.left = 0
        observer.facts.passed(observer.updates, self._optimizer, **told)
