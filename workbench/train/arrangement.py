"""`Arrangement`: how the lanes of a stack can go through a traced program."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

__all__ = ["Arrangement", "Verdict", "arrangements"]


class Arrangement(NamedTuple):
    """How the lanes of a stack go through one traced program.

    Attributes:
        lanes_per_call: lanes in one call of the program.
        threads: calls at a time, each on one core; with 1 the single call has all cores.
    """

    lanes_per_call: int
    threads: int

    def __str__(self) -> str:
        """Return it as words."""
        return f"vmap, {self.lanes_per_call} a call, {self.threads} at a time"


class Verdict(NamedTuple):
    """What was decided for a stack.

    Attributes:
        arrangement: of the traced program's calls; None is plain autograd.
        reason: why.
        measured_ms: milliseconds of a step of all lanes by each way, where that was measured.
        lanes: it was measured on.
        lasting: whether it holds for later stacks of the same kind.
    """

    arrangement: Arrangement | None
    reason: str
    measured_ms: dict[str, float]
    lanes: int = 0
    lasting: bool = True


def arrangements(lanes: int, device: torch.device, threads: int) -> list[Arrangement]:
    """Return what is worth trying: all lanes in one call, and on a CPU calls of fewer lanes spread over the cores."""
    found = [Arrangement(lanes, 1)]
    if device.type == "cpu" and threads > 1 and lanes > 1:
        found += [Arrangement(per_call, threads) for per_call in sorted({1, math.ceil(lanes / threads)})]
    return found
