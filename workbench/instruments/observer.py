"""`LoopObserver`: a row for every update of a loop, and what the loop does in which order."""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from workbench.instruments.batches import Draws
from workbench.instruments.facts import LoopFacts
from workbench.instruments.losses.attention import Attention
from workbench.instruments.losses.pending import Pending, Samples
from workbench.instruments.norms import gradients_of, stacked, total_norm
from workbench.instruments.parameters import Snapshot
from workbench.instruments.rows import StepRows, Value, learning_rates, summed
from workbench.instruments.taps import TAPS, Intervention

_Looks = TypeVar("_Looks", bound=Callable[..., None])


def _looks(method: _Looks) -> _Looks:
    """Return a method of a `LoopObserver` whose fault, where an intervention goes on, ends only the observation."""

    @functools.wraps(method)
    def guarded(self: LoopObserver, *args: Any, **kwargs: Any) -> None:
        if self.faulty:
            return
        attention = self.attention
        began = time.perf_counter() if attention.awake else 0.0
        try:
            method(self, *args, **kwargs)
            if began:
                attention.spent += time.perf_counter() - began
        except Exception as error:
            if self._intervention is None:  # whoever calls takes the observer out
                raise
            self.faulty = True
            TAPS.tell_fault(self, error)

    return cast("_Looks", guarded)


class LoopObserver:
    """Listens to a loop (see `Listener`) and keeps one row an update; the first optimizer that steps is the one that counts updates.

    Losses are those that `backward` is called on, summed over the calls of one update, as they were before a GradScaler scaled them.
    Gradient norms are those before the loop's own clipping, of updates that are looked at (see `Attention`) or clipped. Nothing waits for a device.

    Args:
        sink: takes the rows, in blocks of columns.
        optimizers: to observe; empty is every one that steps.
        models: whose modes and parameter names are looked at; empty finds them by their forward passes.
        every: updates between two looks at parameters and updates (rule of thumb).
        share: of the time of a step that looking may take after the first updates; None looks at every update.
        intervention: changes the updates; None leaves them alone.
    """

    def __init__(
        self,
        sink: Callable[[Mapping[str, list[float]]], None],
        *,
        optimizers: Sequence[Optimizer] = (),
        models: Sequence[nn.Module] = (),
        every: int = 50,
        share: float | None = None,
        intervention: Intervention | None = None,
    ) -> None:
        self.attention = Attention(share, most=every)
        self.facts = LoopFacts(models, self.attention)
        self._sink = sink
        self.rows = StepRows(self._hand_on)
        self.updates = 0
        self.faulty = False  # whether nothing is looked at any more
        self._only = bool(optimizers)
        self._intervention = intervention
        self._entered: Optimizer | None = None  # its learning rates are changed already
        self._numbers: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        for optimizer in optimizers:
            self._numbers[optimizer] = len(self._numbers)
        self.facts.given = len(optimizers)
        self._scaled: dict[int, tuple[Tensor, Tensor]] = {}
        self._logged: dict[str, Value] = {}
        self._row: dict[str, Value] = {}
        self._norms: list[tuple[int, float, Tensor]] = []  # id of the first parameter, limit and norm of each clipping
        self._exit_norm: Tensor | None = None
        self.looks_now = True  # at the gradients of the update in progress
        self._fresh = True  # whether they are marked
        self._needs_exit_norm = False
        self._zeroes: weakref.WeakKeyDictionary[nn.Module, int | None] = weakref.WeakKeyDictionary()
        self._samples = Samples()
        self._pending = Pending(self._samples)
        self._strangers: weakref.WeakKeyDictionary[Optimizer, int] = (
            weakref.WeakKeyDictionary()
        )  # not observed, below 0
        self._waited, self._drew, self._dropped = 0.0, False, False
        self._last = time.perf_counter()
        self._snapshot = Snapshot(every)

    # ---- what a loop does, in its order

    @_looks
    def drew(self, loader: Any, waited: float, draws: Draws, batch: Any) -> None:  # noqa: D102
        self._waited += waited
        self._drew = True
        self.facts.drew(loader, draws, batch)

    @_looks
    def loader_begins(self, loader: Any, states: Tensor | None) -> None:  # noqa: D102
        self.facts.loader_begins(loader, states)

    @_looks
    def entered(self, module: nn.Module, args: tuple[Any, ...]) -> None:  # noqa: D102
        self.facts.entered(module, args)

    def passes_over(self, args: tuple[Any, ...]) -> bool:
        """Tell whether nothing but what it is given is wanted of a forward pass; that is held until the update is made."""
        if self.looks_now or not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            return False
        self.facts.batches.hold(args)
        return True

    @_looks
    def compared(self, name: str, inputs: Any, target: Any, loss: Any) -> None:  # noqa: D102
        self.facts.compared(name, inputs, target, loss)

    @_looks
    def converted(self, tensor: Tensor, result: Tensor, seconds: float) -> None:  # noqa: D102
        if self.facts.near:
            self.facts.conversions.add(tensor, result, seconds)

    @_looks
    def scaled(self, loss: Any, result: Any) -> None:  # noqa: D102
        if isinstance(loss, Tensor) and isinstance(result, Tensor):
            self._scaled = {id(result): (result, loss.detach())}  # holding the result keeps its id its own
        self.facts.token("scale")

    @_looks
    def backward_begins(self, losses: Any, *, retained: bool = False) -> None:  # noqa: D102
        if self._dropped:  # by a GradScaler that skipped a step, as its gradients overflowed
            self._norms, self._exit_norm, self._dropped = [], None, False
            self._pending.clear()
        given = losses if isinstance(losses, (list, tuple)) else [losses]
        single = [loss for loss in given if isinstance(loss, Tensor) and loss.numel() == 1]
        plain = [self._read(self._scaled.pop(id(loss), (None, loss.detach()))[1]) for loss in single]
        touched = self._touched() if self.attention.awake else ()
        self._pending.begins(plain, self.facts.backward_begins(losses, touched, retained=retained))

    def _read(self, loss: Tensor) -> Value:
        """Return a loss as a number where that waits for no device, and have its update looked at where it stands out."""
        if self.attention.share is None or not loss.is_cpu or type(loss) is not Tensor or not loss.is_floating_point():
            return loss
        value: float = loss.item()
        self.attention.saw(value)
        self.looks_now = self.looks_now or self.attention.roused
        return value

    @_looks
    def backward_ends(self) -> None:  # noqa: D102
        self._pending.ends()
        if not self.looks_now:
            return
        if self._needs_exit_norm and self._numbers:
            first = next(iter(self._numbers))
            self._exit_norm = total_norm(gradients_of(first))
        self._mark()
        self.facts.token("backward")

    @_looks
    def zeroed(self, owner: Optimizer | nn.Module) -> None:  # noqa: D102
        number = self._number_of(owner)
        self._dropped = self._pending.waits(None if self.facts.order.scaled else 0) and (
            self.facts.order.scaled or number == 0
        )
        self.facts.zeroed(number)

    def _number_of(self, owner: Optimizer | nn.Module) -> int | None:
        """Return the number of an optimizer, or of the one that has a module's parameters; None where that is not known yet."""
        if isinstance(owner, Optimizer):
            return self._numbers.get(owner)
        if owner not in self._zeroes and self._samples:
            hits = self._samples.inside({id(p) for p in owner.parameters()})
            self._zeroes[owner] = min((n for n in hits if n >= 0), default=None)
        return self._zeroes.get(owner)

    @_looks
    def unscaled(self, optimizer: Optimizer) -> None:  # noqa: D102
        self.facts.token("unscale")
        if self.looks_now:
            if self._needs_exit_norm:
                self._exit_norm = total_norm(gradients_of(optimizer))
            self._mark()

    def _mark(self) -> None:
        self._samples.mark()
        self._fresh = True

    @_looks
    def clipped(self, kind: str, limit: float, norm: Tensor | None, first: int) -> None:  # noqa: D102
        self.facts.clipped(kind, limit)
        if norm is not None and type(norm) is Tensor and first not in [seen for seen, _, _ in self._norms]:
            self._norms.append((first, limit, norm.detach()))
        if self.looks_now:
            self._mark()

    @_looks
    def scheduled(self, scheduler: Any) -> None:  # noqa: D102
        self.facts.scheduled(scheduler, self.updates)

    def step_enters(self, optimizer: Optimizer) -> None:
        """Change the learning rates before a closure makes the gradients: LBFGS has read its own by the time that it returns."""
        if self._intervention is not None and not (self._only and optimizer not in self._numbers):
            self._intervention.set_lr(optimizer, self.updates)
            self._entered = optimizer

    def step_begins(self, optimizer: Optimizer) -> None:  # noqa: D102
        number = self._numbers.get(optimizer)
        if number is None:
            if self._only:
                self.facts.stepped_elsewhere(optimizer)
                return
            number = self._numbers[optimizer] = len(self._numbers)
        if self.attention.share is not None and self._intervention is None:
            self._probe(number, optimizer)
            if not self.looks_now:
                return
        self._note_step(number, optimizer)
        if self._intervention is not None and self._entered is not optimizer:
            self._intervention.set_lr(optimizer, self.updates)
        self._entered = None
        scale = getattr(optimizer, "grad_scale", None)  # there while a GradScaler leaves unscaling to the optimizer
        scale = scale if isinstance(scale, Tensor) else None
        limit = None if self._intervention is None else self._intervention.max_grad_norm
        grads = gradients_of(optimizer, to_change=limit is not None)
        self._describe(number, optimizer, grads, scale)
        if limit is not None:
            self._clip(number, grads, scale)

    def _clip(self, number: int, grads: Sequence[Tensor], scale: Tensor | None) -> None:
        """Have the gradients shortened, also where nothing is looked at any more; where they cannot be, the run is of no use and says so."""
        assert self._intervention is not None
        try:
            clipped = self._intervention.clip(grads, scale)
        except Exception as error:  # the run is still ended when it is to end
            if not self.faulty:
                self.faulty = True
                TAPS.tell_fault(self, error)
            return
        if clipped is not None and number == 0:
            self._row["clipped"] = clipped

    def step_ends(self, optimizer: Optimizer) -> None:  # noqa: D102
        number = self._numbers.get(optimizer)
        if number is None:
            mine = _identities(optimizer) if self._norms else set()
            self._norms = [each for each in self._norms if each[0] not in mine]
            stranger = self._strangers.setdefault(optimizer, -1 - len(self._strangers))
            self._step_over(stranger, optimizer)
            return
        if self._intervention is not None:
            self._intervention.reset_lr(optimizer)
        self._note_end(number, optimizer)
        if number == 0:
            self.updates += 1
            self._count(optimizer)
            if self._intervention is not None:
                self._intervention.updated(self.updates)

    @_looks
    def _probe(self, number: int, optimizer: Optimizer) -> None:
        """Have the update in progress looked at where one of its gradients stands out, as far as that waits for no device; else pass it over."""
        grad = self._samples.probe() if number == 0 else None
        if grad is not None:
            self.attention.probed(torch.linalg.vector_norm(grad).item())
            self.looks_now = self.looks_now or self.attention.roused
        if not self.looks_now:
            self.facts.order.step(number, empty=False, line=False)
            self._fill(number, optimizer, (), None)

    @_looks
    def _note_step(self, number: int, optimizer: Optimizer) -> None:
        altered = self._is_altered(number)
        self.facts.step_begins(number, optimizer, altered=altered)

    @_looks
    def _note_end(self, number: int, optimizer: Optimizer) -> None:
        self.facts.step_ends(number)
        if self._norms:
            used_up = self._norms_of(optimizer)
            self._norms = [each for each in self._norms if all(each is not used for used in used_up)]
        self._exit_norm, self._dropped = None, False
        if number == 0:
            self._finish_row()
            self.attention.updated(self.updates + 1, optimizers=len(self._numbers))
            self.looks_now, self._fresh = self.attention.awake, False
            self.facts.order.look(awake=self.looks_now, weight=self.attention.weight)
        self._step_over(number, optimizer)

    @_looks
    def _step_over(self, number: int, optimizer: Optimizer) -> None:
        self._pending.stepped(number, functools.partial(_identities, optimizer))
        self._samples.add(number, (p for group in optimizer.param_groups for p in group["params"]))
        if self.looks_now:
            self._mark()

    @_looks
    def _count(self, optimizer: Optimizer) -> None:
        self.facts.updated(self.updates, optimizer)

    # ---- rows

    def _hand_on(self, columns: Mapping[str, list[float]]) -> None:
        if self.facts.batches.read(columns) and not self.attention.sees:
            self.attention.rouse()
        self.attention.read(columns)
        self._sink(columns)

    def log(self, **values: Value) -> None:
        """Add values to the row of the update in progress; `loss` stands in for the one that `backward` was called on."""
        self._logged |= values

    @_looks
    def _describe(self, number: int, optimizer: Optimizer, grads: Sequence[Tensor], scale: Tensor | None) -> None:
        self._fill(number, optimizer, grads, scale)
        if number == 0 and self.looks_now:
            self._snapshot.take(optimizer, self.updates, self.facts.names)

    def _fill(self, number: int, optimizer: Optimizer, grads: Sequence[Tensor], scale: Tensor | None) -> None:
        """Fill the row of the update in progress."""
        where = "" if number == 0 else f"/optimizer{number}"
        row = self._row
        if losses := self._pending.of(number, functools.partial(_identities, optimizer)):
            row[f"loss{where}"] = losses[0] if len(losses) == 1 else summed(losses)
        norm, clipped = self._unclipped(number, optimizer, grads)
        if norm is not None:
            row[f"grad_norm{where}"] = norm if scale is None else norm / scale.to(norm.device)
        if clipped is not None:
            row[f"clipped{where}"] = clipped
        if number == 0 and (norm is None or self.attention.share is not None):
            row["looked"] = 0.0 if norm is None else 1.0
        row.update(learning_rates(optimizer.param_groups, where, self.rows.names))

    def _norms_of(self, optimizer: Optimizer) -> list[tuple[int, float, Tensor]]:
        """Return the clippings of an optimizer's gradients; those of parameters that no optimizer has count for whichever steps."""
        if len(self._numbers) < 2 or not self._norms:
            return self._norms
        mine = _identities(optimizer)
        others = {key for each in self._numbers if each is not optimizer for key in _identities(each)} - mine
        return [each for each in self._norms if each[0] not in others]

    def _unclipped(
        self, number: int, optimizer: Optimizer, grads: Sequence[Tensor]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradient norm before the loop's own clipping, and whether it was clipped, where that is known."""
        if mine := self._norms_of(optimizer):
            norms, limits = [n for _, _, n in mine], [limit for _, limit, _ in mine]
            if len(norms) == 1:
                return norms[0], norms[0] > limits[0]
            clipped = stacked([n > limit for n, limit in zip(norms, limits, strict=True)]).any()
            return torch.linalg.vector_norm(stacked(norms)), clipped
        if not self.looks_now or (self._needs_exit_norm and not self._fresh):
            return None, None
        if self._is_altered(number):  # since the last pass, by something unseen
            self._needs_exit_norm = self._needs_exit_norm or number == 0
            if number == 0 and self._exit_norm is not None:
                now = total_norm(grads)
                return self._exit_norm, None if now is None else now < self._exit_norm * (1 - 1e-6)
            return None, None
        return self._exit_norm if self._exit_norm is not None and number == 0 else total_norm(grads), None

    def _is_altered(self, number: int) -> bool:
        return self._fresh and self._samples.is_marked(number) and self._samples.is_touched(number)

    def _touched(self) -> list[int]:
        """Return the optimizers whose gradients are not what they were when they were marked."""
        return [number for number in range(len(self._numbers)) if self._samples.is_touched(number)]

    def _finish_row(self) -> None:
        self._row |= self._snapshot.measured(self.facts.moved)
        now = time.perf_counter()
        row = self._row | self._logged if self._logged else self._row
        if self._drew:
            row["data_wait_s"] = self._waited
        row["step_time_s"] = now - self._last
        self.rows.add(row)
        self._row, self._logged, self._waited, self._last = {}, {}, 0.0, now


def _identities(optimizer: Optimizer) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}
