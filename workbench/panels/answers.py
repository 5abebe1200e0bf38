"""What a panel asks with its controls, and what it answers; without widgets."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from workbench.plots.redraw import Draw

__all__ = ["Answer", "Choice", "Control", "Slider"]


class Answer(NamedTuple):
    """What a panel says for one setting of its controls.

    Attributes:
        words: plain text, a sentence or a few.
        draws: the figures side by side.
    """

    words: str
    draws: Sequence[Draw]


@dataclass(frozen=True, kw_only=True)
class Slider:
    """A number from a range.

    Attributes:
        label: beside it.
        low: smallest value.
        high: largest value.
        start: first value.
        step: from one value to the next; all values are integers where it is one.
    """

    label: str
    low: float
    high: float
    start: float
    step: float = 1


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One of several values, in an order in which it makes sense to slide from one to the next.

    Attributes:
        label: beside it.
        options: what each is called, and its value.
        start: first value.
        slides: False where they have no order: a list that drops down.
    """

    label: str
    options: Sequence[tuple[str, Hashable]]
    start: Hashable
    slides: bool = True


Control = Slider | Choice
