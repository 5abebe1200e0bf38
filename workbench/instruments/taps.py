"""`Taps`: the calls of torch that a training loop consists of, told to whoever listens; the calls themselves stay as they are.

Functions and methods are replaced while somebody listens, and put back afterwards; all names but one are public. What `torch.compile` traces is not told.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer, lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import BatchSampler, DataLoader
from torch.utils.hooks import RemovableHandle

from workbench.instruments import conversions
from workbench.instruments.batches import Draws, TimedIterator, noted
from workbench.instruments.caller import show_warning
from workbench.instruments.conversions import compares, dispatched, is_costly
from workbench.instruments.workers import asked_workers


class Listener(Protocol):
    """What is told of a loop, in the order in which it happens."""

    def backward_begins(self, losses: Any, *, retained: bool = False) -> None: ...  # noqa: D102
    def backward_ends(self) -> None: ...  # noqa: D102
    def step_enters(self, optimizer: Optimizer) -> None: ...  # noqa: D102  # with a closure that is about to make the gradients
    def step_begins(self, optimizer: Optimizer) -> None: ...  # noqa: D102
    def step_ends(self, optimizer: Optimizer) -> None: ...  # noqa: D102
    def zeroed(self, owner: Optimizer | nn.Module) -> None: ...  # noqa: D102
    def loads(self, module: nn.Module, state: Any) -> None: ...  # noqa: D102
    def clipped(self, kind: str, limit: float, norm: Tensor | None, first: int) -> None: ...  # noqa: D102
    def scaled(self, loss: Any, result: Any, scale: Callable[[Tensor], Tensor]) -> None: ...  # noqa: D102
    def unscaled(self, optimizer: Optimizer) -> None: ...  # noqa: D102
    def scheduled(self, scheduler: Any, metric: Any) -> None: ...  # noqa: D102
    def loader_begins(self, loader: Any, states: Tensor | None) -> None: ...  # noqa: D102
    def drew(self, loader: Any, waited: float, draws: Draws, batch: Any) -> None: ...  # noqa: D102
    def entered(self, module: nn.Module, args: tuple[Any, ...]) -> None: ...  # noqa: D102
    def compared(self, name: str, inputs: Any, target: Any, loss: Any) -> None: ...  # noqa: D102
    def converted(self, tensor: Tensor, result: Tensor, seconds: float) -> None: ...  # noqa: D102


class Intervention(Protocol):
    """What is changed at the boundary of an optimizer, in this order."""

    max_grad_norm: float | None
    unclipped: bool

    def is_on(self) -> bool: ...  # noqa: D102  # of the training in progress
    def takes_over(self, optimizer: Optimizer) -> bool: ...  # noqa: D102  # where one that is new goes on for the first one

    def set_lr(self, optimizer: Optimizer, update: int) -> None:
        """Change the learning rates of an update that is about to be made."""

    def clip(self, gradients: Sequence[Tensor], scale: Tensor | None = None) -> Tensor | None:
        """Shorten the gradients, which are `scale` times the true ones, in place; return whether they were, None where nothing is clipped."""

    def reset_lr(self, optimizer: Optimizer) -> None:
        """Put the loop's own learning rates back."""

    def updated(self, updates: int) -> None:
        """Take in that so many updates were made; may end the program."""


class Taps:
    """Replaces the calls once, however many listen, and puts them back when the last one has left."""

    def __init__(self) -> None:
        self.listeners: list[Listener] = []
        self.passing: Any = None  # takes the calls that every update makes, in the place of its listener
        self._taken: Any = None  # what `passing` was, in a step that it took
        self.wholes: dict[int, Callable[..., None]] = {}  # who is told of the forward passes of a model, by its id
        self._kinds = set[type]()  # of these models
        self._undo: list[Callable[[], None]] = []
        self._lock = threading.RLock()
        self._opening: tuple[Any, Draws | None] = (None, None)  # the sampler of the iteration that begins just now
        self._due: dict[int, weakref.ref[Optimizer]] = {}  # by identity, in a step whose closure has not returned yet
        self.on_fault: dict[int, Callable[[Exception], None]] = {}  # by the id of the listener
        self.hooked = False  # whether something of the program's own was to run in a backward pass, while loss functions are told of
        self._criteria: set[object] = set()  # one for each who asked for the loss functions
        self._unwrap: list[Callable[[], None]] = []

    def add(self, listener: Listener, on_fault: Callable[[Exception], None] | None = None) -> None:
        """Tell `listener` from now on; `on_fault` takes a fault of its."""
        with self._lock:
            self.end_passing()  # there is more than one from now on
            if on_fault is not None:
                self.on_fault[id(listener)] = on_fault
            if not self.listeners:
                self._install()
            self.listeners = [*self.listeners, listener]

    def remove(self, listener: Listener) -> None:
        """Tell `listener` no more; nothing happens where it is not told anyway."""
        with self._lock:
            left = [each for each in self.listeners if each is not listener]
            if self.listeners and not left:
                for known in (self._criteria, self.wholes, self._kinds):
                    known.clear()
                self.hooked = False
                for undo in (self._unwrap, self._undo):
                    while undo:
                        undo.pop()()
            if len(left) < len(self.listeners) and self.passing is not None:
                passing, self.passing = self.passing, None
                with contextlib.suppress(Exception):  # of ours: what was kept is lost
                    passing.end()
            self.listeners = left
            self.on_fault.pop(id(listener), None)

    def tell_fault(self, listener: Listener, error: Exception) -> None:
        """Hand a fault of `listener` to whoever asked for it."""
        if (take := self.on_fault.get(id(listener))) is not None:
            take(error)

    def _tell(self, what: str, *args: Any, **named: Any) -> None:
        for listener in self.listeners:
            try:
                getattr(listener, what)(*args, **named)
            except Exception as error:
                self.fails(error, listener)

    def end_passing(self) -> None:
        """Have every call told from here on, until the listener passes updates over again."""
        try:
            if (passing := self.passing) is not None:  # another thread may end it meanwhile
                passing.end()
        except Exception as error:
            self.fails(error)

    def fails(self, error: Exception, listener: Listener | None = None) -> None:
        """Take in a fault of a listener, else of the one that passes updates over."""
        for each in self.listeners[:1] if listener is None else [listener]:
            self.tell_fault(each, error)
            self.remove(each)

    def _install(self) -> None:
        self._replace(torch.autograd, "backward", self._backward, passes="backward")
        self._undo.append(register_optimizer_step_pre_hook(self._step_begins).remove)
        self._undo.append(register_optimizer_step_post_hook(self._step_ends).remove)
        for owner in (Optimizer, nn.Module):
            self._replace(owner, "zero_grad", functools.partial(self._after, "zeroed"), passes="zeroed")
        self._replace(nn.Module, "load_state_dict", self._load)
        for kind in ("clip_grad_norm_", "clip_grad_value_"):
            tapped = functools.partial(self._clip, kind)
            for module in (nn.utils, sys.modules["torch.nn.utils.clip_grad"]):
                self._replace(module, kind, tapped)
        self._replace(torch.amp.GradScaler, "scale", self._scale)
        self._replace(torch.amp.GradScaler, "unscale_", self._unscale)
        for name in dir(lr_scheduler):
            found = getattr(lr_scheduler, name)
            if isinstance(found, type) and issubclass(found, lr_scheduler.LRScheduler) and "step" in vars(found):
                self._replace(found, "step", functools.partial(self._after, "scheduled"))
        for name in conversions.DROPOUTS:
            self._replace(F, name, self._drop)
        self._replace(nn.Module, "eval", functools.partial(self._call, "eval"))
        self._replace(warnings, "showwarning", show_warning)
        self._replace(DataLoader, "__iter__", self._iterate)
        self._replace(BatchSampler, "__iter__", self._sample)

    def watch_modules(self) -> RemovableHandle:
        """Tell of the forward pass of every module until the handle is removed, which costs a little for each."""
        return register_module_forward_pre_hook(
            lambda module, args: None if is_compiling() else self._tell("entered", module, args)
        )

    def watch_forward(self, model: nn.Module, told: Callable[..., None]) -> bool:
        """Tell `told` of the forward passes of a model by its class's function, and whether that will do."""
        kind = type(model)
        if not hasattr(kind.forward, "__code__") or "forward" in vars(model):  # no function of Python, or not its own
            return False
        if kind not in self._kinds:
            self._kinds.add(kind)
            self._replace(kind, "forward", self._forward, passes="forward")
        return self.wholes.setdefault(id(model), told) is told

    def watch_criteria(self) -> Callable[[], None]:
        """Tell of loss functions and conversions until what is returned is called, by all who asked for it."""
        asked = object()
        with self._lock:
            if not self._criteria:
                begun = len(self._undo)
                for name in conversions.CRITERIA:
                    self._replace(F, name, functools.partial(self._compare, name))
                for name, gives in conversions.PAIRED.items():
                    for whose in (Tensor, torch) if hasattr(torch, name) else (Tensor,):
                        self._replace(whose, name, functools.partial(self._pair, gives))
                for name in conversions.METHODS:
                    self._replace(Tensor, name, self._convert)
                for owner, name in conversions.SQUASHED:
                    self._replace(owner, name, conversions.placed)
                for module, name in conversions.CALLS:
                    self._replace(sys.modules[module], name, functools.partial(self._call, name))
                for owner, name in conversions.HOOKS:
                    if hasattr(owner, name):  # the last, which those of a `grad_fn` call, is not public
                        self._replace(owner, name, self._hook)
                self._unwrap, self._undo = self._undo[begun:], self._undo[:begun]
            self._criteria.add(asked)

        def remove() -> None:
            with self._lock:
                self._criteria.discard(asked)
                while self._unwrap and not self._criteria:
                    self._unwrap.pop()()
                self.hooked = self.hooked and bool(self._criteria)

        return remove

    def _step_begins(self, optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
        """Tell that a step begins; where a closure makes the gradients, as with Lightning and LBFGS, as soon as it has made them."""
        self._taken = None
        if (passing := self.passing) is not None and passing.step_begins(optimizer, args, kwargs):
            self._taken = passing
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if is_compiling() or not callable(closure):
            self._tell("step_begins", optimizer)
            return None
        self.end_passing()
        self._due[id(optimizer)] = weakref.ref(optimizer)
        self._tell("step_enters", optimizer)

        @functools.wraps(closure, updated=())
        def told(*inner: Any, **named: Any) -> Any:
            loss = closure(*inner, **named)
            self._settle_due(optimizer)
            return loss

        return ((args[0], told, *args[2:]), kwargs) if len(args) > 1 else (args, kwargs | {"closure": told})

    def _step_ends(self, optimizer: Optimizer, *_: Any) -> None:
        if self._taken is not None:
            self._taken.step_ended()
            return
        self._settle_due(optimizer)
        self._tell("step_ends", optimizer)

    def _settle_due(self, optimizer: Optimizer) -> None:
        if (due := self._due.pop(id(optimizer), None)) is not None and due() is optimizer:
            self._tell("step_begins", optimizer)

    def _replace(self, owner: Any, name: str, tapped: Callable[..., Any], *, passes: str = "") -> None:
        own = name in vars(owner)  # or its base's, as of the methods of tensors
        original = vars(owner)[name] if own and isinstance(owner, type) else getattr(owner, name)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return original(*args, **kwargs)
            if passes and (passing := self.passing) is not None and getattr(passing, passes)(*args, **kwargs):
                return original(*args, **kwargs)
            return tapped(original, *args, **kwargs)

        setattr(owner, name, call)

        def undo() -> None:
            if vars(owner).get(name) is call:  # else somebody else has replaced it since: theirs stays
                setattr(owner, name, original) if own else delattr(owner, name)

        self._undo.append(undo)

    def _backward(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        retained = bool(args[2] if len(args) > 2 else kwargs.get("retain_graph"))
        given = args[0] if args else kwargs.get("tensors")
        higher = bool(args[3] if len(args) > 3 else kwargs.get("create_graph"))
        self._tell("backward_begins", given, retained=retained and not higher)
        done = original(*args, **kwargs)
        self._tell("backward_ends")
        return done

    def _after(self, what: str, original: Any, owner: Any, *args: Any, **kwargs: Any) -> Any:
        done = original(owner, *args, **kwargs)
        metric = [args[0] if args else kwargs.get("metrics")] if what == "scheduled" else []
        self._tell(what, owner, *metric)
        return done

    def _forward(self, original: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        if (told := self.wholes.get(id(module))) is not None:
            told(module, args, kwargs)
        return original(module, *args, **kwargs)

    def _load(self, original: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        self.end_passing()
        self._tell("loads", module, args[0] if args else kwargs.get("state_dict"))
        return original(module, *args, **kwargs)

    def _clip(self, kind: str, original: Any, *args: Any, **kwargs: Any) -> Any:
        parameters = args[0] if args else kwargs.pop("parameters", ())
        given = parameters if isinstance(parameters, Tensor) else list(parameters)  # a generator is used up by looking
        name = "max_norm" if kind == "clip_grad_norm_" else "clip_value"
        changes = [change for each in self.listeners if (change := getattr(each, "intervention", None)) is not None]
        if any(change.unclipped and change.is_on() for change in changes):  # the norm is returned all the same
            args = (*args[:1], math.inf, *args[2:]) if len(args) > 1 else args
            kwargs |= {name: math.inf} if name in kwargs else {}
        norm = original(given, *args[1:], **kwargs)
        order = args[2] if len(args) > 2 else kwargs.get("norm_type", 2.0)
        with contextlib.suppress(Exception):  # of ours: torch takes what it is given, and the call is done
            limit = float(args[1] if len(args) > 1 else kwargs[name])
            euclidean = kind == "clip_grad_norm_" and float(order) == 2.0
            first = given if isinstance(given, Tensor) else next((p for p in given if p.grad is not None), None)
            self._tell("clipped", kind, limit, norm if euclidean else None, id(first))
        return norm

    def _scale(self, original: Any, scaler: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(scaler, *args, **kwargs)
        if scaler.is_enabled():
            given = args[0] if args else kwargs.get("outputs")
            self._tell("scaled", given, result, functools.partial(original, scaler))
        return result

    def _unscale(self, original: Any, scaler: Any, *args: Any, **kwargs: Any) -> None:
        original(scaler, *args, **kwargs)
        if scaler.is_enabled():
            self._tell("unscaled", args[0] if args else kwargs.get("optimizer"))

    def _iterate(self, original: Any, loader: Any) -> Any:
        draws = Draws()
        self._opening = (loader.batch_sampler if getattr(loader, "in_order", True) or not loader.num_workers else None, draws)  # fmt: skip
        try:
            with asked_workers(loader) as states:
                self._tell("loader_begins", loader, states)
                batches = original(loader)
        finally:
            self._opening = (None, None)
        return TimedIterator(batches, loader, draws, self)

    def drew(self, loader: Any, waited: float, draws: Draws, batch: Any) -> None:
        """Take in that an iterator over a loader gave a batch."""
        if (passing := self.passing) is None or not passing.drew(loader, waited, draws, batch):
            self._tell("drew", loader, waited, draws, batch)

    def exhausted(self) -> None:
        """Take in that an iterator over a loader is about to end."""
        try:
            if (passing := self.passing) is not None:
                passing.replay()
        except Exception as error:
            self.fails(error)

    def _sample(self, original: Any, sampler: BatchSampler) -> Any:
        """Note what the sampler of an iteration that begins will choose; one that changes what its base chooses does not tell."""
        batches, (wanted, draws) = original(sampler), self._opening
        plain = type(sampler).__iter__ is BatchSampler.__iter__
        return noted(batches, draws) if plain and draws is not None and sampler is wanted else batches

    def _convert(self, original: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        result = dispatched(original, tensor, *args, **kwargs)
        seconds = time.perf_counter() - began
        with contextlib.suppress(Exception):  # of ours, as with a parameter that has no shape yet
            if is_costly(tensor, result):
                self._tell("converted", tensor, result, seconds)
        return result

    def _hook(self, original: Any, owner: Any, *args: Any, **kwargs: Any) -> Any:
        self.hooked = self.hooked or not isinstance(owner, Tensor) or not owner.is_leaf
        return original(owner, *args, **kwargs)

    def _drop(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        if self.passing is None or (self.passing.held is None and not torch.is_grad_enabled()):
            p = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
            if isinstance(p, (int, float)) and p > 0 and (args[2] if len(args) > 2 else kwargs.get("training", True)):
                self._tell("compared", "dropout", None, p, None)
        return dispatched(original, *args, **kwargs)

    def _pair(self, gives: str, original: Any, *args: Any, **kwargs: Any) -> Any:
        result = dispatched(original, *args, **kwargs)
        if self.passing is None and len(args) == 2 and compares(gives, *args):
            self._tell("compared", gives, *args, result)
        return result

    def _call(self, name: str, original: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        self._tell("compared", name, None, result, None)
        return result

    def _compare(self, name: str, original: Any, *args: Any, **kwargs: Any) -> Any:
        loss = dispatched(original, *args, **kwargs)
        if self.passing is None or not torch.is_grad_enabled():
            target = args[1] if len(args) > 1 else kwargs.get("target")
            self._tell("compared", name, args[0] if args else kwargs.get("input"), target, loss)
        return loss


TAPS = Taps()
"""Those of this process."""
