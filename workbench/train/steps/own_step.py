"""`OwnStep`: a person's own function that makes an update, `Workload(step=...)`, inside the loop of this trainer.

The trainer sets the learning rates before it and sees the gradients where an optimizer steps; loss, norm, clipping, hooks, evaluation
and checkpoints are as with any other update.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from workbench.config import TrainConfig
from workbench.errors import ConfigError, WorkbenchError, WorkloadError, in_one_line
from workbench.instruments.norms import clip_to, gradients_of, stacked, total_norm
from workbench.instruments.taps import TAPS, Listener
from workbench.schedules import lr_values
from workbench.train.evaluation import Evaluation
from workbench.train.forward import MicroBatches, autocast, has_diverged
from workbench.train.gradients import SHORT, Excuse, LaneLoss, LoopGradients
from workbench.train.own.torch_optimizer import TorchOptimizer, build_optimizers, listed
from workbench.train.stacked_weights import LaneStack
from workbench.workloads.base import Workload

ONE_AT_A_TIME = "a custom step trains one trial at a time"
_HALF = ("bfloat16", "float16")


def check_own_step(
    workload: Workload, configs: Sequence[TrainConfig], *, gradients: str = "loop", workers: int = 0
) -> None:
    """Raise a `ConfigError` where a custom step cannot train as it is asked to."""
    if workload.step is None:
        return
    if gradients == "vmap" or workers:
        asked = "gradients='vmap'" if gradients == "vmap" else f"{workers} workers"
        raise ConfigError(
            f"workload {workload.name!r}: {ONE_AT_A_TIME}, in one process, not with {asked}. Leave it out."
        )
    for config in configs:
        if config.accumulate_steps > 1:
            raise ConfigError(
                f"workload {workload.name!r}: accumulate_steps={config.accumulate_steps}, and a custom step is given the whole "
                "batch. Leave it 1, and divide the batch inside the step."
            )


@dataclass
class StepState:
    """What a custom step works with.

    Attributes:
        model: in training mode; `build_model` may return several in an `nn.ModuleDict`.
        optimizers: as the config's factory returned them. Their learning rates are set before each call.
        scaler: enabled where the config's precision is "float16", and else without effect.
        device: where model and batch are.
        precision: the config's.
        index: the update, from 0.
    """

    model: nn.Module
    optimizers: Any
    scaler: torch.amp.GradScaler
    device: torch.device
    precision: str | None
    index: int = 0
    entered: bool = False

    @property
    def optimizer(self) -> Any:
        """The first optimizer."""
        return listed(self.optimizers)[0]

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context of a forward pass in the config's precision."""
        self.entered = True
        return autocast(self.device, self.precision)


class OwnStep:
    """Makes the updates of one lane by the person's function: gradient backend and updater in one.

    The parameters are put back after the function, so that hooks see the step before it is applied; `after` holds what it made of
    them, bit for bit. Gradients are those that an optimizer steps with, the last time in an update; their norm is the one before any
    clipping. `max_grad_norm` clips the gradients of each optimizer, where it steps, or its closure has made them.
    """

    def __init__(self, workload: Workload, config: TrainConfig, stack: LaneStack, *, start: int = 0) -> None:
        self._workload, self._config, self._stack = workload, config, stack
        self._lrs, self.index = lr_values(config), start
        stack.scale = None  # the person's own scaler scales
        self._parameters = stack.parameters[0]
        for p in self._parameters:
            p.grad = None  # as a model has them that was just built
        made = build_optimizers(config, stack.models[0])
        self._optimizers: list[Optimizer] = listed(made)
        self._kept = [
            TorchOptimizer(config, functools.partial(self._twin, place), optimizer)
            for place, optimizer in enumerate(self._optimizers)
        ]
        scaler = torch.amp.GradScaler(stack.device.type, enabled=config.precision == "float16")
        self.state_of_step = StepState(stack.models[0], made, scaler, stack.device, config.precision)
        self._owned = [{id(p) for g in o.param_groups for p in g["params"]} for o in self._optimizers]
        places = zip(self._parameters, stack.slices, strict=True)
        self._unowned = [(p, where) for p, where in places if not any(id(p) in owned for owned in self._owned)]
        for optimizer in self._optimizers:
            optimizer.register_step_pre_hook(self._before)
        self._norms: dict[int, Tensor] = {}
        self._clippings: list[tuple[int, float, Tensor]] = []
        self._was_clipped: list[Tensor] = []
        self._listens = False
        self._excused: Excuse | None = None
        self._loop = LoopGradients(workload, stack)
        self.after = stack.values

    def under(self, loop: LoopGradients, excused: Excuse | None) -> OwnStep:
        """Return this step, which evaluates as `loop` does and asks `excused` where it raises."""
        self._loop, self._excused = loop, excused
        return self

    # ---- the gradient backend

    def __call__(self, batches: Sequence[MicroBatches]) -> LaneLoss:
        """Let the function make an update, and return its loss; parameters are as before, `after` as it left them."""
        ((batch, _),) = batches[0]
        stack, state = self._stack, self.state_of_step
        if not self._listens:
            TAPS.add(cast(Listener, self))
            self._listens = True
        self._norms, self._clippings, self._was_clipped = {}, [], []
        scale = state.scaler.get_scale()
        for kept in self._kept:
            kept.set_lr(self.index, float(self._lrs[min(self.index, len(self._lrs) - 1)]))
        state.index = self.index
        before = stack.values.clone()
        stack.grad.zero_()
        try:
            loss, parts = self._losses(batch)
            skipped = state.scaler.get_scale() < scale
            if not self._norms and not skipped:
                raise WorkloadError(
                    "step(state, batch) stepped no optimizer of state.optimizers. One call makes one update: call "
                    "state.optimizer.step() in it; to accumulate, divide the batch of a larger batch_size inside it."
                )
        except Exception as error:
            gone = has_diverged(error, stack.models[0])
            if not gone and not (self._excused and self._excused(0, error, batches[0], True)):
                raise
            loss, parts, skipped = stack.values.new_full((), math.nan), {}, False
        for p, where in self._unowned:
            _copy(p, stack.grad[0, where])
        self.after = stack.values.clone()
        stack.values.copy_(before)
        if self.index == 0:  # say now, not at the first checkpoint, that it could not be saved
            self.state(0), self.plain_state(0)
        self.index += 1
        recorded: dict[str, Tensor | float] = {f"loss/{name}": value.reshape(1) for name, value in parts.items()}
        if state.scaler.is_enabled():
            recorded |= {"loss_scale": scale, "skipped": float(skipped)}
        return LaneLoss(loss.reshape(1), torch.full_like(loss, math.nan).reshape(1), None, self._core(loss), recorded)

    def evaluate(self, split: str, batch_size: int, **how: Any) -> list[list[Evaluation]]:
        """Return the evaluations of the lane, by the workload's forward and loss."""
        return self._loop.evaluate(split, batch_size, **how)

    def describe(self) -> dict[str, Any]:
        """Return how it is done."""
        return {"gradients": "step"}

    def close(self) -> None:
        """Listen no more."""
        TAPS.remove(cast(Listener, self))
        self._listens = False

    def _losses(self, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Call the function; return its loss, of several their sum, and several by their names."""
        assert self._workload.step is not None
        state = self.state_of_step
        try:
            told = self._workload.step(state, batch)
        except WorkbenchError:
            raise
        except Exception as error:
            raise WorkloadError(f"step(state, batch) raised {in_one_line(error)}") from error
        if state.precision in _HALF and not state.entered:
            raise ConfigError(
                f"precision={state.precision!r} has no effect on a step that never calls state.autocast(). Write `with "
                "state.autocast():` around its forward pass, or leave precision out."
            )
        if isinstance(told, Mapping) and told:
            parts = {str(name): self._scalar(value, f"of {name!r} ") for name, value in told.items()}
            return cast(Tensor, sum(parts.values())), parts
        return self._scalar(told, ""), {}

    def _scalar(self, value: object, what: str) -> Tensor:
        if isinstance(value, Tensor) and value.numel() == 1:
            loss = value.detach().reshape(()).to(self._stack.device, copy=True)
            return loss.float() if loss.dtype in SHORT else loss
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return torch.tensor(float(value), device=self._stack.device)
        met = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise WorkloadError(
            f"step(state, batch) returned {met} {what}where a loss belongs. Return a scalar, such as loss.mean().detach(), or a dict of "
            "some by name, as {'generator': ..., 'discriminator': ...}; it is what is recorded as the training loss."
        )

    def _core(self, loss: Tensor) -> dict[str, Tensor]:
        norms = list(self._norms.values())
        norm = torch.linalg.vector_norm(stacked(norms)) if norms else torch.full_like(loss, math.inf)
        clipped = stacked(self._was_clipped).any() if self._was_clipped else torch.zeros_like(loss, dtype=torch.bool)
        return {"grad_norm": norm.reshape(1), "clipped": clipped.reshape(1)}

    # ---- at the boundary of an optimizer

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Return a listener that does nothing: `TAPS` tells of more than is asked for here."""
        if name not in vars(Listener):
            raise AttributeError(name)
        return lambda *_, **__: None

    def clipped(self, kind: str, limit: float, norm: Tensor | None, first: int) -> None:  # noqa: ARG002
        """Keep what the function's own clipping says of the norm before it."""
        if norm is not None and first not in [seen for seen, _, _ in self._clippings]:
            self._clippings.append((first, limit, norm.detach()))

    def _before(self, optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(closure):
            self._meet(optimizer, first=True)
            return None
        calls = iter([True])

        @functools.wraps(closure)
        def told() -> Any:
            loss = closure()
            self._meet(optimizer, first=next(calls, False))
            return loss

        return ((args[0], told, *args[2:]), kwargs) if len(args) > 1 else (args, kwargs | {"closure": told})

    def _meet(self, optimizer: Optimizer, *, first: bool) -> None:
        """Look at the gradients that an optimizer is about to use, the first ones of a step with a closure, and clip them."""
        grads = gradients_of(optimizer, to_change=self._config.max_grad_norm is not None)
        if not grads:
            return
        number = next(i for i, each in enumerate(self._optimizers) if each is optimizer)
        scale = getattr(optimizer, "grad_scale", None)  # there while a GradScaler leaves unscaling to the optimizer
        if first:
            own = [c for c in self._clippings if c[0] in self._owned[number]]
            self._clippings = [c for c in self._clippings if c[0] not in self._owned[number]]
            norm = stacked([n for _, _, n in own]).norm() if own else total_norm(grads)
            self._was_clipped += [n > limit for _, limit, n in own]
            if norm is not None:
                self._norms[number] = norm / scale if scale is not None and not own else norm
        if self._config.max_grad_norm is not None:
            shortened = clip_to(grads, self._config.max_grad_norm, scale)
            self._was_clipped += [shortened] if first and shortened is not None else []
        if first:
            for p, where in zip(self._parameters, self._stack.slices, strict=True):
                if id(p) in self._owned[number]:
                    _copy(p, self._stack.grad[0, where])

    def _twin(self, place: int) -> Optimizer:
        return cast(Optimizer, listed(build_optimizers(self._config, self._stack.models[0]))[place])

    # ---- the updater

    def update(
        self, params: Tensor, grad: Tensor, lr: Tensor, step: int, host_lr: Any = None, *, out: Tensor | None = None  # noqa: ARG002
    ) -> Tensor:  # fmt: skip
        """Return what the function did, as an update that is subtracted."""
        return torch.sub(params, self.after, out=out)

    def state(self, lane: int) -> dict[str, Tensor]:
        """Return the tensors of each optimizer, and the gradients that are left."""
        found = {f"{i}/{key}": t for i, kept in enumerate(self._kept) for key, t in kept.state(lane).items()}
        left = {f"left/{i}": p.grad.to_dense() for i, p in enumerate(self._parameters) if p.grad is not None}
        return found | left

    def plain_state(self, lane: int) -> dict[str, Any]:
        """Return what else the optimizers and the scaler keep, as JSON values."""
        return {
            "optimizers": [kept.plain_state(lane) for kept in self._kept],
            "scaler": self.state_of_step.scaler.state_dict(),
        }

    def load(self, lane: int, state: Mapping[str, Tensor], plain: Mapping[str, Any]) -> None:
        """Put saved state back."""
        for i, (kept, values) in enumerate(zip(self._kept, plain["optimizers"], strict=True)):
            own = {key.split("/", 1)[1]: t for key, t in state.items() if key.startswith(f"{i}/")}
            kept.load(lane, own, values)
        for i, p in enumerate(self._parameters):
            left = state.get(f"left/{i}")
            p.grad = None if left is None else left.to(p.device, copy=True).view_as(p)
        if plain["scaler"]:
            self.state_of_step.scaler.load_state_dict(dict(plain["scaler"]))

    def skip(self, lane: int) -> None:
        """Do nothing: the function's own scaler skips."""

    def keep(self, rows: Sequence[int]) -> None:
        """Keep the only lane."""


def _copy(parameter: nn.Parameter, to: Tensor) -> None:
    if parameter.grad is not None:
        to.copy_(parameter.grad.detach().to_dense().reshape(-1))


def first_update(
    workload: Workload, stack: LaneStack, config: TrainConfig, batches: MicroBatches
) -> tuple[float, Tensor]:
    """Make one update of a fresh stack at `peak_lr`; return its loss and the parameters after it, which `stack.values` does not have yet."""
    own = OwnStep(workload, config.replace(warmup_steps=0, schedule="constant"), stack)
    stack.models[0].train()
    try:
        return float(own([batches]).loss), own.after
    finally:
        own.close()
