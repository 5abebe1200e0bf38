"""Choices that were measured before: a study trains stack after stack of the same kind, of more lanes or fewer."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable

import torch

from workbench.config import TrainConfig
from workbench.train.arrangement import Verdict
from workbench.train.lane_stack import LaneStack
from workbench.workloads.base import Workload

__all__ = ["forget_choices", "recall", "remember", "stack_kind"]

ALL = 2**31  # lanes in a call: however many there are
REMEMBERED = 32  # rule of thumb: kinds of stacks whose choices are kept

_known: OrderedDict[Hashable, tuple[Workload, dict[int, Verdict]]] = OrderedDict()


def stack_kind(stack: LaneStack, config: TrainConfig) -> tuple[Hashable, ...]:
    """Return what a choice depends on, the model and the number of lanes aside."""
    shared = (config.batch_size, config.accumulate_steps, config.precision, config.bn_stat_examples)
    batches = (*shared, len(set(stack.streams)))
    return tuple(stack.shapes), stack.values.dtype, str(stack.device), batches, torch.get_num_threads()


def recall(key: Hashable, *, lanes: int) -> Verdict | None:
    """Return what was found for stacks like this one of about as many lanes, or what follows from it.

    Where a call for each lane was the fastest, it is so for fewer lanes too, for which sharing a call gains less.

    Args:
        key: of the kind of stack.
        lanes: in the stack.
    """
    if key not in _known:
        return None
    _known.move_to_end(key)
    found = _known[key][1]
    if _size(lanes) in found:
        return found[_size(lanes)]
    for size, verdict in sorted(found.items()):
        single = verdict.arrangement is not None and verdict.arrangement.lanes_per_call == 1
        if single and size > _size(lanes) > 1:
            return verdict
    return None


def remember(key: Hashable, workload: Workload, verdict: Verdict, *, lanes: int) -> None:
    """Keep a choice; the workload is held, so that an id in the key stays its own."""
    if verdict.arrangement is not None and 1 < verdict.arrangement.lanes_per_call == lanes:
        verdict = verdict._replace(arrangement=verdict.arrangement._replace(lanes_per_call=ALL))
    _known.setdefault(key, (workload, {}))[1][_size(lanes)] = verdict
    while len(_known) > REMEMBERED:
        _known.popitem(last=False)


def forget_choices() -> None:
    """Let go of every choice."""
    _known.clear()


def _size(lanes: int) -> int:
    """Return the power of two that the number of lanes is counted as."""
    return int(2 ** math.ceil(math.log2(lanes)))
