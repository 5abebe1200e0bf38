"""Stacks of lanes that fit in memory, one after the other; a stack that does not fit after all is halved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from workbench.train.lane import Lane
from workbench.train.lane_groups import group_lanes

__all__ = ["is_out_of_memory", "train_stacks"]

_SAID = ("out of memory", "can't allocate memory", "not enough memory")


def train_stacks(lanes: Sequence[Lane], train: Callable[[Sequence[Lane]], None], *, fit: int) -> None:
    """Train all lanes, at most `fit` at a time.

    Args:
        lanes: equal in what a stack shares.
        train: trains one stack; what it has checkpointed is kept when it raises.
        fit: lanes that fit in memory together, as far as that can be known before.

    Raises:
        Exception: what `train` raised; out of memory only where a single lane does not fit.
    """
    for stack in _pieces(lanes, fit):
        try:
            train(stack)
            continue
        except Exception as error:
            if len(stack) == 1 or not is_out_of_memory(error):
                raise
        if torch.cuda.is_available():  # outside the handler, whose traceback holds the stack that failed
            torch.cuda.empty_cache()
        left = [lane.again() for lane in stack if not lane.writer.finished]
        for group in group_lanes(left):  # their newest checkpoints need not be of the same step
            train_stacks(group, train, fit=(len(stack) + 1) // 2)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or one that it came from, says that memory ran out."""
    while error is not None:
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            return True
        if isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _SAID):
            return True
        error = error.__cause__
    return False


def _pieces(lanes: Sequence[Lane], fit: int) -> Iterator[Sequence[Lane]]:
    """Yield the lanes in pieces of about equal size, none larger than `fit`."""
    count = -(-len(lanes) // max(1, fit))
    for piece in range(count):
        yield lanes[piece * len(lanes) // count : (piece + 1) * len(lanes) // count]
