"""`BufferWatch`, `ModelWatch`, `UpdateWatch`: running statistics, calls of models, what each update starts from, clips and takes."""

import contextlib
import functools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from workbench.topics.hosts.watch_state import Patches, State, hash_of, is_sharded, looked_at, place_of

_SHARDING = ("FullyShardedDataParallel", "FSDPModule")
_CLIPPING = (("clip_grad_norm_", "max_norm"), ("clip_grads_with_norm_", "max_norm"), ("clip_grad_value_", "clip_value"))
MAX_ROWS = 20_000
"""Of steps, of clippings and of running statistics that are written down (rule of thumb: a rehearsal is far shorter, and a job that goes on for days costs nothing more)."""
CHANNELS = 8  # of a layer whose statistics are written down (rule of thumb: ranks differ in all of them)
MAX_NUMBERS = 200_000


class BufferWatch:
    """Running statistics of batch norm at each evaluation, at each checkpoint, and before each update goes on (P7.3)."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._rows: list[dict[str, Any]] = []
        self._boundary = -1
        self._numbers = 0
        state.on_train_call.append(self._on_train_call)

    def facts(self) -> dict[str, Any]:
        """Return what was seen, as JSON values; the end of the run counts as a moment when training goes on."""
        self.look("end")
        return {"buffers": self._rows}

    def _on_train_call(self, model: nn.Module) -> None:
        if self._state.step != self._boundary and len(self._rows) < MAX_ROWS:
            self._boundary = self._state.step
            self.look("training", model)

    def look(self, moment: str, model: nn.Module | None = None) -> None:
        """Write down the statistics of the first model; nothing where `model` is another."""
        if not self._state.models or (model is not None and model is not self._state.models[0]):
            return
        pairs = (
            (getattr(m, "running_mean", None), getattr(m, "running_var", None)) for m in self._state.models[0].modules()
        )
        layers = [(mean, var) for mean, var in pairs if isinstance(mean, Tensor) and isinstance(var, Tensor)]
        self.note(layers, moment)

    def note(self, layers: Sequence[tuple[Tensor, Tensor]], moment: str) -> None:
        """Write down means and variances of all layers, as they are at a moment."""
        if not layers:
            return
        both = hash_of(t for pair in layers for t in pair)
        row: dict[str, Any] = {"step": self._state.step, "moment": moment, "hash": both}
        if self._numbers < MAX_NUMBERS:
            for name, place in (("means", 0), ("variances", 1)):
                row[name] = [float(f"{v:.9g}") for pair in layers for v in pair[place][:CHANNELS].double().tolist()]
            self._numbers += 2 * len(row["means"])
        self._rows.append(row)


class ModelWatch:
    """Calls of models from outside, wrapped or raw (`hosts.not_wrapped`), and outputs of evaluations (`hosts.evaluation`)."""

    def __init__(self, state: State, patches: Patches, buffers: BufferWatch) -> None:
        self._state, self._buffers = state, buffers
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
        patches.callback(register_module_forward_pre_hook(self._before).remove)
        patches.callback(register_module_forward_hook(self._after, always_call=True).remove)

    def facts(self) -> dict[str, Any]:
        """Return what was seen, as JSON values: of an evaluation, the sum over all outputs in the place of those of its batches."""
        evaluations = []
        for found in self._evaluations:
            total, size = torch.stack(found["sums"]).sum(0).tolist() if found["sums"] else (None, None)
            evaluations.append({"step": found["step"], "output_sum": total, "output_size": size})
        return {
            "wrappers": self._wrapped, "calls": dict(self._calls), "raw_steps": self._raw_steps, "evaluations": evaluations,
        }  # fmt: skip

    def _on_wrap(self, original: Any, wrapper: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        before = hash_of(module.parameters())
        original(wrapper, module, *args, **kwargs)
        number = place_of(self._state.models, module)
        self._wrappers[id(wrapper)] = number
        self._kept.append(wrapper)
        trained = [part for part in module.modules() if any(p.requires_grad for p in part.parameters())]
        self._inside |= {id(part): number for part in trained}
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]
        broadcasts = bool(getattr(wrapper, "broadcast_buffers", False))
        self._wrapped.append({"kind": type(wrapper).__name__, "before": before, "broadcast_buffers": broadcasts})

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """A backward pass, in which checkpointed parts are called once more: calls of the script are none of these."""
        was, self._backward = self._backward, True
        try:
            yield
        finally:
            self._backward = was

    def _on_gradient(self, _: Tensor) -> None:
        self.last_gradient = time.perf_counter()

    def _timed(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        with self._state.waiting("the broadcast of buffers"):
            return original(*args, **kwargs)

    def _number(self, module: nn.Module) -> int | None:
        return next((number for number, known in enumerate(self._state.models) if known is module), None)

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
        number = self._number(module)
        new = number is None and trains and next(module.parameters(), None) is not None
        if new and any(kind.__name__ in _SHARDING for kind in type(module).__mro__):
            self._wrapped.append({"kind": type(module).__name__, "sharded": True})
        self._calls["other"] += new or (number is not None and trains)
        return place_of(self._state.models, module) if new else number

    def _evaluated(self, root: nn.Module) -> None:
        if not self._state.evaluating:
            self._buffers.look("evaluation", root)
            self._state.evaluating = True
            self._evaluations.append({"step": self._state.step, "sums": []})

    def _after(self, module: nn.Module, _: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._depth -= 1
        first = output[0] if isinstance(output, (tuple, list)) and output else output
        model = id(module) in self._wrappers or self._number(module) is not None
        if self._depth or not model or not self._state.evaluating or not self._evaluations:
            return
        if isinstance(first, Tensor) and first.is_floating_point():
            values = first.detach().double()
            self._evaluations[-1]["sums"].append(torch.stack([values.sum(), values.abs().sum()]))


class StopAfterSteps(SystemExit):
    """The rehearsal has seen as many updates as it was asked for."""


class UpdateWatch:
    """What each update starts from (`hosts.init_seed`, `hosts.not_wrapped`), clips (`hosts.clip`) and takes (`hosts.straggler`)."""

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
        patches.callback(register_optimizer_step_pre_hook(self._before).remove)
        patches.callback(register_optimizer_step_post_hook(self._after).remove)
        patches.wrap(torch.autograd, "backward", self._on_backward)
        for name, limit in _CLIPPING:
            for module in (torch.nn.utils, torch.nn.utils.clip_grad):
                patches.wrap(module, name, functools.partial(self._on_clip, name, limit))

    def facts(self) -> dict[str, Any]:
        """Return what was seen, as JSON values."""
        return {
            "steps": self._state.step, "parameters": self._parameters, "gradients": self._gradients, "clips": self._clips,
            "times": self._times,
        }  # fmt: skip

    def _on_new(self, original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        original(optimizer, *args, **kwargs)
        self._number(optimizer)

    def _number(self, optimizer: Any) -> int:
        number = place_of(self._state.optimizers, optimizer)
        self._updates += [0] * (len(self._state.optimizers) - len(self._updates))
        return number

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
        """Write down what update `step` of optimizer `number` starts from: its parameters, and hashes of the gradient."""
        row = {"optimizer": number, "step": step}
        sharded = any(is_sharded(p) for p in parameters)
        self._parameters.append(row | {"hash": hash_of(parameters), "sharded": sharded})
        self._gradients.append(row | {
            "after_backward": after_backward, "at_joining": at_joining, "before_clip": before_clip, "at_step": used,
        })  # fmt: skip

    def clipped(self, by: str, limit: Any, *, number: int | None = 0) -> None:
        """Write down that gradients were clipped."""
        if len(self._clips) < MAX_ROWS:
            step = self._state.step if number is None or not self._updates else self._updates[number]
            with contextlib.suppress(TypeError, ValueError):
                limit = float(limit)
            limit = limit if isinstance(limit, float) else None
            self._clips.append({"step": step, "optimizer": number, "by": by, "limit": limit})

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

    def _on_backward(self, original: Any, *args: Any, **kwargs: Any) -> Any:
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

    def joins(self) -> None:
        """Take in that ranks join what they hold, in training: gradients, where a script averages them itself."""
        if self._after_backward and not self._at_joining:
            self._at_joining = self._hashes()

    def _hashes(self) -> dict[int, str]:
        """Return hashes of the gradients that are looked at, by optimizer."""
        return {
            number: hash_of(p.grad for p in _parameters(optimizer))
            for number, optimizer in enumerate(self._state.optimizers) if looked_at(self._updates[number])
        }  # fmt: skip

    def _on_clip(self, name: str, limit: str, original: Any, parameters: Any, *args: Any, **kwargs: Any) -> Any:
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        ids = {id(p) for p in parameters}
        owners = (n for n, own in enumerate(self._state.optimizers) if ids & {id(p) for p in _parameters(own)})
        number = next(owners, None)
        if number is not None and looked_at(self._updates[number]):
            self._before_clip[number] = hash_of(p.grad for p in _parameters(self._state.optimizers[number]))
        found = original(parameters, *args, **kwargs)
        self.clipped(name, args[0] if args else kwargs.get(limit), number=number)
        return found


def _parameters(optimizer: Any) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"]]
