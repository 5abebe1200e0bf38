"""`Trainings`: which trainings a program makes one after the other; `BuiltLines`: where it builds their optimizers."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from workbench.instruments.caller import own_line
from workbench.instruments.losses.pending import identities

_MOST = 8
_KEPT = 1000
"""Trainings that are told of."""
_LOOKS, _NUMBERS = 5, 64
"""Times that weights which somebody has written to are compared with those at first, and numbers of each parameter that are."""
_AS_LONG = 0.9
"""Share of the updates of the longest training that an earlier one has to have to be as long (rule of thumb: the folds of a cross-validation differ by less)."""
_ANEW = 3
"""Optimizers of a kind, each going on where the one before has ended, that are one training with its optimizer built anew; of two, the first may be a pretraining (rule of thumb)."""
_ORDINALS = ("first", "second", "third", "fourth", "fifth")


class BuiltLines:
    """Notes the line of each optimizer that is built while it watches, and calls `at_first` after the first one."""

    def __init__(self, at_first: Callable[[], None] = lambda: None) -> None:
        self._at_first = at_first
        self._lines: dict[int, tuple[weakref.ref[Optimizer], str]] = {}  # by identity: not every optimizer has a hash

    def watch(self) -> Callable[[], None]:
        """Begin, and return what ends it."""
        original = Optimizer.__init__

        @functools.wraps(original)
        def built(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            self._lines[id(optimizer)] = (weakref.ref(optimizer), own_line())
            original(optimizer, *args, **kwargs)
            self._at_first()

        Optimizer.__init__ = built  # type: ignore[method-assign,assignment]

        def end() -> None:
            Optimizer.__init__ = original  # type: ignore[method-assign]

        return end

    @property
    def any(self) -> bool:
        """Tell whether an optimizer was built."""
        return bool(self._lines)

    def of(self, optimizers: Sequence[Optimizer]) -> list[str]:
        """Return the line of each of the first few optimizers, empty where none was seen."""
        found = [(each, *self._lines.get(id(each), (lambda: None, ""))) for each in optimizers[:_MOST]]
        return [line if ref() is each else "" for each, ref, line in found]


@dataclass
class Training:
    """Updates by optimizers that step in turn.

    Attributes:
        first: the order of its first optimizer among all that step, whose updates count.
        last: the order of its last one.
        goes_on: whether another optimizer of its kind has stepped before, on the same weights, which nobody has touched since.
    """

    first: int
    last: int
    optimizer: str
    line: str = ""
    updates: int = 0
    goes_on: bool = False


class Trainings:
    """Tells the trainings apart that a program makes one after the other, such as a search for a learning rate and what comes after it.

    Optimizers that step in turn are of one training. One whose weights are put back to those at first begins another.

    Attributes:
        wanted: orders of the first and the last optimizer that count, and whether each but the first goes on with the training; None while
            that is to be found out, and the first optimizer counts.
    """

    def __init__(self) -> None:
        self.wanted: tuple[int, int | None, bool] | None = None
        self.found: list[Training] = []
        self._orders = weakref.WeakKeyDictionary[Optimizer, int]()
        self._count, self._looks = 0, _LOOKS
        self._owned: set[int] = set()
        self._samples: list[
            tuple[weakref.ref[Tensor], Tensor]
        ] = []  # parameters of the last optimizer that was new, as they were
        self._versions: list[int] = []
        self._moved = False  # whether its learning rate was above 0

    def begins(self, optimizer: Optimizer) -> None:
        """Take in that an optimizer is about to step."""
        order = self._orders.get(optimizer)
        if order is None or (order == self.found[-1].first == self.found[-1].last and self._is_put_back()):
            line = own_line()
            owned, untouched = identities(optimizer), self._versions == self._now()
            goes_on = bool(self.found) and type(optimizer).__name__ == self.found[-1].optimizer and owned == self._owned
            self._orders[optimizer] = self._count
            self.found.append(
                Training(self._count, self._count, type(optimizer).__name__, line, goes_on=goes_on and untouched)
            )
            self._count, self._owned = self._count + 1, owned
            self._keep(optimizer)
        elif order < self.found[-1].first:
            while order < self.found[-1].first:
                last = self.found.pop().last
            self.found[-1].last = last

    def _keep(self, optimizer: Optimizer) -> None:
        plain = [p for group in optimizer.param_groups for p in group["params"] if type(p) in (Tensor, nn.Parameter)]
        samples = plain if len(plain) < 4 else [*plain[:2], *plain[-2:]]
        self._samples = [(weakref.ref(p), p.detach().reshape(-1)[:_NUMBERS].clone()) for p in samples]
        self._moved = False

    def _now(self) -> list[int]:
        return [-1 if (p := ref()) is None else p._version for ref, _ in self._samples]

    def _is_put_back(self) -> bool:
        """Tell whether somebody has written to the weights since the last step, and they are what they were before the first."""
        if not (self._looks and self._moved) or self._versions == self._now():
            return False
        self._looks -= 1
        pairs = [(p, was) for ref, was in self._samples if (p := ref()) is not None]
        return bool(pairs) and all(torch.equal(p.detach().reshape(-1)[:_NUMBERS], was) for p, was in pairs)

    def ended(self, optimizer: Optimizer) -> None:
        """Take in that it has stepped."""
        if self._orders.get(optimizer) == self.found[-1].first:
            self.found[-1].updates += 1
        self._moved = self._moved or any(
            isinstance(lr := group.get("lr"), Tensor) or lr for group in optimizer.param_groups
        )
        self._versions = self._now()

    @property
    def is_on(self) -> bool:
        """Tell whether the update in progress is one that is wanted."""
        return self.wanted is None or (bool(self.found) and self.found[-1].last >= self.wanted[0])

    @property
    def is_over(self) -> bool:
        """Tell whether all that is wanted was made."""
        last = None if self.wanted is None else self.wanted[1]
        return last is not None and self.found[-1].last > last

    def takes_over(self) -> bool:
        """Tell whether the optimizer that is about to step goes on for the first one that counts."""
        return self.wanted is not None and self.wanted[2] and self.found[-1].first > self.wanted[0]

    def to_dict(self) -> list[dict[str, Any]]:
        """Return them as JSON values."""
        return [asdict(each) for each in self.found[:_KEPT]]


def chosen(found: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return which training is judged, the longest, or the first of those that are as long; None where there is only one.

    Returns:
        "wanted", see `Trainings`, and "said".
    """
    rows = _joined(found)
    if len(found) < 2:
        return None
    total, most = (take(row["updates"] for row in rows) for take in (sum, max))
    place = next(k for k, row in enumerate(rows) if row["updates"] >= _AS_LONG * most)
    row = rows[place]
    where, anew = f" ({row['line']})" if row["line"] else "", row["count"] > 1
    nth = f"the {_ORDINALS[place]}" if place < len(_ORDINALS) else f"number {place + 1}"
    which = f"{nth} of {len(rows)} trainings one after the other, {row['updates']:,} of {total:,} updates"
    said = which if len(rows) > 1 else f"{total:,} updates"
    built = f", with an optimizer that is built anew {row['count'] - 1} times" if anew else ""
    return {
        "wanted": [row["first"], row["last"] if place + 1 < len(rows) else None, anew],
        "said": f"judged: {said}{built}{where}",
    }


def _joined(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the trainings, those as one in which the optimizer is built anew again and again."""
    chains: list[list[Mapping[str, Any]]] = []
    for each in found:
        if each["goes_on"]:
            chains[-1].append(each)
        else:
            chains.append([each])
    rows = []
    for chain in chains:
        for part in [chain] if len(chain) >= _ANEW else [[each] for each in chain]:
            whole = {"last": part[-1]["last"], "updates": sum(each["updates"] for each in part), "count": len(part)}
            rows.append({**part[0], **whole})
    return rows
