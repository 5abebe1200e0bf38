"""`LoopObserver`: a row for every update of a loop, and what the loop does in which order."""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from workbench.instruments.batches import Draws
from workbench.instruments.facts import LoopFacts
from workbench.instruments.losses.attention import Attention
from workbench.instruments.losses.graphs import note_scaled, unscaled
from workbench.instruments.losses.guarded import looks
from workbench.instruments.losses.passing import Passing
from workbench.instruments.losses.pending import Pending, Samples, clippings_of, identities
from workbench.instruments.norms import gradients_of, stacked, total_norm
from workbench.instruments.parameters import Snapshot
from workbench.instruments.rows import StepRows, Value, learning_rates, summed
from workbench.instruments.taps import TAPS, Intervention


class LoopObserver:
    """Listens to a loop (see `Listener`) and keeps one row an update; the first optimizer that steps is the one that counts updates.

    Losses are those that `backward` is called on, summed over the calls of one update, as they were before a GradScaler scaled them.
    Gradient norms are those before the loop's own clipping, of updates that are looked at (see `Attention`) or clipped. Nothing waits for a device.

    Args:
        every: updates between two looks at parameters and updates (rule of thumb).
    """

    def __init__(
        self, sink: Callable[[Mapping[str, list[float]]], None], *, optimizers: Sequence[Optimizer] = (), models: Sequence[nn.Module] = (),
        every: int = 50, share: float | None = None, intervention: Intervention | None = None,
    ) -> None:  # fmt: skip
        self.attention = Attention(share, most=every)
        self.facts = LoopFacts(models, self.attention)
        self._sink = sink
        self.rows = StepRows(self._hand_on)
        self.updates = 0
        self.faulty = False  # whether nothing is looked at any more
        self._only = bool(optimizers)
        self.intervention = intervention
        self._entered: Optimizer | None = None  # its learning rates are changed already
        self._numbers = weakref.WeakKeyDictionary({optimizer: k for k, optimizer in enumerate(optimizers)})
        self.facts.given = len(optimizers)
        self._scales = False  # whether a GradScaler has taken part
        self.logged: dict[str, Value] = {}
        self._row: dict[str, Value] = {}
        self.norms: list[tuple[int, float, Tensor]] = []  # id of the first parameter, limit and norm of each clipping
        self._exit_norm: Tensor | None = None
        self.looks_now = True  # at the gradients of the update in progress
        self._fresh = True  # whether they are marked
        self.needs_exit_norm = False  # as something unseen changes the gradients before the step
        self.samples = Samples()
        self._pending = Pending(self.samples)
        self.facts.order.pending = self._pending
        self._strangers = weakref.WeakKeyDictionary[Optimizer, int]()  # not observed, below 0
        self.waited, self.waits, self._dropped = 0.0, False, False
        self.last = time.perf_counter()
        self._snapshot = Snapshot(every)
        self._plain = intervention is None  # whether all that was seen of the loop is what `Passing` takes

    # ---- what a loop does, in its order

    @looks
    def drew(self, loader: Any, waited: float, draws: Draws, batch: Any) -> None:  # noqa: D102
        self.waited += waited
        self.waits = True
        self.facts.drew(loader, draws, batch, draws.current)

    @looks
    def loader_begins(self, loader: Any, states: Tensor | None) -> None:  # noqa: D102
        if TAPS.passing is not None and self.facts.loaders.last is None:
            TAPS.passing.end()
        self.facts.loader_begins(loader, states)

    @looks
    def entered(self, module: nn.Module, args: tuple[Any, ...]) -> None:  # noqa: D102
        if TAPS.passing is not None:
            TAPS.passing.replay()
        self.facts.entered(module, args)

    def passes_over(self, args: tuple[Any, ...]) -> bool:
        """Tell whether nothing but what it is given is wanted of a forward pass; that is held until the update is made."""
        if self.looks_now or not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            return False
        self.facts.modes.asked = None
        self.facts.batches.hold(args)
        return True

    def take_back(self, losses: Sequence[Value], held: Any, *, plain: bool) -> None:
        """Go on with an update whose calls `Passing` took so far."""
        TAPS.passing, self._plain = None, self._plain and plain
        self.facts.batches.hold(held)
        for loss in losses:
            self._pending.begins([loss], None)

    def passed(self, optimizer: Optimizer, losses: Sequence[Value]) -> None:
        """Take in that an update was made which `Passing` took, and which has more than that keeps."""
        self._fill(0, optimizer, losses, (), None)
        self.facts.step_ends(0)
        self._finish_row()
        self.norms, self.updates = [], self.updates + 1

    @looks
    def compared(self, name: str, inputs: Any, target: Any, loss: Any) -> None:  # noqa: D102
        self.facts.compared(name, inputs, target, loss)

    @looks
    def converted(self, tensor: Tensor, result: Tensor, seconds: float) -> None:  # noqa: D102
        if self.facts.near:
            self.facts.conversions.add(tensor, result, seconds)

    @looks
    def scaled(self, loss: Any, result: Any, scale: Callable[[Tensor], Tensor]) -> None:  # noqa: D102
        if TAPS.passing is not None:
            TAPS.passing.end(plain=False)
        note_scaled(loss, result, scale)
        self._scales = True
        self.facts.token("scale")

    @looks
    def backward_begins(self, losses: Any, *, retained: bool = False) -> None:  # noqa: D102
        if self._dropped:  # by a GradScaler that skipped a step, as its gradients overflowed
            self.norms, self._exit_norm, self._dropped = [], None, False
            self._pending.clear()
        given = losses if isinstance(losses, (list, tuple)) else [losses]
        given = [unscaled(loss) for loss in given] if self._scales else given
        plain = [self._read(loss.detach()) for loss in given if isinstance(loss, Tensor) and loss.numel() == 1]
        touched = self._touched() if self.attention.awake else ()
        leaves = self.facts.backward_begins(given, touched, retained=retained)
        self.norms = self.norms if self.facts.order.backwards > 1 else []  # clipped before any pass
        self._pending.begins(plain, leaves, touched if self.attention.awake else None)

    def _read(self, loss: Tensor) -> Value:
        """Return a loss as a number where that waits for no device, and have its update looked at where it stands out."""
        if self.attention.share is None or not loss.is_cpu or type(loss) is not Tensor or not loss.is_floating_point():
            return loss
        value: float = loss.item()
        self.attention.saw(value)
        self.looks_now = self.looks_now or self.attention.roused
        return value

    @looks
    def backward_ends(self) -> None:  # noqa: D102
        self._pending.ends()
        if not self.looks_now:
            return
        if self.needs_exit_norm and self._numbers:
            self._exit_norm = total_norm(gradients_of(next(iter(self._numbers))))
        self._mark()
        self.facts.backward_ends()

    @looks
    def zeroed(self, owner: Optimizer | nn.Module) -> None:  # noqa: D102
        number = self._number_of(owner)
        self._dropped = self._pending.waits(None if self.facts.order.scaled else 0) and (
            self.facts.order.scaled or number == 0
        )
        self.facts.zeroed(number)

    def _number_of(self, owner: Optimizer | nn.Module) -> int | None:
        """Return the number of an optimizer, or of the one that has a module's parameters; None where that is not known yet."""
        return self._numbers.get(owner) if isinstance(owner, Optimizer) else self.samples.first_of(owner)

    @looks
    def unscaled(self, optimizer: Optimizer) -> None:  # noqa: D102
        self.facts.token("unscale")
        if self.looks_now:
            if self.needs_exit_norm:
                self._exit_norm = total_norm(gradients_of(optimizer))
            self._mark()

    def _mark(self) -> None:
        self.samples.mark()
        self._fresh = True

    @looks
    def loads(self, module: nn.Module, state: Any) -> None:  # noqa: D102
        self.facts.loads(module, state, next((o for o, k in self._numbers.items() if k == 0), None))

    @looks
    def clipped(self, kind: str, limit: float, norm: Tensor | None, first: int) -> None:  # noqa: D102
        self.facts.clipped(kind, limit)
        passes = TAPS.passing is not None and TAPS.passing.begun
        early = self.facts.order.backwards and not (passes or self._pending.waits(None))  # or after the step
        if norm is not None and not early and type(norm) is Tensor and first not in [seen for seen, _, _ in self.norms]:
            self.norms.append((first, limit, norm.detach()))
        if self.looks_now:
            self._mark()

    @looks
    def scheduled(self, scheduler: Any, metric: Any) -> None:  # noqa: D102
        if self.intervention is None or self.intervention.is_on():
            self.facts.scheduled(scheduler, self.updates, metric)

    def step_enters(self, optimizer: Optimizer) -> None:
        """Change the learning rates before a closure makes the gradients: LBFGS has read its own by the time that it returns."""
        if self.intervention is not None and not (self._only and optimizer not in self._numbers):
            self.intervention.set_lr(optimizer, self.updates)
            self._entered = optimizer

    def step_begins(self, optimizer: Optimizer) -> None:  # noqa: D102
        number = self._numbers.get(optimizer)
        if number is None:
            if self._only:
                self.facts.stepped_elsewhere(optimizer, self._numbers)
                return
            goes_on = self.intervention is not None and self.intervention.takes_over(optimizer)
            number = self._numbers[optimizer] = 0 if goes_on else len(self._numbers)
        if self.attention.share is not None and self.intervention is None:
            new = number not in self.facts.order
            self._probe(number, optimizer, new=new)
            if not (self.looks_now or new):
                return
        self._note_step(number, optimizer)
        if self.intervention is not None and self._entered is not optimizer:
            self.intervention.set_lr(optimizer, self.updates)
        self._entered = None
        scale = getattr(optimizer, "grad_scale", None)  # there while a GradScaler leaves unscaling to the optimizer
        scale = scale if isinstance(scale, Tensor) else None
        limit = None if self.intervention is None else self.intervention.max_grad_norm
        grads = gradients_of(optimizer, to_change=limit is not None)
        self._describe(number, optimizer, grads, scale)
        if limit is not None:
            self._clip(number, grads, scale)

    def _clip(self, number: int, grads: Sequence[Tensor], scale: Tensor | None) -> None:
        """Have the gradients shortened, also where nothing is looked at any more; where they cannot be, the run is of no use and says so."""
        assert self.intervention is not None
        try:
            clipped = self.intervention.clip(grads, scale)
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
            mine = identities(optimizer) if self.norms else set()
            self.norms = [each for each in self.norms if each[0] not in mine]
            stranger = self._strangers.setdefault(optimizer, -1 - len(self._strangers))
            self._step_over(stranger, optimizer)
            return
        if self.intervention is not None:
            self.intervention.reset_lr(optimizer)
        self._note_end(number, optimizer)
        self._decide(number, optimizer)
        if number == 0:
            self.updates += 1
            if self.intervention is not None:
                self.intervention.updated(self.updates)

    @looks
    def _probe(self, number: int, optimizer: Optimizer, *, new: bool) -> None:
        """Have the update in progress looked at where one of its gradients stands out, as far as that waits for no device; else pass it over."""
        probe = self.samples.probe() if number == 0 else None
        grad = None if probe is None else probe.grad
        if grad is not None:
            self.attention.probed(torch.linalg.vector_norm(grad).item())
            self.looks_now = self.looks_now or self.attention.roused
        if not (self.looks_now or new):
            if number == 0 and self.facts.survival.due:
                self.facts.survival.begins(optimizer, self.updates)
            self.facts.order.step(number, empty=False, line=False)
            self._fill(number, optimizer, self._losses_of(number, optimizer), (), None)

    @looks
    def _note_step(self, number: int, optimizer: Optimizer) -> None:
        if number == 0:
            self.facts.survival.begins(optimizer, self.updates, alone=self.attention.is_last(self.updates))
            self.attention.wanted = self.facts.survival.again
        self.facts.step_begins(number, optimizer, altered=self._is_altered(number))

    @looks
    def _note_end(self, number: int, optimizer: Optimizer) -> None:
        if number == 0 and self.looks_now:
            self.facts.survival.ends(optimizer)
        self.facts.step_ends(number)
        if self.norms:
            used_up = clippings_of(self.norms, optimizer, self._numbers)
            self.norms = [each for each in self.norms if all(each is not used for used in used_up)]
        self._exit_norm, self._dropped = None, False
        if number == 0:
            self._finish_row()

    @looks
    def _decide(self, number: int, optimizer: Optimizer) -> None:
        if number == 0:
            self.decide(optimizer, self.updates + 1)
            self.facts.updated(self.updates + 1, optimizer)
        self._step_over(number, optimizer)

    def decide(self, optimizer: Optimizer, updates: int) -> None:
        """Decide on the update after so many."""
        attention = self.attention
        attention.updated(updates, time.thread_time(), pairs=len(self._numbers) > 1 or self.facts.order.repeats)
        self.looks_now, self._fresh = attention.awake, False
        self.facts.order.look(awake=self.looks_now, weight=attention.weight)
        if attention.awake:
            TAPS.passing = None
            self._mark()
            return
        alone = self._plain and len(self._numbers) == 1 and not self._strangers and TAPS.listeners == [self]
        TAPS.passing = Passing(self, optimizer, attention.begins - updates) if alone else None

    @looks
    def _step_over(self, number: int, optimizer: Optimizer) -> None:
        self._pending.stepped(number, functools.partial(identities, optimizer))
        self.samples.add(number, (p for group in optimizer.param_groups for p in group["params"]))
        if self.looks_now:
            self._mark()

    # ---- rows

    def _hand_on(self, columns: Mapping[str, list[float]]) -> None:
        if self.facts.batches.read(columns) and not self.attention.sees:
            self.attention.rouse()
        self._sink(columns)

    def flush(self) -> None:
        """Hand on all rows so far."""
        if TAPS.passing is not None:
            TAPS.passing.end()
        self.rows.flush()

    def log(self, **values: Value) -> None:
        """Add values to the row of the update in progress; `loss` stands in for the one that `backward` was called on."""
        self.logged |= values

    @looks
    def _describe(self, number: int, optimizer: Optimizer, grads: Sequence[Tensor], scale: Tensor | None) -> None:
        self._fill(number, optimizer, self._losses_of(number, optimizer), grads, scale)
        if number == 0 and self.looks_now:
            self.facts.order.clipped_values(grads)
            self._snapshot.take(optimizer, self.updates, self.facts.names)

    def _losses_of(self, number: int, optimizer: Optimizer) -> Sequence[Value]:
        return self._pending.of(number, functools.partial(identities, optimizer))

    def _fill(self, number: int, optimizer: Optimizer, losses: Sequence[Value], grads: Sequence[Tensor], scale: Tensor | None) -> None:  # fmt: skip
        """Fill the row of the update in progress."""
        where = "" if number == 0 else f"/optimizer{number}"
        row = self._row
        if losses:
            row[f"loss{where}"] = losses[0] if len(losses) == 1 else summed(losses)
        norm, clipped = self._unclipped(number, optimizer, grads)
        if norm is not None:
            row[f"grad_norm{where}"] = norm if scale is None else norm / scale.to(norm.device)
        if clipped is not None:
            row[f"clipped{where}"] = clipped
        if number == 0 and (norm is None or self.attention.share is not None):
            row["looked"] = 0.0 if norm is None else 1.0
        row.update(learning_rates(optimizer.param_groups, where, self.rows.columns))

    def _unclipped(self, number: int, optimizer: Optimizer, grads: Sequence[Tensor]) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
        """Return the gradient norm before the loop's own clipping, and whether it was clipped, where that is known."""
        if mine := clippings_of(self.norms, optimizer, self._numbers):
            norms, limits = [n for _, _, n in mine], [limit for _, limit, _ in mine]
            if len(norms) == 1:
                return norms[0], norms[0] > limits[0]
            clipped = stacked([n > limit for n, limit in zip(norms, limits, strict=True)]).any()
            return torch.linalg.vector_norm(stacked(norms)), clipped
        if not self.looks_now or (self.needs_exit_norm and not self._fresh):
            return None, None
        if self._is_altered(number):  # since the last pass, by something unseen
            self.needs_exit_norm = self.needs_exit_norm or number == 0
            if number == 0 and self._exit_norm is not None:
                now = total_norm(grads)
                return self._exit_norm, None if now is None else now < self._exit_norm * (1 - 1e-6)
            return None, None
        return self._exit_norm if self._exit_norm is not None and number == 0 else total_norm(grads), None

    def _is_altered(self, number: int) -> bool:
        return self._fresh and self.samples.is_marked(number) and self.samples.is_touched(number)

    def _touched(self) -> list[int]:
        return [number for number in range(len(self._numbers)) if self.samples.is_touched(number)]

    def _finish_row(self) -> None:
        """Hand on the row of an update."""
        self._row |= self._snapshot.measured(self.facts.moved) | self.facts.logits.take()
        now = time.perf_counter()
        row = self._row | self.logged if self.logged else self._row
        if self.waits:
            row["data_wait_s"] = self.waited
        row["step_time_s"] = now - self.last
        self.rows.add(row)
        self._row, self.logged, self.waited, self.last = {}, {}, 0.0, now
