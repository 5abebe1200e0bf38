"""Hooks that interfere with training at one step, or look at its threads."""

from __future__ import annotations

import signal
from collections.abc import Callable

import torch

from workbench.train.hooks import Hook, Step


class At(Hook):
    """Raises an error, sends this process a signal or calls a function at one step."""

    def __init__(self, step: int, what: BaseException | signal.Signals | Callable[[Step], object]) -> None:
        self.step, self.what = step, what

    def on_step(self, step: Step) -> None:
        if step.index != self.step:
            return
        if isinstance(self.what, BaseException):
            raise self.what
        if isinstance(self.what, signal.Signals):
            signal.raise_signal(self.what)
        else:
            self.what(step)


class Threads(Hook):
    """Notes with how many threads torch computes."""

    def __init__(self) -> None:
        self.seen: set[int] = set()

    def on_step(self, step: Step) -> None:
        self.seen.add(torch.get_num_threads())
