"""`ModelWatch`: which models are wrapped, who is called past its wrapper, and what evaluations make of the same examples."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from workbench.topics.hosts.audit.hashing import hash_of
from workbench.topics.hosts.audit.patches import Patches
from workbench.topics.hosts.audit.state import State

__all__ = ["ModelWatch"]

_SHARDING = ("FullyShardedDataParallel", "FSDPModule")


class ModelWatch:
    """Calls of models from outside, wrapped or raw (`hosts.not_wrapped`), and outputs of evaluations (`hosts.evaluation`).

    Args:
        state: of this rank.
        patches: what is put back when the watch ends.
    """

    def __init__(self, state: State, patches: Patches) -> None:
        self._state = state
        self._depth = 0
        self._backward = False
        self._inside: dict[int, int] = {}  # of wrapped models and of their parts: which model
        self._wrappers: dict[int, int] = {}  # of wrappers: which model
        self._kept: list[Any] = []  # ids stay unique while the objects live
        self._wrapped: list[dict[str, Any]] = []
        self._calls = {"wrapped": 0, "raw": 0, "other": 0}
        self._raw_steps: list[int] = []
        self._evaluations: list[dict[str, Any]] = []
        self.last_gradient = 0.0
        patches.wrap(DistributedDataParallel, "__init__", self._on_wrap)
        patches.wrap(DistributedDataParallel, "_sync_buffers", self._timed)
        patches.handle(register_module_forward_pre_hook(self._before))
        patches.handle(register_module_forward_hook(self._after, always_call=True))

    def facts(self) -> dict[str, Any]:
        """Return what was seen, as JSON values."""
        return {
            "wrappers": self._wrapped,
            "calls": dict(self._calls),
            "raw_steps": self._raw_steps,
            "evaluations": [_summed(found) for found in self._evaluations],
        }

    def _on_wrap(self, original: Any) -> Callable[..., Any]:
        def init(wrapper: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
            before = hash_of(module.parameters())
            original(wrapper, module, *args, **kwargs)
            number = self._model(module)
            self._wrappers[id(wrapper)] = number
            self._kept.append(wrapper)
            trained = [part for part in module.modules() if any(p.requires_grad for p in part.parameters())]
            self._inside |= {id(part): number for part in trained}
            for parameter in module.parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]
            self._wrapped.append({
                "kind": type(wrapper).__name__, "before": before, "after": hash_of(module.parameters()),
                "broadcast_buffers": bool(getattr(wrapper, "broadcast_buffers", False)),
            })  # fmt: skip

        return init

    @contextmanager
    def backward(self) -> Iterator[None]:
        """A backward pass, in which checkpointed parts are called once more: calls of the script are none of these."""
        was, self._backward = self._backward, True
        try:
            yield
        finally:
            self._backward = was

    def _on_gradient(self, _: Tensor) -> None:
        self.last_gradient = time.perf_counter()

    def _timed(self, original: Any) -> Callable[..., Any]:
        def sync(*args: Any, **kwargs: Any) -> Any:
            with self._state.waiting("the broadcast of buffers"):
                return original(*args, **kwargs)

        return sync

    def _model(self, module: nn.Module) -> int:
        for number, known in enumerate(self._state.models):
            if known is module:
                return number
        self._state.models.append(module)
        return len(self._state.models) - 1

    def _before(self, module: nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._depth += 1
        if self._depth > 1 or self._backward:
            return
        self._state.tick("forward")
        number = self._wrappers.get(id(module))
        trains = module.training and torch.is_grad_enabled()
        if number is None:
            number = self._inside.get(id(module))
            if trains and number is not None:
                self._calls["raw"] += 1
                self._raw_steps += [self._state.step] if len(self._raw_steps) < 20 else []
        elif trains:
            self._calls["wrapped"] += 1
        if number is None:
            number = self._unwrapped(module, trains)
        if not trains and next(module.parameters(), None) is not None:
            self._state.looking = True
        if number is None:
            return
        root = self._state.models[number]
        if trains:
            for heard in self._state.on_train_call:
                heard(root)
            self._state.evaluating = self._state.looking = False
            return
        self._state.other_calls += 1
        if not module.training and not torch.is_grad_enabled():
            self._evaluated(root)

    def _unwrapped(self, module: nn.Module, trains: bool) -> int | None:
        """Return the number of a model without a wrapper: one that is called from outside in training, and has parameters."""
        for number, known in enumerate(self._state.models):
            if known is module:
                self._calls["other"] += trains
                return number
        if trains and next(module.parameters(), None) is not None:
            if any(kind.__name__ in _SHARDING for kind in type(module).__mro__):
                self._wrapped.append({"kind": type(module).__name__, "sharded": True})
            self._calls["other"] += 1
            return self._model(module)
        return None

    def _evaluated(self, root: nn.Module) -> None:
        if not self._state.evaluating:
            for heard in self._state.on_evaluation:
                heard(root)
            self._state.evaluating = True
            self._evaluations.append({"step": self._state.step, "calls": 0, "sums": []})

    def _after(self, module: nn.Module, _: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._depth -= 1
        first = output[0] if isinstance(output, (tuple, list)) and output else output
        model = id(module) in self._wrappers or any(known is module for known in self._state.models)
        if self._depth == 0 and model and self._state.evaluating and self._evaluations and isinstance(first, Tensor):
            self._evaluations[-1]["calls"] += 1
            if first.is_floating_point():
                values = first.detach().double()
                self._evaluations[-1]["sums"].append(torch.stack([values.sum(), values.abs().sum()]))


def _summed(found: dict[str, Any]) -> dict[str, Any]:
    """Return an evaluation with the sum over all outputs in the place of those of its batches."""
    total, size = torch.stack(found["sums"]).sum(0).tolist() if found["sums"] else (None, None)
    return {"step": found["step"], "calls": found["calls"], "output_sum": total, "output_size": size}
