"""`UpdateWatch`: parameters, gradients, clipping and times, update by update."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from workbench.topics.hosts.audit.hashing import hash_of, is_sharded
from workbench.topics.hosts.audit.models import ModelWatch
from workbench.topics.hosts.audit.patches import Patches
from workbench.topics.hosts.audit.state import State, looked_at

__all__ = ["StopAfterSteps", "UpdateWatch"]

_CLIPPING = (("clip_grad_norm_", "max_norm"), ("clip_grads_with_norm_", "max_norm"), ("clip_grad_value_", "clip_value"))
MAX_ROWS = 20_000
"""Of steps and of clippings that are written down (rule of thumb: a rehearsal is far shorter)."""


class StopAfterSteps(SystemExit):
    """The rehearsal has seen as many updates as it was asked for."""


class UpdateWatch:
    """What each update starts from (`hosts.init_seed`, `hosts.not_wrapped`), clips (`hosts.clip`) and takes (`hosts.straggler`).

    Args:
        state: of this rank.
        patches: what is put back when the watch ends.
        models: tells when the last gradient of a backward pass came.
        stop_after: updates after which this rank ends; None is never.
    """

    def __init__(self, state: State, patches: Patches, models: ModelWatch, stop_after: int | None = None) -> None:
        self._state, self._models, self._stop_after = state, models, stop_after
        self._updates: list[int] = []
        self._inside: Any = None  # the optimizer that makes an update; those that it is made of are none of their own
        self._counts: int | None = None  # the optimizer by whose updates steps are counted
        self._once: set[int] = set()  # those that have made one since then
        self._parameters: list[dict[str, Any]] = []
        self._gradients: list[dict[str, Any]] = []
        self._before_clip: dict[int, str] = {}
        self._after_backward: dict[int, str] = {}
        self._at_joining: dict[int, str] = {}
        self._clips: list[dict[str, Any]] = []
        self._times: dict[str, list[float]] = {"step_s": [], "busy_s": []}
        self._last: float | None = None
        patches.wrap(Optimizer, "__init__", self._on_new)
        patches.handle(register_optimizer_step_pre_hook(self._before))
        patches.handle(register_optimizer_step_post_hook(self._after))
        patches.wrap(torch.autograd, "backward", self._on_backward)
        state.on_joining.append(self._on_joining)
        for name, limit in _CLIPPING:
            for module in (torch.nn.utils, torch.nn.utils.clip_grad):
                patches.wrap(module, name, functools.partial(self._on_clip, name, limit))

    def facts(self) -> dict[str, Any]:
        """Return what was seen, as JSON values."""
        clips = [{**clip, "norm": None if clip["norm"] is None else float(clip["norm"])} for clip in self._clips]
        return {
            "steps": self._state.step,
            "parameters": self._parameters,
            "gradients": self._gradients,
            "clips": clips,
            "times": self._times,
        }

    def _on_new(self, original: Any) -> Callable[..., Any]:
        def init(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            self._number(optimizer)

        return init

    def _number(self, optimizer: Any) -> int:
        for number, known in enumerate(self._state.optimizers):
            if known is optimizer:
                return number
        self._state.optimizers.append(optimizer)
        self._updates.append(0)
        return len(self._updates) - 1

    def _before(self, optimizer: Any, *_: Any) -> None:
        if self._inside is not None and self._inside is not optimizer:
            return
        self._inside = optimizer
        number = self._number(optimizer)
        step = self._updates[number]
        self._state.tick("update")
        if looked_at(step):
            parameters = _parameters(optimizer)
            used = hash_of(p.grad for p in parameters)
            self.begin(
                number, step, parameters, used=used, before_clip=self._before_clip.pop(number, used),
                after_backward=self._after_backward.pop(number, None), at_joining=self._at_joining.pop(number, None),
            )  # fmt: skip

    def _after(self, optimizer: Any, *_: Any) -> None:
        if self._inside is not optimizer:
            return
        self._inside = None
        number = self._number(optimizer)
        self._updates[number] += 1
        if self._is_counted(number):
            self.end()

    def _is_counted(self, number: int) -> bool:
        """Tell whether this update is a step: one optimizer counts, until another has made two updates and it none."""
        if self._counts is None or number in self._once:
            self._counts = number
        if self._counts == number:
            self._once.clear()
            return True
        self._once.add(number)
        return False

    def begin(
        self, number: int, step: int, parameters: Sequence[Any], *, used: str, before_clip: str,
        after_backward: str | None = None, at_joining: str | None = None,
    ) -> None:  # fmt: skip
        """Write down what an update starts from.

        Args:
            number: of the optimizer.
            step: of the update.
            parameters: before it.
            used: hash of the gradient that it uses.
            before_clip: hash of the gradient, or of its norm, before it was clipped.
            after_backward: hash of the gradient when its backward pass was over; None where that was not to be seen.
            at_joining: the same before the script's own collectives; None where there were none.
        """
        row = {"optimizer": number, "step": step}
        sharded = any(is_sharded(p) for p in parameters)
        self._parameters.append(row | {"hash": hash_of(parameters), "sharded": sharded})
        self._gradients.append(row | {
            "after_backward": after_backward, "at_joining": at_joining, "before_clip": before_clip, "at_step": used,
        })  # fmt: skip

    def clipped(self, by: str, limit: Any, norm: torch.Tensor | None, *, number: int | None = 0) -> None:
        """Write down that gradients were clipped."""
        if len(self._clips) < MAX_ROWS:
            step = self._state.step if number is None else self._updates[number] if self._updates else self._state.step
            self._clips.append({"step": step, "optimizer": number, "by": by, "limit": _plain(limit), "norm": norm})

    def end(self) -> None:
        """Write down that an update has been made."""
        now, state = time.perf_counter(), self._state
        if self._last is not None and len(self._times["step_s"]) < MAX_ROWS:
            self._times["step_s"].append(round(now - self._last, 7))
            self._times["busy_s"].append(round(max(0.0, now - self._last - state.waited_s), 7))
        self._last, state.waited_s = now, 0.0
        state.step += 1
        state.tick("after the update")
        if self._stop_after is not None and state.step >= self._stop_after:
            raise StopAfterSteps(0)

    def _on_backward(self, original: Any) -> Callable[..., Any]:
        def backward(*args: Any, **kwargs: Any) -> Any:
            self._state.tick("backward, where gradients are averaged")
            before = time.perf_counter()
            with self._models.backward():
                found = original(*args, **kwargs)
            if self._models.last_gradient > before:  # the rest is waiting for the other ranks' gradients
                self._state.waited_s += time.perf_counter() - self._models.last_gradient
            self._at_joining.clear()
            self._after_backward = self._hashes()
            self._state.tick("after backward")
            return found

        return backward

    def _on_joining(self) -> None:
        if self._after_backward and not self._at_joining:
            self._at_joining = self._hashes()

    def _hashes(self) -> dict[int, str]:
        """Return hashes of the gradients that are looked at, by optimizer."""
        return {
            number: hash_of(p.grad for p in _parameters(optimizer))
            for number, optimizer in enumerate(self._state.optimizers) if looked_at(self._updates[number])
        }  # fmt: skip

    def _on_clip(self, name: str, limit: str, original: Any) -> Callable[..., Any]:
        def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(parameters, torch.Tensor):
                parameters = [parameters]
            parameters = list(parameters)
            number = self._owner(parameters)
            step = self._state.step if number is None else self._updates[number]
            if number is not None and looked_at(step):
                self._before_clip[number] = hash_of(p.grad for p in _parameters(self._state.optimizers[number]))
            found = original(parameters, *args, **kwargs)
            allowed = args[0] if args else kwargs.get(limit)
            self.clipped(name, allowed, found if isinstance(found, torch.Tensor) else None, number=number)
            return found

        return clip

    def _owner(self, parameters: list[Any]) -> int | None:
        """Return the optimizer whose gradients are clipped."""
        clipped = {id(p) for p in parameters}
        for number, optimizer in enumerate(self._state.optimizers):
            if clipped & {id(p) for p in _parameters(optimizer)}:
                return number
        return None


def _parameters(optimizer: Any) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _plain(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
