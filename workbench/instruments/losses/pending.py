"""`Pending`: the losses that were run backward and not stepped on yet, and which optimizers each of them reaches."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from workbench.instruments.rows import Value, summed

Mark = tuple[Tensor, int] | None
Clipping = tuple[int, float, Tensor]
"""Id of the first parameter, limit and norm."""
SAMPLES = 2
MOST = 64
"""Losses that wait one by one; of more, those that reach the same are kept as their sum (rule of thumb)."""


class Samples:
    """A few parameters of each optimizer whose gradients are compared with what they were: every change in place raises their version."""

    def __init__(self) -> None:
        self._refs: dict[int, list[weakref.ref[Tensor]]] = {}
        self._marks: dict[int, list[Mark]] = {}
        self._owners = weakref.WeakKeyDictionary[nn.Module, int | None]()

    def __len__(self) -> int:
        return len(self._refs)

    def add(self, number: int, parameters: Iterable[Tensor]) -> None:
        """Choose the samples of an optimizer, once: its smallest parameters that have a gradient."""
        used = [] if number in self._refs else [p for p in parameters if p.grad is not None]
        if used:
            self._refs[number] = [weakref.ref(p) for p in sorted(used, key=lambda p: p.numel())[:SAMPLES]]

    def first_of(self, module: nn.Module) -> int | None:
        """Return the first optimizer of which a sample is among a module's parameters; None where that is not known yet."""
        if module not in self._owners and self._refs:
            ids = {id(p) for p in module.parameters()}
            hits = [number for number, refs in self._refs.items() if any(id(ref()) in ids for ref in refs)]
            self._owners[module] = min((n for n in hits if n >= 0), default=None)
        return self._owners.get(module)

    def mark(self) -> None:
        """Keep the gradients and their versions; held, so that no other tensor takes their identity."""
        for number, refs in self._refs.items():
            self._marks[number] = _marks(refs)

    def is_marked(self, number: int) -> bool:
        """Tell whether gradients of an optimizer were marked."""
        return number in self._marks

    def is_touched(self, number: int) -> bool:
        """Tell whether gradients of an optimizer are not what they were when they were marked."""
        marks = self._marks.get(number)
        return marks is None or not _untouched(self._refs[number], marks)

    def probe(self) -> Tensor | None:
        """Return the smallest parameter that was chosen of the first optimizer, None where it has no gradient now or lies on another device."""
        param = self._refs[0][0]() if 0 in self._refs else None
        grad = None if param is None else param.grad
        return param if type(grad) is Tensor and grad.is_cpu and not (grad.is_sparse or grad.is_complex()) else None

    def changed(self) -> set[int]:
        """Return the optimizers of which a sample has another gradient than when it was marked."""
        pairs = ((number, self._refs[number], marks) for number, marks in self._marks.items())
        return {n for n, refs, marks in pairs if any(now != old for now, old in zip(_keys(_marks(refs)), _keys(marks), strict=True))}  # fmt: skip


class Pending:
    """Losses since the last step. Two of them that are both run backward before either optimizer steps are told apart by what they reach.

    What a loss reaches is seen from the gradients that its backward pass changes or, before the first step, from the leaves of its graph;
    where neither tells, it counts for whichever optimizer steps.
    """

    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        self._losses: list[_Loss] = []
        self._open: list[_Loss] = []
        self._left = set[int]()  # optimizers whose gradients are of a loss that another one has stepped on
        self.alone = Counter[int]()  # losses that one optimizer alone stepped on
        self.mixed = Counter[int]()  # those of them that came on top of such gradients

    def begins(self, losses: Sequence[Value], leaves: set[int] | None, changed: Collection[int] | None = None) -> None:
        """Take in that these losses are about to be run backward.

        Args:
            losses: their values.
            leaves: the parameters that they depend on, None where that is not known.
            changed: the optimizers whose gradients were changed, as zeroed, since the last pass ended; None where that is not known.
        """
        for loss in self._losses:
            if len(loss.used) == 1 and loss.beside is not None:
                self.alone.update(loss.used)
                self.mixed.update(loss.used & loss.beside)
            if loss.used and loss.reached:
                self._left = self._left | (loss.reached - loss.used)
        self._left = set() if changed is None else self._left.difference(changed)
        self._losses = [loss for loss in self._losses if not loss.used]
        if len(self._losses) > MOST:
            self._losses = _by_reach(self._losses)
        self._open = [_Loss(loss, leaves, None if changed is None else self._left) for loss in losses]
        self._losses += self._open
        if len(self._samples) > 1:
            self._samples.mark()

    def ends(self) -> None:
        """Take in that their backward pass has ended."""
        if len(self._samples) > 1:
            reached = self._samples.changed()
            for loss in self._open:
                loss.reached = reached or None
        self._open = []

    def clear(self) -> None:
        """Forget all of them."""
        self._losses = []

    def waits(self, number: int | None) -> bool:
        """Tell whether a loss that nobody has stepped on reaches an optimizer; None is any."""
        return any(
            not loss.used and (number is None or loss.reached is None or number in loss.reached)
            for loss in self._losses
        )

    def of(self, number: int, parameters: Callable[[], set[int]]) -> list[Value]:
        """Return the losses of an optimizer that is about to step, none where another one that is observed has stepped on just them already."""
        mine = self._mine(number, parameters)
        taken = {user for loss in mine for user in loss.used if user >= 0}
        if any([loss for loss in self._losses if user in loss.used] == mine for user in taken):
            return []
        return [loss.value for loss in mine]

    def stepped(self, number: int, parameters: Callable[[], set[int]]) -> None:
        """Take in that an optimizer has stepped: its losses are forgotten when the next one is run backward."""
        for loss in self._mine(number, parameters):
            loss.used.add(number)

    def _mine(self, number: int, parameters: Callable[[], set[int]]) -> list[_Loss]:
        """Return the losses that reach an optimizer; leaves tell only where they have parameters of it at all, which sharded ones have not."""
        known = parameters() if any(loss.reached is None and loss.leaves for loss in self._losses) else set[int]()
        tell = any(loss.reached is None and loss.leaves & known for loss in self._losses)
        return [
            loss for loss in self._losses
            if (number in loss.reached if loss.reached is not None else not tell or not loss.leaves or loss.leaves & known)
        ]  # fmt: skip


class _Loss:
    def __init__(self, value: Value, leaves: set[int] | None, beside: set[int] | None) -> None:
        self.value, self.leaves, self.beside = value, leaves or set[int](), beside
        self.reached: set[int] | None = None
        self.used: set[int] = set()


def _by_reach(losses: Sequence[_Loss]) -> list[_Loss]:
    """Return one loss, their sum, for all that reach the same and were not stepped on."""
    groups: dict[Any, list[_Loss]] = {}
    for loss in losses:
        key = (frozenset(loss.leaves), None if loss.reached is None else frozenset(loss.reached))
        groups.setdefault(key, []).append(loss)
    for first, *others in groups.values():
        first.value = summed([first.value, *(loss.value for loss in others)])
    return [group[0] for group in groups.values()]


def _keys(marks: Sequence[Mark]) -> list[Any]:
    return [None if mark is None else (id(mark[0]), mark[1]) for mark in marks]


def _marks(refs: Sequence[weakref.ref[Tensor]]) -> list[Mark]:
    found: list[Mark] = []
    for ref in refs:
        tensor = ref()
        grad = None if tensor is None else tensor.grad
        found.append(None if grad is None else (grad, grad._version))
    return found


def _untouched(refs: Sequence[weakref.ref[Tensor]], marks: Sequence[Mark]) -> bool:
    """Tell whether gradients are there and are what they were."""
    for ref, mark in zip(refs, marks, strict=True):
        tensor = ref()
        if mark is None or tensor is None or tensor.grad is not mark[0] or mark[0]._version != mark[1]:
            return False
    return bool(marks)


def identities(optimizer: Optimizer) -> set[int]:
    """Return the ids of an optimizer's parameters."""
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def clippings_of(clippings: list[Clipping], optimizer: Optimizer, optimizers: Collection[Optimizer]) -> list[Clipping]:
    """Return the clippings of an optimizer's gradients; those of parameters that no optimizer has count for whichever steps."""
    if len(optimizers) < 2 or not clippings:
        return clippings
    mine = identities(optimizer)
    others = {key for each in optimizers if each is not optimizer for key in identities(each)} - mine
    return [each for each in clippings if each[0] not in others]
